"""llama.cpp and ik_llama.cpp with several sequences in one batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from bench.engine.llama_api import BATCH, IkBatchesApi, LlamaApi

if TYPE_CHECKING:
    from bench.serving.engines import Network

__all__ = ["IkLlamaCpp", "LlamaCpp"]

Tokens = npt.NDArray[np.uint32]
SLOTS = 64  # sequences that keep their tokens for later requests


@dataclass
class _Slot:
    """A sequence: the tokens of its request, how many of them have run, and when it was last used."""

    seq_id: int
    key: int | None = None
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    left: int = 0
    used: int = 0


class LlamaCpp:
    """llama.cpp, K and V in f16, in one pool of cells for all sequences.

    As in its server, each request takes a slot, decodes run first and prompts fill the batch. More than there, a
    request copies the longest prefix that any slot has, and waits for one that another slot is about to compute.
    """

    api: ClassVar[type[LlamaApi]] = LlamaApi

    def __init__(self, network: Network, tokens: int, longest: int, running: int, threads: int) -> None:
        del longest
        self._api = self.api(network.file, threads, tokens, SLOTS)
        self._slots, self._queue = [_Slot(i) for i in range(SLOTS)], list[tuple[int, list[int], int]]()
        self._running, self._prefilled, self._clock, self._rows = running, 0, 0, 0

    def submit(self, key: int, prompt: Tokens, new: int) -> None:
        self._queue.append((key, prompt.tolist(), new))

    def step(self) -> list[tuple[int, list[int]]]:
        self._clock += 1
        self._admit()
        busy = sorted((slot for slot in self._slots if slot.key is not None), key=lambda s: len(s.tokens) - s.computed)
        pieces: list[tuple[_Slot, int]] = []
        left = BATCH
        for slot in busy:
            count = min(left, len(slot.tokens) - slot.computed)
            if count:
                pieces.append((slot, count))
            left -= count
        if not pieces:
            return []
        due = self._fill(pieces)
        self._decode()
        found = []
        for (slot, count), row in zip(pieces, due, strict=True):
            slot.computed += count
            slot.used = self._clock
            self._prefilled += count if count > 1 else 0
            if row is None:
                continue
            token = int(self._api.logits(row).argmax())
            assert slot.key is not None
            found.append((slot.key, [token]))
            slot.tokens.append(token)
            slot.left -= 1
            if not slot.left:
                slot.key, slot.tokens = None, slot.tokens[: slot.computed]
        return found

    def prefilled(self) -> int | None:
        return self._prefilled

    def close(self) -> None:
        self._api.close()

    def _admit(self) -> None:
        waiting = []
        for key, prompt, new in self._queue:
            shared = [(_common(prompt, slot.tokens), slot) for slot in self._slots]
            has = [(min(count, slot.computed, len(prompt) - 1), slot) for count, slot in shared]
            count, source = max(has, key=lambda each: each[0])
            coming = max((count for count, slot in shared if slot.key is not None), default=0)
            idle = [slot for slot in self._slots if slot.key is None]
            if len(idle) <= SLOTS - self._running or min(coming, len(prompt) - 1) > count:
                waiting.append((key, prompt, new))
                continue
            slot = source if source in idle and count == source.computed else min(idle, key=lambda s: s.used)
            if slot is source:
                self._api.forget(slot.seq_id, count)
            else:
                self._api.forget(slot.seq_id)
                self._api.copy(source.seq_id, slot.seq_id, count)
            slot.key, slot.tokens, slot.computed, slot.left, slot.used = key, prompt, count, new, self._clock
        self._queue = waiting

    def _fill(self, pieces: list[tuple[_Slot, int]]) -> list[int | None]:
        """The next tokens of slots; in which row of the batch the logits of each are due."""
        rows, due = 0, list[int | None]()
        for slot, count in pieces:
            last = slot.computed + count - 1
            whole = count == len(slot.tokens) - slot.computed
            for pos in range(slot.computed, last + 1):
                self._api.put(rows, slot.tokens[pos], pos, slot.seq_id, due=whole and pos == last)
                rows += 1
            due.append(rows - 1 if whole else None)
        self._rows = rows
        return due

    def _decode(self) -> None:
        while (status := self._api.run(self._rows)) != 0:
            kept = [slot for slot in self._slots if slot.key is None and slot.computed]
            if status != 1 or not kept:
                raise MemoryError(f"llama_decode returned {status}")
            oldest = min(kept, key=lambda slot: slot.used)  # there are too few cells
            self._api.forget(oldest.seq_id)
            oldest.tokens, oldest.computed = [], 0


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp in the same way, without flash attention."""

    api = IkBatchesApi


def _common(a: list[int], b: list[int]) -> int:
    """The number of first tokens that are the same."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])
