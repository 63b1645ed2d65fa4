"""Texts that evict tokens: each layer of each text has a sequence of its own, in a cache of the text's own.

As `kvcache.engine.evicting` has it for one text. What a layer evicts depends on the pieces in which the text ran, so
prompts run in the pieces of an `InferenceEngine`, decodes one by one without guesses, and nothing is shared or cached.
A text begins where there is memory for all that it may ever keep, so it is never preempted. The products of a pass are
those of all rows together; attention is one call per text and layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from kvcache.core.memory import total
from kvcache.engine.evicting import EvictingSequence
from kvcache.networks.protocols import Attend, Float32
from kvcache.paged.cache import PagedKvCache
from kvcache.serving.blocks import SharedBlocks
from kvcache.serving.work import Work

__all__ = ["EvictingTexts"]


class EvictingTexts(SharedBlocks):
    """The memory of an engine that evicts.

    Args:
        make: makes the sequence of a text, with a cache of its own; it is used again for later ones.
        most: the most texts that run.
    """

    def __init__(self, make: Callable[[], EvictingSequence], most: int) -> None:
        super().__init__(PagedKvCache(1, 1, 1, 8, num_layers=0, dtype="f32"))
        self._make, self._most = make, most
        self._texts = [make()]
        self._used: dict[int, int] = {}  # the text of each sequence
        self.chunk = self._texts[0].chunk
        self._blocks_per_text = self._texts[0].cache.total_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return 0

    def cached(self, work: Work) -> int:
        return 0

    def start(self, work: Work, running: Sequence[Work]) -> bool:
        if len(self._used) == self._most:
            return False
        number = next(i for i in range(self._most) if i not in self._used.values())
        if number == len(self._texts):
            self._texts.append(self._make())
        seq_id = next(self._ids)
        self._texts[number].clear()
        self._used[seq_id] = number
        work.moved(seq_id, 0)
        return True

    def _text(self, work: Work) -> EvictingSequence:
        return self._texts[self._used[work.seq_id]]

    def fork(self, leader: Work, follower: Work, computed: int) -> None:
        """MemoryError: a follower runs by itself."""
        raise MemoryError

    def append(self, pieces: Sequence[tuple[Work, int]]) -> None:
        """Nothing: each text has room for what it may keep."""

    def index(self, work: Work) -> None:
        """Nothing: a prefix with holes is not shared."""

    def stop(self, work: Work) -> None:
        if work.seq_id >= 0:
            seq_id = work.seq_id
            work.moved(-1, 0)
            self._texts[self._used[seq_id]].clear()
            del self._used[seq_id]

    def ran(self, work: Work, count: int, wrong: int) -> None:
        work.moved(work.seq_id, work.computed + count)

    def mend(self, running: Sequence[Work]) -> list[Work]:
        lost = []
        for text in self._texts:
            text.mend()
        for work in running:
            if work.seq_id >= 0 and self._text(work).num_tokens != work.computed:
                lost.append(work)  # what it evicted cannot come back: it runs again, in the same pieces
                work.moved(-1, 0)
        self._used = {work.seq_id: self._used[work.seq_id] for work in running if work.seq_id >= 0}
        for number, text in enumerate(self._texts):
            if number not in self._used.values():
                text.clear()
        return lost

    @contextmanager
    def attending(self, pieces: Sequence[tuple[Work, int]]) -> Iterator[tuple[Attend, dict[str, Any]]]:
        """The `attend` of pieces of texts, and keyword arguments of the network; at the end layers evict."""
        with ExitStack() as stack:
            begun = [stack.enter_context(self._text(work).piece(count)) for work, count in pieces]
            stops = np.cumsum([count for _, count in pieces])
            parts = [slice(stop - count, stop) for stop, (_, count) in zip(stops, pieces, strict=True)]
            places: dict[str, Any] = {}
            if any(sinks is not None for _, sinks in begun):
                each = [
                    np.arange(work.computed, work.computed + count) if sinks is None else sinks
                    for (_, sinks), (work, count) in zip(begun, pieces, strict=True)
                ]
                places["sink_positions"] = np.concatenate(each)

            def attend(
                layer: int, queries: Float32, keys: Float32, values: Float32, sink_queries: Float32 | None = None, /
            ) -> Float32:
                mixed = [
                    own(layer, queries[part], keys[part], values[part],
                        None if sinks is None or sink_queries is None else sink_queries[part])
                    for (own, sinks), part in zip(begun, parts, strict=True)
                ]  # fmt: skip
                return mixed[0] if len(mixed) == 1 else np.concatenate(mixed)

            yield attend, places

    def count(self) -> dict[str, int]:
        used = sum(self._texts[number].cache.used_block_count for number in self._used.values())
        return {"free": self._most * self._blocks_per_text - used, "claimed": used, "cached": 0}

    def memory(self) -> dict[str, int]:
        caches = [{**text.cache.memory(), "weights": 0} for text in self._texts]
        return total(super().memory(), *caches)

    def check(self, running: Sequence[Work]) -> None:
        assert sorted(work.seq_id for work in running) == sorted(self._used), "texts and works differ"
        assert len(set(self._used.values())) == len(self._used), "two works have one text"
        for text in self._texts:
            text.cache.check()
            text.check()
        for work in running:
            assert self._text(work).num_tokens == work.computed, f"{work}: its text has other tokens"
        for number, text in enumerate(self._texts):
            used = number in self._used.values()
            assert used or not text.cache.used_block_count, f"text {number} is not in use and not empty"
