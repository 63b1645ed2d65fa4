"""Attention over `ResidualSequences`: each query reads the tokens of its own group unpacked, and others packed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import is_not
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_floats, as_indices, short
from kvcache.paged.merging import Parts
from kvcache.paged.residual import PARTS, ResidualSequences
from kvcache.paged.seq_ids import as_seq_ids
from kvcache.paged.spans import Span, groups_of

if TYPE_CHECKING:
    from kvcache.paged.attention import SequenceAttention

__all__ = ["ResidualAttention"]

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# Arguments of attention that have one value here, and that value.
_FIXED = {"sink_queries": None, "window": None, "starts": None, "causal": True, "mask": None, "skip_tokens": 0}
_DEFAULTS = tuple(_FIXED.values())
_INT64 = np.dtype(np.int64)
_ALL = np.empty(0, np.int64)  # in the place of all rows


class _Group(NamedTuple):
    """Queries of one text that read the same unpacked tokens.

    Attributes:
        near: the sequence of their unpacked rows.
        far: the sequence.
        queries: how many.
        context: packed tokens that they see, from the first one on.
        skipped: how many first ones of these they read unpacked.
        text: which sequence of the call it is.
        ahead, begin, end: the unpacked tokens, [0, ahead) and [begin, end) of the sequence.
        uid, rows: those of the sequence, and which of them these tokens have; `near` is a fork with these, or the uid
            itself if they are all.
    """

    near: int
    far: int
    queries: int
    context: int
    skipped: int
    text: int
    ahead: int
    begin: int
    end: int
    uid: int
    rows: Int64


def _forks_of(groups: list[_Group]) -> list[_Group]:
    return [each for each in groups if each.near >= PARTS]


class ResidualAttention:
    """Attention, as of `SequenceAttention`.

    Args:
        residual: the sequences.
        packed: attention over their packed rows.
    """

    def __init__(self, residual: ResidualSequences, packed: SequenceAttention) -> None:
        self._residual, self._packed, self._rows = residual, packed, residual.rows
        self.length, self.firsts = residual.length, residual.firsts
        # What the parts of the last call depend on, and these: the same in all layers of a step.
        self._known: tuple[Any, Parts, list[_Group]] = None, Parts([], [], [], None), []

    @property
    def nbytes(self) -> int:
        """Bytes of scratch that attention over packed rows keeps from call to call."""
        return self._packed.nbytes

    def over(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, query_lens: npt.ArrayLike | None,
        scale: float | None, sink_queries: npt.ArrayLike | None, out: Any, return_scores: bool | str,
        context_lens: npt.ArrayLike | None, return_lse: bool, window: int | None, softcap: float | None,
        sinks: npt.ArrayLike | None, starts: npt.ArrayLike | None, causal: bool, mask: npt.ArrayLike | None,
        skip_tokens: int,
    ) -> Any:  # fmt: skip
        """As of `SequenceAttention`: over the unpacked rows, over the packed ones, and both results merged."""
        given = (sink_queries, window, starts, causal, mask, skip_tokens)
        if any(map(is_not, given, _DEFAULTS)):
            self._refuse(given)
        rows = queries if type(queries) is np.ndarray else as_floats(queries, (None, None, None), "queries")
        ids, lens = as_seq_ids(seq_ids).copy(), query_lens
        if type(lens) is not np.ndarray or lens.dtype is not _INT64:  # called once per layer of a step
            lens = np.ones(len(ids), np.int64) if lens is None else as_indices(lens, "query_lens")
        lens = lens.copy()
        if lens.shape != ids.shape:
            raise ValueError(f"query_lens: expected {len(ids)} numbers, one per sequence, got {len(lens)}")
        shown = None if context_lens is None else as_indices(context_lens, "context_lens").copy()
        options = {"scale": scale, "softcap": softcap, "sinks": sinks, "out": out}
        with self._residual.lock:
            if shown is not None or return_scores:
                found = self._over_shown(layer, rows, ids, lens, shown, return_scores, return_lse, options)
                self._packed.touch(ids)
                return found
            key = ids.tobytes(), lens.tobytes(), self._residual.state
            if key != self._known[0]:
                groups = self._groups_of(ids, lens, None)
                self._known = key, self._parts(groups), _forks_of(groups)
            _, parts, forks = self._known
            self._fork(forks)
            ways = self._rows._attention, self._packed
            mixed, lse = parts.attend(layer, *ways, rows, return_lse=return_lse, **options)
            self._end(forks)
            self._packed.touch(ids)
        return (mixed, lse) if return_lse else mixed

    def _over_shown(
        self, layer: int, rows: npt.NDArray[Any], ids: UInt64, lens: Int64, shown: Int64 | None,
        return_scores: bool | str, return_lse: bool, options: dict[str, Any],
    ) -> Any:  # fmt: skip
        """`over`, where masses are asked for or not all tokens are shown."""
        groups = self._groups_of(ids, lens, shown)
        parts, ways = self._parts(groups), (self._rows._attention, self._packed)
        forks = _forks_of(groups)
        self._fork(forks)
        if return_scores:
            mixed, lse, near, far = parts.attend_with_masses(layer, *ways, rows, return_scores, **options)
        else:
            mixed, lse = parts.attend(layer, *ways, rows, return_lse=return_lse, **options)
        self._end(forks)
        if not return_scores:
            return (mixed, lse) if return_lse else mixed
        stops = self._shown_of(ids) if shown is None else shown.tolist()
        masses = np.zeros((*near.shape[:-1], sum(stops)), np.float32)
        starts, row = [0, *accumulate(stops)], 0
        for number, group in enumerate(groups):
            first = starts[group.text]
            for begin, end in ((0, group.ahead), (group.begin, group.end)):
                masses[..., first + begin : first + end] += near[..., row : row + end - begin]
                row += end - begin
            if number in far:
                masses[..., first : first + group.context] += far[number]
        return (mixed, masses, lse) if return_lse else (mixed, masses)

    def _fork(self, groups: list[_Group]) -> None:
        """Fork the rows of these groups, for the time of a call; `mend` frees the forks after a failure."""
        for each in groups:
            self._rows._sequences.fork(each.uid, each.near)
            self._rows._sequences.keep(each.near, each.rows)

    def _end(self, groups: list[_Group]) -> None:
        """Free the forks."""
        if groups:
            self._rows._sequences.free_batch(np.array([each.near for each in groups], np.uint64))

    def _refuse(self, given: tuple[Any, ...]) -> None:
        """ValueError, where an argument of attention has another value than the one that it may have."""
        for (name, fixed), value in zip(_FIXED.items(), given, strict=True):
            if value is not fixed and (fixed is None or value != fixed):
                lengths = f"residual_length {self.length} and first_tokens {self.firsts}"
                raise ValueError(f"{name}: expected {fixed} with {lengths}, got {short(value)}")

    def _shown_of(self, ids: UInt64) -> list[int]:
        return [self._residual.spans[uid].stop for uid in self._residual.uids(ids)]

    def _parts(self, groups: list[_Group]) -> Parts:
        skips = {each.skipped for each in groups if each.context}
        skipped = skips.pop() if len(skips) == 1 else [each.skipped for each in groups]  # of those that see packed ones
        return Parts(
            [each.near for each in groups], [each.far for each in groups], [each.queries for each in groups],
            [each.context for each in groups], skipped, causal=self.length > 0,
        )  # fmt: skip

    def _groups_of(self, ids: UInt64, lens: Int64, shown: Int64 | None) -> list[_Group]:
        """The queries of each sequence by group."""
        if shown is None and len(ids) > 1 and len(set(ids.tolist())) < len(ids):
            raise ValueError("seq_ids: expected each sequence once, got one twice")
        if shown is not None and shown.shape != ids.shape:
            raise ValueError(f"context_lens: expected {len(ids)} numbers, one per sequence, got {len(shown)}")
        groups: list[_Group] = []
        stops = self._shown_of(ids) if shown is None else shown.tolist()
        for i, (seq_id, uid, count, stop) in enumerate(
            zip(ids.tolist(), self._residual.uids(ids), lens.tolist(), stops, strict=True)
        ):
            span = self._residual.spans[uid]
            if not 0 <= stop <= span.stop:
                raise ValueError(f"context_lens: expected 0 to {span.stop} tokens of sequence {seq_id}, got {stop}")
            most = max(0, stop - (span.base if self.length else 0))
            most = most if shown is None else min(most, 1)
            if not 0 <= count <= most:
                group = ", from the group of its last append on" if self.length else ""
                raise ValueError(f"query_lens: expected 0 to {most} queries for sequence {seq_id}{group}, got {count}")
            for ahead, begin, end, queries, context, skipped in self._groups(span, count, stop):
                near, kept = uid, _ALL
                if ahead + end - begin < span.num_rows:
                    near, kept = PARTS + len(groups), np.r_[0:ahead, span.row(begin) : span.row(end)]
                groups.append(_Group(near, seq_id, queries, context, skipped, i, ahead, begin, end, uid, kept))
        return groups

    def _groups(self, span: Span, count: int, stop: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Of the last `count` tokens of the first `stop`, group by group: which tokens they read unpacked, `[0, ahead)`
        and `[begin, end)`, how many they are, the packed tokens that they see, and which first ones of these not.
        """
        firsts = span.firsts if span.base else self.firsts
        if self.length:
            gone = span.gone
            if not count:
                return
            for group, pos, end in groups_of(stop - count + gone, stop + gone, self.length):
                begin = max(group - gone, span.base)
                if not span.base and begin < firsts:
                    begin = 0
                ahead = firsts if begin else 0
                yield ahead, begin, end - gone, end - pos, begin, ahead
            return
        # Those that are first tokens see unpacked ones alone; each is a group, as a query in it sees all rows.
        heads = range(stop - count, min(firsts, stop))
        for pos in heads:
            yield pos + 1, span.stop, span.stop, 1, 0, 0
        if count > len(heads):
            yield firsts, span.stop, span.stop, count - len(heads), stop, firsts
