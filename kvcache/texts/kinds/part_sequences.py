"""The sequences of `SeenParts` in a cache, and the queries of a pass that attend to them.

A part is a sequence that shares the blocks of its cached text and has the tokens that are seen alone. All parts of all
texts of a pass are attended to in one call of a layer, by queries that the network has turned to where each part
stands. Layers with a window have the parts that lie within it of the first token that sees them, from there on: what
they have of a part is a function of the request.

With a residual, a text begins its groups behind its parts, which are read packed as groups before a query's own are:
what stands there does not depend on where the groups of the cached text end. The first tokens of the request are read
in f16, as those of any text, in the part that has them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import KvCacheError
from kvcache.kernels.functions import merge_parts
from kvcache.networks.protocols import Float32
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.queried import QueriedSequences
from kvcache.texts.block_index import PartStart
from kvcache.texts.text import Text

__all__ = ["MISSING", "Own", "PartQueries", "PartRows", "PartSequences"]

Int64 = NDArray[np.int64]
MISSING = -1  # in place of a part's sequence
_FIRST = 2**62  # of the ids of these sequences: those of texts, and of callers, are below


class PartSequences:
    """The sequences of parts in a cache.

    Args:
        cache: K and V.

    Attributes:
        ids: those that are alive, or are about to be.
        stored: of those in layers with a window, `before` and `positions` of their `PartStart`.
    """

    def __init__(self, cache: PagedKvCache) -> None:
        self._cache, self.ids = cache, set[int]()
        self.stored: dict[int, tuple[int, Int64]] = {}
        self._numbers = count(_FIRST)

    def adopt(self, starts: Sequence[PartStart | None]) -> tuple[int, ...]:
        """Start the sequences of parts whose blocks are held; `MISSING` where one is not, or has no tokens here."""
        found: list[int] = []
        try:
            for start in starts:
                found.append(MISSING if start is None or not len(start.seen) else self._adopt(start))
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
            if start.positions is not None:
                self.stored[seq_id] = start.before, start.positions
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
                    if each in self.stored:
                        self.stored[found[-1]] = self.stored[each]
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
                self.stored.pop(each, None)

    def free_others(self, kept: Collection[int]) -> None:
        """End all sequences but some."""
        self.free(sorted(self.ids.difference(kept)))


class PartRows:
    """The rows of a pass that see parts, and the queries that they have for these: the same in all layers.

    Args:
        texts: those of the pass.
        lens: the rows of each.
        apart: whether rows attend to their own texts in a call of their own.

    Attributes:
        count: the rows of the pass.
        with_own: whether each text has one row, which attends to its own text in the same call: queries for these come
            first.
        rows: which row of the pass each of the queries is, `(m,)`.
        positions: where these queries are turned to, `(m,)`.
        of_parts: `rows` without those of own texts.
        views: the texts that see parts, each by its index, the positions of its rows, and which of these see each part.
    """

    def __init__(self, texts: Sequence[Text], lens: Int64, apart: bool) -> None:
        self.with_own = not apart and bool((lens == 1).all())
        self.views: list[tuple[int, Int64, NDArray[np.bool_]]] = []
        rows, places, stop = list[Int64](), list[Int64](), 0
        for number, (text, length) in enumerate(zip(texts, lens.tolist(), strict=True)):
            stop += length
            if text.prefix is None or not text.prefix.parts:
                continue
            own, positions = np.arange(length), text.places_of(text.computed, length)
            sees = text.prefix.sinces[:, None] <= own + text.computed
            rows.append(np.broadcast_to(own + (stop - length), sees.shape)[sees])
            places.append((positions - text.prefix.offsets[:, None])[sees])
            self.views.append((number, positions, sees))
        self.count, self.of_parts = stop, np.concatenate(rows)
        if self.with_own:  # one query each, of the last token: it sees all
            rows, places = [np.arange(stop), *rows], [*(text.places_of(text.computed, 1) for text in texts), *places]
        self.rows, self.positions = np.concatenate(rows), np.concatenate(places)

    @classmethod
    def of(cls, texts: Sequence[Text], lens: Int64, apart: bool) -> PartRows | None:
        """The rows of a pass; None: no row sees a part."""
        for text, length in zip(texts, lens.tolist(), strict=True):
            if text.prefix is not None and any(part.since < text.computed + length for part in text.prefix.parts):
                return cls(texts, lens, apart)
        return None

    @property
    def places(self) -> dict[str, Int64]:
        """The keyword arguments of the network."""
        return {"sink_positions": self.positions, "sink_rows": self.rows}


class Own(NamedTuple):
    """The own sequences of a pass, of which each text has one row.

    Attributes:
        ids: those of the texts.
        starts: the text positions of their first tokens; None: 0.
        firsts: how many of their first tokens lie before the window; None: there is none.
    """

    ids: NDArray[np.uint64]
    starts: Int64 | None = None
    firsts: Int64 | None = None


class PartQueries:
    """The queries of a pass that attend to parts in some layers.

    Args:
        rows: those of the pass.
        parts: of each text of the pass the sequences of its parts.
        own: their own sequences, where rows attend to these too.
        stored: of the sequences of parts, see `PartSequences`.
        window: of these layers; None: each query sees all of a part.

    Attributes:
        sequences: own ones and the parts, as a cache takes them; each has the rows that see it. None: no row sees any.
    """

    def __init__(
        self, rows: PartRows, parts: Sequence[Sequence[int]], own: Own, stored: dict[int, tuple[int, Int64]],
        window: int | None,
    ) -> None:
        self._taken: Int64 | None = None
        ids, counts, starts, firsts, shown = list[int](), list[int](), list[int](), list[Int64](), list[Any]()
        for number, positions, sees in rows.views:
            if window is None:
                count = np.count_nonzero(sees, axis=1).tolist()
                ids += [seq_id for seq_id, some in zip(parts[number], count, strict=True) if some]
                counts += filter(None, count)
                continue
            shown.append(np.zeros_like(sees))
            for of, seq_id in enumerate(parts[number]):
                if seq_id == MISSING:  # too far away for all rows
                    continue
                before, held = stored[seq_id]
                near = np.searchsorted(held, positions - window + 1)
                seen = sees[of] & (near < len(held))
                if seen.any():
                    shown[-1][of] = seen
                    ids.append(seq_id)
                    counts.append(int(np.count_nonzero(seen)))
                    starts.append(before)
                    firsts.append(near[seen])
            shown[-1] = shown[-1][sees]
        of_parts = rows.of_parts
        if window is not None and not (chosen := np.concatenate(shown)).all():
            of_parts, at = of_parts[chosen], np.flatnonzero(chosen)
            self._taken = np.concatenate([np.arange(rows.count), at + rows.count]) if rows.with_own else at
        self._chosen = np.argsort(of_parts, kind="stable")  # by rows, and of each the parts in their order
        self._starts = np.searchsorted(of_parts[self._chosen], np.arange(rows.count + 1))
        self.sequences: QueriedSequences | None = None
        if rows.with_own:
            ids, counts = own.ids.tolist() + ids, [1] * rows.count + counts
            if own.starts is not None and own.firsts is not None:
                starts, firsts = own.starts.tolist() + starts, [own.firsts, *firsts]
        if ids:
            windowed = {} if window is None else {"starts": np.array(starts), "firsts": np.concatenate(firsts)}
            self.sequences = QueriedSequences(
                np.array(ids, np.uint64), np.array(counts, np.int64), **windowed
            ).kept()

    def taken(self, turned: Float32) -> Float32:
        """The queries for these layers, of those that the network has turned."""
        return turned if self._taken is None else turned[self._taken]

    def merged(self, own: tuple[Float32, Float32] | None, outputs: Float32, logs: Float32) -> Float32:
        """The outputs of the rows of the pass: of their parts, in the order of these, and last of their own text.

        Args:
            own: outputs and log-sum-exps of the rows over their own texts; None: they are the first of the queries.
            outputs, logs: those of the queries; they are scratch afterwards.
        """
        count = len(self._starts) - 1
        if own is None:
            mixed, masses, outputs, logs = outputs[:count], logs[:count], outputs[count:], logs[count:]
        else:
            mixed, masses = own
        merge_parts(self._starts, self._chosen, outputs, logs, mixed, masses)
        return mixed
