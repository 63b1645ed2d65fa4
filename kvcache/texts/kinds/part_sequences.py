"""The sequences of `SeenParts` in a cache, and the queries of a pass that attend to them.

A part is a sequence that shares the blocks of its cached text and has the tokens that are seen alone. All parts of all
texts of a pass are attended to in one call of a layer, by queries that the network has turned to where each part
stands.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import KvCacheError
from kvcache.networks.protocols import Float32
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.merging import merge_attention
from kvcache.paged.queried import QueriedSequences
from kvcache.texts.block_index import PartStart
from kvcache.texts.text import Text

__all__ = ["MISSING", "PartQueries", "PartSequences"]

Int64 = NDArray[np.int64]
MISSING = -1  # in place of a part's sequence
_FIRST = 2**62  # of the ids of these sequences: those of texts, and of callers, are below


class PartSequences:
    """The sequences of parts in a cache.

    Args:
        cache: K and V.

    Attributes:
        ids: those that are alive, or are about to be.
    """

    def __init__(self, cache: PagedKvCache) -> None:
        self._cache, self.ids = cache, set[int]()
        self._numbers = count(_FIRST)

    def adopt(self, starts: Sequence[PartStart | None]) -> tuple[int, ...]:
        """Start the sequences of parts whose blocks are held; `MISSING` where one is not."""
        found: list[int] = []
        try:
            for start in starts:
                found.append(MISSING if start is None else self._adopt(start))
        except Exception:
            self.free(found)
            raise
        return tuple(found)

    def _adopt(self, start: PartStart) -> int:
        seq_id = next(self._numbers)
        self.ids.add(seq_id)
        try:
            self._cache.adopt(seq_id, start.blocks[: -(-start.num_tokens // self._cache.block_size)], start.num_tokens)
            if len(start.seen) < start.num_tokens:
                self._cache.keep_tokens(seq_id, start.seen)
        except Exception:
            self.free([seq_id])
            raise
        return seq_id

    def fork(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Start copies of sequences."""
        found: list[int] = []
        try:
            for each in ids:
                found.append(MISSING if each == MISSING else next(self._numbers))
                if each != MISSING:
                    self.ids.add(found[-1])
                    self._cache.fork(each, found[-1])
        except Exception:
            self.free(found)
            raise
        return tuple(found)

    def free(self, ids: Collection[int]) -> None:
        """End sequences, those that there are."""
        for each in ids:
            if each in self.ids:
                with suppress(KvCacheError):  # an exception ended its start
                    self._cache.free(each)
                self.ids.discard(each)

    def free_others(self, kept: Collection[int]) -> None:
        """End all sequences but some."""
        self.free(sorted(self.ids.difference(kept)))


class _Merge(NamedTuple):
    """Which rows of a pass see a part: those from `first` to `stop`; its own rows begin at `start`."""

    first: int
    stop: int
    start: int


class PartQueries:
    """The queries of a pass that attend to parts.

    Args:
        texts: those of the pass.
        index: which of `Text.places` has the ids of sequences.
        lens: the rows of each.

    Attributes:
        sequences: the parts, as a cache takes them; each has the rows that see it.
        rows: which row of the pass each of their queries is, `(m,)`.
        positions: where these queries are turned to, `(m,)`.
    """

    def __init__(self, texts: Sequence[Text], index: int, lens: Int64) -> None:
        ids, counts, rows, places = list[int](), list[int](), list[Int64](), list[Int64]()
        self._merges: list[tuple[int, int, list[_Merge]]] = []
        stop = start = 0
        for text, length in zip(texts, lens.tolist(), strict=True):
            stop += length
            if text.prefix is None or not text.prefix.parts:
                continue
            own, merges = text.places_of(text.computed, length), list[_Merge]()
            for part, seq_id in zip(text.prefix.parts, text.places[index], strict=True):
                unseen = max(0, part.since - text.computed)
                if unseen < length:
                    ids.append(seq_id)
                    counts.append(length - unseen)
                    rows.append(np.arange(stop - length + unseen, stop))
                    places.append(own[unseen:] - part.offset)
                    merges.append(_Merge(stop - length + unseen, stop, start))
                    start += length - unseen
            self._merges.append((stop - length, stop, merges))
        self.rows, self.positions = np.concatenate(rows), np.concatenate(places)
        self.sequences = QueriedSequences(np.array(ids, np.uint64), np.array(counts)).kept()

    @staticmethod
    def are_due(texts: Sequence[Text], lens: Int64) -> bool:
        """Whether a row of the pass sees a part."""
        for text, length in zip(texts, lens.tolist(), strict=True):
            if text.prefix is not None and any(part.since < text.computed + length for part in text.prefix.parts):
                return True
        return False

    def merge(self, mixed: Float32, masses: Float32, outputs: Float32, logs: Float32) -> None:
        """Merge what rows found of their parts, in the order of these, and of their own text, `mixed`, in place.

        Args:
            mixed, masses: outputs and log-sum-exps of the rows of the pass.
            outputs, logs: those of the queries of parts.
        """
        for first, stop, merges in self._merges:
            if not merges:
                continue
            found, lse = np.zeros_like(mixed[first:stop]), np.full_like(masses[first:stop], -np.inf)
            for each in merges:
                rows = slice(each.first - first, stop - first)
                part = slice(each.start, each.start + each.stop - each.first)
                found[rows], lse[rows] = merge_attention(found[rows], lse[rows], outputs[part], logs[part])
            mixed[first:stop], masses[first:stop] = merge_attention(
                found, lse, mixed[first:stop], masses[first:stop]
            )
