"""Attention over `ResidualSequences`: each query reads the tokens of its own group unpacked, and others packed."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_not
from typing import TYPE_CHECKING, Any

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
_FIXED = {"sink_queries": None, "return_scores": False, "context_lens": None, "window": None, "starts": None,
          "causal": True, "mask": None, "skip_tokens": 0}  # fmt: skip
_DEFAULTS = tuple(_FIXED.values())
_INT64 = np.dtype(np.int64)
_Forks = list[tuple[int, int, Int64]]  # of the rows of a sequence: its uid, the id of the fork, the rows that it keeps


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
        self._known: tuple[Any, Parts, _Forks] = None, Parts([], [], [], None), []

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
        given = (sink_queries, return_scores, context_lens, window, starts, causal, mask, skip_tokens)
        if any(map(is_not, given, _DEFAULTS)):
            self._refuse(given)
        rows = queries if type(queries) is np.ndarray else as_floats(queries, (None, None, None), "queries")
        ids, lens = as_seq_ids(seq_ids).copy(), query_lens
        if type(lens) is not np.ndarray or lens.dtype is not _INT64:  # called once per layer of a step
            lens = np.ones(len(ids), np.int64) if lens is None else as_indices(lens, "query_lens")
        lens = lens.copy()
        if lens.shape != ids.shape:
            raise ValueError(f"query_lens: expected {len(ids)} numbers, one per sequence, got {len(lens)}")
        with self._residual.lock:
            key = ids.tobytes(), lens.tobytes(), self._residual.state
            if key != self._known[0]:
                self._known = key, *self._parts(ids, lens)
            _, parts, forks = self._known
            for uid, near, kept in forks:  # `mend` frees them after a failure
                self._rows._sequences.fork(uid, near)
                self._rows._sequences.keep(near, kept)
            mixed, lse = parts.attend(
                layer, self._rows._attention, self._packed, rows, scale=scale, softcap=softcap, sinks=sinks, out=out,
                return_lse=return_lse,
            )
            if forks:
                self._rows._sequences.free_batch(np.array([near for _, near, _ in forks], np.uint64))
        return (mixed, lse) if return_lse else mixed

    def _refuse(self, given: tuple[Any, ...]) -> None:
        """ValueError, where an argument of attention has another value than the one that it may have."""
        for (name, fixed), value in zip(_FIXED.items(), given, strict=True):
            if value is not fixed and (fixed is None or value != fixed):
                lengths = f"residual_length {self.length} and first_tokens {self.firsts}"
                raise ValueError(f"{name}: expected {fixed} with {lengths}, got {short(value)}")

    def _parts(self, ids: UInt64, lens: Int64) -> tuple[Parts, _Forks]:
        """The queries of each sequence by group, and the forks of those groups that see some of the rows alone."""
        if len(ids) > 1 and len(set(ids.tolist())) < len(ids):
            raise ValueError("seq_ids: expected each sequence once, got one twice")
        nears: list[int] = []
        forks: _Forks = []
        fars, counts, contexts, skipped = [], [], [], []
        for seq_id, uid, count in zip(ids.tolist(), self._residual.uids(ids), lens.tolist(), strict=True):
            span = self._residual.spans[uid]
            most = span.stop - (span.base if self.length else 0)
            if not 0 <= count <= most:
                group = ", from the group of its last append on" if self.length else ""
                raise ValueError(f"query_lens: expected 0 to {most} queries for sequence {seq_id}{group}, got {count}")
            for rows, queries, context, skip in self._groups(span, count):
                near = uid
                if rows is not None:
                    near = PARTS + len(nears)
                    forks.append((uid, near, rows))
                nears.append(near)
                fars.append(seq_id)
                counts.append(queries)
                contexts.append(context)
                skipped.append(skip)
        skips = {skip for skip, context in zip(skipped, contexts, strict=True) if context}
        one = skips.pop() if len(skips) == 1 else skipped  # of those that see packed tokens
        return Parts(nears, fars, counts, contexts, one, causal=self.length > 0), forks

    def _groups(self, span: Span, count: int) -> Iterator[tuple[Int64 | None, int, int, int]]:
        """Of the last `count` tokens, for each group: its unpacked rows (None: all), queries, `context`, `skipped`."""
        if self.length:
            for group, pos, end in groups_of(span.stop - count, span.stop, self.length):
                begin = max(group, span.base)
                ahead = (span.firsts if span.base else self.firsts) if begin else 0
                inside = begin > span.base or end < span.stop
                yield np.r_[0:ahead, span.row(begin) : span.row(end)] if inside else None, end - pos, begin, ahead
            return
        # Those that are first tokens see unpacked ones alone; each is a group, as a query in it sees all rows.
        heads = range(span.stop - count, min(self.firsts, span.stop) if span.has(self.firsts) else 0)
        for pos in heads:
            yield np.arange(pos + 1), 1, 0, self.firsts
        if count > len(heads):
            yield None, count - len(heads), span.stop, self.firsts if span.has(self.firsts) else 0

