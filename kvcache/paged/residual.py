"""A residual inside `PagedKvCache`: the newest tokens of each sequence, and its first ones, also unpacked.

Attention decreases with distance, so most of the rounding error comes from the last few tokens (KIVI, arXiv
2402.02750, section 3.3). A text is divided into groups of `residual_length` tokens. A query reads its own group
unpacked and all earlier groups packed, but for the first tokens of the text, which every query reads unpacked:

    text 0 .. 140   0 .. 15 unpacked | 16 .. 127 packed | 128 .. 140 unpacked

Each sequence has one more in a second cache, which stores f16, for its tokens [0, first_tokens) and [base, stop).
`base` is the start of the group in which the last `append` began, so the queries of all new tokens find their groups.
Forks share these rows, and writes copy them, as in any `PagedKvCache`.

    span (16, 128, 141)   0 .. 15 | 128 .. 140     29 tokens of the second cache
    span (0, 0, 141)      0 .. 140                 nothing was dropped yet

Without groups a query behind the first tokens reads them unpacked and all others packed: span (16, 141, 141).

Tokens of which there are no unpacked rows, as those of blocks that `adopt` shares, are read packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_floats, as_indices, short
from kvcache.core.kvrows import KvRows
from kvcache.core.locks import CallLock, MendingLock
from kvcache.errors import SequenceNotFoundError
from kvcache.paged.attending import attention
from kvcache.paged.merging import Parts
from kvcache.paged.seq_ids import as_seq_ids
from kvcache.paged.spans import Span, groups_of, refuse

if TYPE_CHECKING:
    from kvcache.paged.attention import SequenceAttention
    from kvcache.paged.cache import PagedKvCache
    from kvcache.paged.sequences import PagedSequences
    from kvcache.paged.tables import BlockTables

__all__ = ["ResidualSequences"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_PARTS = 2**63  # ids from here on: forks that live during a call; lower ones are uids

# Arguments of attention that have one value here, and that value.
_FIXED = {"sink_queries": None, "return_scores": False, "context_lens": None, "window": None, "starts": None,
          "causal": True, "mask": None, "skip_tokens": 0}  # fmt: skip


class ResidualSequences:
    """The verbs of a paged cache over its sequences, and attention over them, with unpacked rows beside packed ones.

    Args:
        lock: made before those of the parts.
        sequences, attention, table: of the packed rows.
        rows: the cache of unpacked rows; it grows when it has too few blocks.
        length: tokens of a group; 0: there are no groups.
        firsts: first tokens that every query reads unpacked, at most `length` where there are groups.

    Methods and errors are those of `PagedSequences`. `free` takes effect at once for the packed rows; the unpacked ones
    are freed by the next call that needs room.
    """

    def __init__(
        self, lock: CallLock, sequences: PagedSequences, attention: SequenceAttention, table: BlockTables,
        rows: PagedKvCache, length: int, firsts: int,
    ) -> None:  # fmt: skip
        self._sequences, self._attention, self._table, self.rows = sequences, attention, table, rows
        self.length, self.firsts = length, firsts
        self._spans: dict[int, Span] = {}  # by uid
        self._moving: tuple[int, ...] = ()  # uids of sequences that a call is exchanging
        self._lock = MendingLock(lock, self._mend)
        self.free, self.free_batch = sequences.free, sequences.free_batch
        self.read, self.compact, self.grow = sequences.read, sequences.compact, sequences.grow

    @property
    def nbytes(self) -> int:
        """Bytes of scratch that attention over packed rows keeps from call to call."""
        return self._attention.nbytes

    # -- sequences start and end ----------------------------------------------------------------------------

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        self.allocate_batch(np.array([seq_id], np.uint64), np.array([num_tokens], np.int64))

    def allocate_batch(self, seq_ids: UInt64, num_tokens: Int64) -> None:
        with self._lock:
            self._sequences.allocate_batch(seq_ids, num_tokens)
            with _Undoing(self._end, seq_ids):
                self._begin(seq_ids)
                self._extend(seq_ids, num_tokens)

    def adopt(self, seq_id: int, blocks: npt.NDArray[np.int32], num_tokens: int) -> None:
        with self._lock:
            self._sequences.adopt(seq_id, blocks, num_tokens)
            with _Undoing(self._end, [seq_id]):
                self._begin([seq_id], num_tokens)

    def fork(self, source: int, target: int) -> None:
        self.fork_batch(np.array([source], np.uint64), np.array([target], np.uint64))

    def fork_batch(self, sources: UInt64, targets: UInt64) -> None:
        with self._lock:
            self._sequences.fork_batch(sources, targets)
            with _Undoing(self._end, targets):
                self._reap(len(targets))
                old, new = self._uids(sources), self._uids(targets)
                self.rows.fork_batch(old, new)
                self._spans.update((uid, self._spans[source]) for source, uid in zip(old, new, strict=True))

    def swap(self, first: int, second: int) -> None:
        with self._lock:
            uids = self._moving = self._uids([first, second])
            self._sequences.swap(first, second)
            self.rows.swap(*uids)
            one, other = (self._spans[uid] for uid in uids)
            self._spans.update({uids[0]: other, uids[1]: one})
            self._moving = ()

    # -- tokens come and go ---------------------------------------------------------------------------------

    def append(self, seq_id: int, num_new_tokens: int) -> None:
        self.append_batch(np.array([seq_id], np.uint64), np.array([num_new_tokens], np.int64))

    def append_batch(self, seq_ids: UInt64, counts: Int64 | None = None) -> None:
        more = np.ones(len(seq_ids), np.int64) if counts is None else counts
        with self._lock:
            self._sequences.append_batch(seq_ids, more)
            with _Undoing(self._shorten, seq_ids, more):
                self._extend(seq_ids, more)

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        self.truncate_batch(np.array([seq_id], np.uint64), np.array([num_tokens], np.int64))

    def truncate_batch(self, seq_ids: UInt64, num_tokens: Int64) -> None:
        with self._lock:
            self._sequences.truncate_batch(seq_ids, num_tokens)
            self._cut(self._uids(seq_ids), num_tokens.tolist())

    def reorder(self, seq_ids: UInt64, rows: Int64) -> None:
        with self._lock:
            uids = self._moving = self._uids(seq_ids)
            self.rows.reorder(uids, rows)  # it refuses what the other one would
            self._sequences.reorder(seq_ids, rows)
            spans = [self._spans[uids[row]] for row in rows]
            self._spans.update(zip(uids, spans, strict=True))
            self._moving = ()

    def resize(self, seq_id: int, num_tokens: int, uid: int) -> None:
        with self._lock:
            old = self._table.info(seq_id)[0] if self._table.uid(seq_id) == uid else num_tokens
            self._sequences.resize(seq_id, num_tokens, uid)
            if num_tokens <= old:
                return self._cut([uid], [num_tokens])
            with _Undoing(self._sequences.resize, seq_id, old, uid):
                self._extend([seq_id], np.array([num_tokens - old]))

    def keep(self, seq_id: int, indices: Int64) -> None:
        refuse("keep_tokens", self.length, self.firsts)

    def stream(self, seq_id: int, sink_tokens: int, window_tokens: int) -> int:
        refuse("apply_streaming_llm", self.length, self.firsts)
        return 0

    # -- K and V --------------------------------------------------------------------------------------------

    def write(self, layer: int, seq_id: int, start: int | None, rows: KvRows) -> None:
        self.rows._store.check_rows(rows, layer)
        with self._lock:
            self._make_room(self._blocks(rows.count))
            self._sequences.write(layer, seq_id, start, rows)
            uid = self._uids([seq_id])[0]
            first = self._spans[uid].stop - rows.count if start is None else start
            self._write(layer, uid, first, rows)

    def write_batch(self, layer: int, seq_ids: UInt64, rows: KvRows, counts: Int64 | None = None) -> None:
        self.rows._store.check_rows(rows, layer)
        with self._lock:
            self._make_room(self._blocks(rows.count, len(seq_ids)))
            self._sequences.write_batch(layer, seq_ids, rows, counts)
            uids, lens = self._uids(seq_ids), np.ones(len(seq_ids), np.int64) if counts is None else counts
            spans = [self._spans[uid] for uid in uids]
            if all(span.stop - n >= span.base for span, n in zip(spans, lens.tolist(), strict=True)):
                self.rows._sequences.write_batch(layer, np.array(uids, np.uint64), rows, lens)
                return
            for uid, span, n, end in zip(uids, spans, lens.tolist(), np.cumsum(lens).tolist(), strict=True):
                self._write(layer, uid, span.stop - n, rows.part(end - n, end))

    def over(
        self, layer: int, queries: npt.ArrayLike, seq_ids: npt.ArrayLike, query_lens: npt.ArrayLike | None,
        scale: float | None, sink_queries: npt.ArrayLike | None, out: Any, return_scores: bool | str,
        context_lens: npt.ArrayLike | None, return_lse: bool, window: int | None, softcap: float | None,
        sinks: npt.ArrayLike | None, starts: npt.ArrayLike | None, causal: bool, mask: npt.ArrayLike | None,
        skip_tokens: int,
    ) -> Any:  # fmt: skip
        """As of `SequenceAttention`: over the unpacked rows, over the packed ones, and both results merged."""
        given = (sink_queries, return_scores, context_lens, window, starts, causal, mask, skip_tokens)
        for (name, fixed), value in zip(_FIXED.items(), given, strict=True):
            if value is not fixed and (fixed is None or value != fixed):
                lengths = f"residual_length {self.length} and first_tokens {self.firsts}"
                raise ValueError(f"{name}: expected {fixed} with {lengths}, got {short(value)}")
        rows = queries if type(queries) is np.ndarray else as_floats(queries, (None, None, None), "queries")
        ids = as_seq_ids(seq_ids).copy()
        lens = np.ones(len(ids), np.int64) if query_lens is None else as_indices(query_lens, "query_lens").copy()
        if len(lens) != len(ids):
            raise ValueError(f"query_lens: expected {len(ids)} numbers, one per sequence, got {len(lens)}")
        with self._lock:
            try:
                near, far = partial(self.rows.attention, layer), partial(attention, cast(Any, self), layer)
                options = {"scale": scale, "softcap": softcap, "sinks": sinks}
                mixed, lse = self._parts(ids, lens).attend(near, far, rows, options, out, return_lse)
                return (mixed, lse) if return_lse else mixed
            finally:
                self._free_parts()

    # -- invariants -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        with self._lock:
            self.rows.check()
            for seq_id in self._table.seq_ids():
                uid = self._table.uid(seq_id)
                assert self._is_sound(seq_id, uid), f"sequence {seq_id}: its rows differ from {self._spans.get(uid)}"
            assert all(seq_id < _PARTS for seq_id in self.rows.sequence_ids()), "forks of an attention are left"

    def _is_sound(self, seq_id: int, uid: int) -> bool:
        span, held = self._spans.get(uid), self.rows.get_sequence(uid)
        return (
            span is not None and held is not None and span.stop == self._table.info(seq_id)[0]
            and held.num_tokens == span.num_rows
        )  # fmt: skip

    def _mend(self) -> None:
        """Drop the unpacked rows that an interrupted call left inconsistent: these tokens are then read packed."""
        self._free_parts()
        for seq_id in self._table.seq_ids():
            uid = self._table.uid(seq_id)
            moved = uid in self._moving
            if moved or not self._is_sound(seq_id, uid):
                span, count, held = self._spans.get(uid), self._table.info(seq_id)[0], self.rows.get_sequence(uid)
                if held is None:
                    self.rows.allocate(uid, 0)
                    held = self.rows.get_sequence(uid)
                firsts = 0
                if span is not None and held is not None and not moved:
                    whole = span.has(self.firsts)
                    firsts = self.firsts if whole and min(count, span.stop, held.num_tokens) >= self.firsts else 0
                self.rows.truncate(uid, firsts)
                self._spans[uid] = Span(firsts, count, count) if count else Span(0, 0, 0)
        self._moving = ()

    # -- below the verbs ------------------------------------------------------------------------------------

    def _uids(self, seq_ids: Iterable[int] | UInt64) -> tuple[int, ...]:
        ids = [int(each) for each in seq_ids]
        uids = tuple(self._table.uid(each) for each in ids)
        if -1 in uids:
            raise SequenceNotFoundError(ids[uids.index(-1)])
        return uids

    def _begin(self, seq_ids: Iterable[int] | UInt64, num_tokens: int = 0) -> None:
        """Start sequences of `num_tokens` tokens that are packed alone."""
        uids = self._uids(seq_ids)
        self._reap(len(uids))
        self.rows.allocate_batch(uids, [0] * len(uids))
        self._spans.update((uid, Span(0, num_tokens, num_tokens)) for uid in uids)

    def _end(self, seq_ids: Iterable[int] | UInt64) -> None:
        """Free sequences that a failed call has started."""
        for seq_id in seq_ids:
            with suppress(SequenceNotFoundError):
                self._sequences.free(int(seq_id))

    def _shorten(self, seq_ids: UInt64, counts: Int64) -> None:
        """Drop packed tokens that a failed call has appended."""
        with suppress(SequenceNotFoundError):
            lens = np.array([self._table.info(int(each))[0] for each in seq_ids], np.int64)
            self._sequences.truncate_batch(seq_ids, lens - counts)

    def _cut(self, uids: Sequence[int], num_tokens: Sequence[int]) -> None:
        spans = [self._spans[uid].cut(pos) for uid, pos in zip(uids, num_tokens, strict=True)]
        self.rows.truncate_batch(uids, [span.num_rows for span in spans])
        self._spans.update(zip(uids, spans, strict=True))

    def _extend(self, seq_ids: Iterable[int] | UInt64, counts: Int64) -> None:
        """Add rows for new tokens of the packed sequences, and drop those of groups that no new query reads."""
        uids = self._uids(seq_ids)
        self._make_room(self._blocks(int(counts.sum()), len(uids)))
        old = [self._spans[uid] for uid in uids]
        new = [span.longer(n, self.length, self.firsts) for span, n in zip(old, counts.tolist(), strict=True)]
        more = [b.num_rows - a.num_rows for a, b in zip(old, new, strict=True)]
        self.rows.append_batch(uids, counts if self.length else more)
        for uid, a, b in zip(uids, old, new, strict=True):
            self._spans[uid] = b
            if self.length and b.base > a.base:
                self.rows.keep_tokens(uid, np.r_[0 : b.firsts, a.row(b.base) : a.row(b.stop)])

    def _blocks(self, num_tokens: int, num_texts: int = 1) -> int:
        """Blocks of unpacked rows that so many new tokens touch at most."""
        if not self.length:
            num_tokens = min(num_tokens, num_texts * self.firsts)
        return num_tokens // self.rows.block_size + 2 * num_texts

    def _make_room(self, num_blocks: int) -> None:
        if self.rows.free_block_count < num_blocks:
            self._reap()
            if self.rows.free_block_count < num_blocks:
                self.rows.grow(max(num_blocks, self.rows.total_blocks))

    def _reap(self, num_new: int = 0) -> None:
        """Free the rows of sequences that are gone, where the last `num_new` have none yet."""
        if self.rows.num_sequences > len(self._table) - num_new:
            alive = set(map(self._table.uid, self._table.seq_ids()))
            for uid in set(map(int, self.rows.sequence_ids())) - alive:
                self.rows.free(uid)
                self._spans.pop(uid, None)

    def _write(self, layer: int, uid: int, first: int, rows: KvRows) -> None:
        """Store those of consecutive tokens that are unpacked."""
        span, last = self._spans[uid], first + rows.count
        if first < span.firsts:
            self.rows._sequences.write(layer, uid, first, rows.part(0, min(last, span.firsts) - first))
        begin = max(first, span.base)
        if begin < last:
            self.rows._sequences.write(layer, uid, span.row(begin), rows.part(begin - first, last - first))

    def _parts(self, ids: UInt64, lens: Int64) -> Parts:
        """The queries of each sequence by group."""
        if len(set(ids.tolist())) < len(ids):
            raise ValueError("seq_ids: expected each sequence once, got one twice")
        nears: list[int] = []
        fars, counts, contexts, skipped = [], [], [], []
        for seq_id, uid, count in zip(ids.tolist(), self._uids(ids), lens.tolist(), strict=True):
            span = self._spans[uid]
            most = span.stop - (span.base if self.length else 0)
            if not 0 <= count <= most:
                group = ", from the group of its last append on" if self.length else ""
                raise ValueError(f"query_lens: expected 0 to {most} queries for sequence {seq_id}{group}, got {count}")
            for rows, queries, context, skip in self._groups(span, count):
                near = uid
                if rows is not None:
                    near = _PARTS + len(nears)
                    self.rows.fork(uid, near)
                    self.rows.keep_tokens(near, rows)
                nears.append(near)
                fars.append(seq_id)
                counts.append(queries)
                contexts.append(context)
                skipped.append(skip)
        return Parts(nears, fars, counts, contexts, skipped, causal=self.length > 0)

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

    def _free_parts(self) -> None:
        for seq_id in self.rows.sequence_ids():
            if seq_id >= _PARTS:
                self.rows.free(seq_id)


class _Undoing:
    """Calls `undo(*args)` if what runs inside fails. A generator would call it again when it is dropped."""

    def __init__(self, undo: Callable[..., object], *args: Any) -> None:
        self._undo, self._args = undo, args

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._undo(*self._args)
