"""The sequences of `SeenParts` in a cache, and the queries of a pass that attend to them.

A part is a sequence that shares the blocks of its cached text and has the tokens that are seen alone. All parts of all
texts of a pass are attended to in one call of a layer, by queries that the network has turned to where each part
stands.

With a residual, a text begins its groups behind its parts, which are read packed as groups before a query's own are:
what stands there does not depend on where the groups of the cached text end. The first tokens of the request are read
in f16, as those of any text, in the part that has them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import KvCacheError
from kvcache.kernels.functions import merge_parts
from kvcache.networks.protocols import Float32
from kvcache.paged.cache import PagedKvCache
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
            cache, count = self._cache, start.num_tokens
            cache.adopt(seq_id, start.blocks[: -(-count // cache.block_size)], count)
            if start.firsts and count < cache.first_tokens:
                cache.unpack(seq_id, start.firsts)
            elif start.firsts:
                cache.unpack(seq_id, (), start.firsts)
            if len(start.seen) < count:
                cache.keep_tokens(seq_id, start.seen)
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


class PartQueries:
    """The queries of a pass that attend to parts.

    Args:
        texts: those of the pass.
        index: which of `Text.places` has the ids of sequences.
        own_ids: their own sequences; None: these are attended to apart.
        lens: the rows of each.

    Attributes:
        with_own: whether there are `own_ids`, and each text has one row: queries for these sequences come first.
        sequences: the parts, as a cache takes them; each has the rows that see it.
        rows: which row of the pass each of their queries is, `(m,)`.
        positions: where these queries are turned to, `(m,)`.
    """

    def __init__(self, texts: Sequence[Text], index: int, own_ids: NDArray[np.uint64] | None, lens: Int64) -> None:
        self.with_own = own_ids is not None and bool((lens == 1).all())
        ids, counts, rows, places = list[int](), list[Int64](), list[Int64](), list[Int64]()
        stop = 0
        for text, length in zip(texts, lens.tolist(), strict=True):
            stop += length
            if text.prefix is None or not text.prefix.parts:
                continue
            sinces, offsets = text.prefix.sinces, text.prefix.offsets
            own = np.arange(length)
            sees = sinces[:, None] <= own + text.computed  # (parts, rows)
            count = np.count_nonzero(sees, axis=1)
            ids += [seq_id for seq_id, some in zip(text.places[index], count.tolist(), strict=True) if some]
            counts.append(count[count > 0])
            rows.append(np.broadcast_to(own + (stop - length), sees.shape)[sees])
            places.append((text.places_of(text.computed, length) - offsets[:, None])[sees])
        own_rows = list[Int64]()
        if self.with_own and own_ids is not None:  # one query each, of the last token: it sees all
            own_rows, bases = [np.arange(stop)], [text.places_of(text.computed, 1) for text in texts]
            ids, counts, places = own_ids.tolist() + ids, [np.ones(stop, np.int64), *counts], bases + places
        parts = np.concatenate(rows)
        self.rows, self.positions = np.concatenate([*own_rows, parts]), np.concatenate(places)
        self._chosen = np.argsort(parts, kind="stable")  # by rows, and of each the parts in their order
        self._starts = np.searchsorted(parts[self._chosen], np.arange(stop + 1))
        self.sequences = QueriedSequences(np.array(ids, np.uint64), np.concatenate(counts)).kept()

    @staticmethod
    def are_due(texts: Sequence[Text], lens: Int64) -> bool:
        """Whether a row of the pass sees a part."""
        for text, length in zip(texts, lens.tolist(), strict=True):
            if text.prefix is not None and any(part.since < text.computed + length for part in text.prefix.parts):
                return True
        return False

    def merged(self, own: tuple[Float32, Float32] | None, outputs: Float32, logs: Float32) -> Float32:
        """The outputs of the rows of the pass: of their parts, in the order of these, and last of their own text.

        Args:
            own: outputs and log-sum-exps of the rows over their own texts; None: `with_own`.
            outputs, logs: those of the queries; they are scratch afterwards.
        """
        count = len(self._starts) - 1
        if own is None:
            mixed, masses, outputs, logs = outputs[:count], logs[:count], outputs[count:], logs[count:]
        else:
            mixed, masses = own
        merge_parts(self._starts, self._chosen, outputs, logs, mixed, masses)
        return mixed
