"""llama.cpp with several sequences in one batch, through the functions that its server is made of."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bench.serving.engines import Network

__all__ = ["LlamaCpp"]

Tokens = npt.NDArray[np.uint32]
SLOTS = 64  # sequences that keep their tokens for later requests
BATCH = 512  # tokens of a step


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

    def __init__(self, network: Network, tokens: int, longest: int, running: int, threads: int) -> None:
        import llama_cpp

        del longest
        self._api: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(network.file).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"{network.file.name} is not read")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = -(-tokens // 256) * 256, BATCH, BATCH
        settings.n_seq_max, settings.kv_unified = SLOTS, True
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._slots, self._queue = [_Slot(i) for i in range(SLOTS)], list[tuple[int, list[int], int]]()
        self._running, self._prefilled, self._clock = running, 0, 0

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
            logits = self._api.llama_get_logits_ith(self._context, row)
            token = int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
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
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

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
                self._api.llama_memory_seq_rm(self._memory, slot.seq_id, count, -1)
            else:
                self._api.llama_memory_seq_rm(self._memory, slot.seq_id, -1, -1)
                self._api.llama_memory_seq_cp(self._memory, source.seq_id, slot.seq_id, 0, count)
            slot.key, slot.tokens, slot.computed, slot.left, slot.used = key, prompt, count, new, self._clock
        self._queue = waiting

    def _fill(self, pieces: list[tuple[_Slot, int]]) -> list[int | None]:
        """The next tokens of slots; in which row of the batch the logits of each are due."""
        batch, rows, due = self._batch, 0, list[int | None]()
        for slot, count in pieces:
            for pos in range(slot.computed, slot.computed + count):
                batch.token[rows], batch.pos[rows] = slot.tokens[pos], pos
                batch.n_seq_id[rows], batch.seq_id[rows][0], batch.logits[rows] = 1, slot.seq_id, 0
                rows += 1
            whole = slot.computed + count == len(slot.tokens)
            batch.logits[rows - 1] = whole
            due.append(rows - 1 if whole else None)
        batch.n_tokens = rows
        return due

    def _decode(self) -> None:
        while (status := self._api.llama_decode(self._context, self._batch)) != 0:
            kept = [slot for slot in self._slots if slot.key is None and slot.computed]
            if status != 1 or not kept:
                raise MemoryError(f"llama_decode returned {status}")
            oldest = min(kept, key=lambda slot: slot.used)  # there are too few cells
            self._api.llama_memory_seq_rm(self._memory, oldest.seq_id, -1, -1)
            oldest.tokens, oldest.computed = [], 0


def _common(a: list[int], b: list[int]) -> int:
    """The number of first tokens that are the same."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])
