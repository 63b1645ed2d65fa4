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

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcache.core.kvrows import KvRows
from kvcache.core.locks import CallLock, MendingLock
from kvcache.core.undoing import Undoing
from kvcache.errors import OutOfMemoryError, SequenceNotFoundError
from kvcache.paged.spans import Places, Span, Spans

if TYPE_CHECKING:
    from kvcache.paged.cache import PagedKvCache
    from kvcache.paged.sequences import PagedSequences
    from kvcache.paged.tables import BlockTables

__all__ = ["PARTS", "ResidualSequences"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

PARTS = 2**63  # ids from here on: sequences of rows that live during a call; lower ones are uids


class ResidualSequences:
    """The verbs of a paged cache over its sequences, with unpacked rows beside packed ones.

    Args:
        lock: made before those of the parts.
        sequences, table: of the packed rows.
        rows: the cache of unpacked rows; it grows when it has too few blocks.
        length: tokens of a group; 0: there are no groups.
        firsts: first tokens that every query reads unpacked, at most `length` where there are groups.

    Attributes:
        lock: of the calls.
        spans: which tokens have unpacked rows, by uid.

    Methods and errors are those of `PagedSequences`. `free` takes effect at once for the packed rows; the unpacked ones
    are freed by the next call that needs room.
    """

    def __init__(
        self, lock: CallLock, sequences: PagedSequences, table: BlockTables, rows: PagedKvCache, length: int,
        firsts: int,
    ) -> None:  # fmt: skip
        self._sequences, self._table, self.rows = sequences, table, rows
        self.length, self.firsts = length, firsts
        self.spans = Spans()
        self._moving: tuple[int, ...] = ()  # uids of sequences that a call is exchanging
        self._own: dict[int, int] = {}  # by uid: rows from this token on lie in blocks that no other sequence has
        # What the last `write_batch` depends on, and what it writes where: the same in all layers of a step.
        self._known: tuple[Any, Places, bool] = None, Places.of((), (), np.empty(0, np.int64)), False
        self.lock = MendingLock(lock, self._mend)
        self.free, self.free_batch = sequences.free, sequences.free_batch
        self.read, self.compact, self.grow = sequences.read, sequences.compact, sequences.grow

    # -- sequences start and end ----------------------------------------------------------------------------

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        self.allocate_batch(np.array([seq_id], np.uint64), np.array([num_tokens], np.int64))

    def allocate_batch(self, seq_ids: UInt64, num_tokens: Int64) -> None:
        with self.lock:
            self._sequences.allocate_batch(seq_ids, num_tokens)
            with Undoing(self._end, seq_ids):
                self._begin(seq_ids)
                self._extend(self.uids(seq_ids), num_tokens.tolist())

    def adopt(self, seq_id: int, blocks: npt.NDArray[np.int32], num_tokens: int) -> None:
        with self.lock:
            self._sequences.adopt(seq_id, blocks, num_tokens)
            with Undoing(self._end, [seq_id]):
                self._begin([seq_id], num_tokens)

    def fork(self, source: int, target: int) -> None:
        self.fork_batch(np.array([source], np.uint64), np.array([target], np.uint64))

    def fork_batch(self, sources: UInt64, targets: UInt64) -> None:
        with self.lock:
            self._sequences.fork_batch(sources, targets)
            with Undoing(self._end, targets):
                self._reap(len(targets))
                old, new = self.uids(sources), self.uids(targets)
                self._share(old)
                self.rows.fork_batch(old, new)
                self.spans.update((uid, self.spans[source]) for source, uid in zip(old, new, strict=True))

    def swap(self, first: int, second: int) -> None:
        with self.lock:
            uids = self._moving = self.uids([first, second])
            self._share(uids)
            self._sequences.swap(first, second)
            self.rows.swap(*uids)
            one, other = (self.spans[uid] for uid in uids)
            self.spans.update({uids[0]: other, uids[1]: one})
            self._moving = ()

    # -- tokens come and go ---------------------------------------------------------------------------------

    def append(self, seq_id: int, num_new_tokens: int) -> None:
        with self.lock:
            self._sequences.append(seq_id, num_new_tokens)
            try:  # once per step of one text: `Undoing` takes longer
                self._extend((self._uid(seq_id),), (num_new_tokens,))
            except BaseException:
                self._shorten([seq_id], [num_new_tokens])
                raise

    def append_batch(self, seq_ids: UInt64, counts: Int64 | None = None) -> None:
        more = np.ones(len(seq_ids), np.int64) if counts is None else counts
        with self.lock:
            self._sequences.append_batch(seq_ids, more)
            with Undoing(self._shorten, seq_ids.tolist(), more.tolist()):
                self._extend(self.uids(seq_ids), more.tolist())

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        self.truncate_batch(np.array([seq_id], np.uint64), np.array([num_tokens], np.int64))

    def truncate_batch(self, seq_ids: UInt64, num_tokens: Int64) -> None:
        with self.lock:
            self._sequences.truncate_batch(seq_ids, num_tokens)
            self._cut(seq_ids.tolist(), num_tokens.tolist())

    def reorder(self, seq_ids: UInt64, rows: Int64) -> None:
        with self.lock:
            uids = self._moving = self.uids(seq_ids)
            self._share(uids)
            self.rows.reorder(uids, rows)  # it refuses what the other one would
            self._sequences.reorder(seq_ids, rows)
            spans = [self.spans[uids[row]] for row in rows]
            self.spans.update(zip(uids, spans, strict=True))
            self._moving = ()

    def resize(self, seq_id: int, num_tokens: int, uid: int) -> None:
        with self.lock:
            old = self._table.info(seq_id)[0] if self._table.uid(seq_id) == uid else num_tokens
            self._sequences.resize(seq_id, num_tokens, uid)
            if num_tokens <= old:
                return self._cut([seq_id], [num_tokens])
            with Undoing(self._sequences.resize, seq_id, old, uid):
                self._extend([uid], [num_tokens - old])

    def keep(self, seq_id: int, indices: Int64) -> None:
        kept = indices.copy()  # which is read twice
        with self.lock:
            self._evict(seq_id, kept, self._sequences.keep, kept)

    def stream(self, seq_id: int, sink_tokens: int, window_tokens: int) -> int:
        with self.lock:
            count = self._table.info(seq_id)[0]
            kept = np.delete(np.arange(count), slice(sink_tokens, max(sink_tokens, count - window_tokens)))
            return int(self._evict(seq_id, kept, self._sequences.stream, sink_tokens, window_tokens))

    # -- K and V --------------------------------------------------------------------------------------------

    def write(self, layer: int, seq_id: int, start: int | None, rows: KvRows) -> None:
        given: KvRows = getattr(rows, "given", rows)
        self.rows._store.check_rows(given, layer)
        with self.lock:
            uid = self._table.uid(seq_id)
            span = self.spans.get(uid)
            if span is None:
                raise SequenceNotFoundError(seq_id)
            first = span.stop - rows.count if start is None else start
            if first < self._own.get(uid, first + 1):
                self._make_room(self._blocks(rows.count))
            self._sequences.write(layer, seq_id, start, rows)
            if first < span.base or not rows.count:
                for row, begin, end in span.unpacked(first, rows.count):
                    self.rows._sequences.write(layer, uid, row, given.part(begin, end))
            else:
                self.rows._sequences.write(layer, uid, span.firsts + first - span.base, given)

    def write_batch(self, layer: int, seq_ids: UInt64, rows: KvRows, counts: Int64 | None = None) -> None:
        given: KvRows = getattr(rows, "given", rows)
        self.rows._store.check_rows(given, layer)
        with self.lock:
            key = seq_ids.tobytes(), None if counts is None else counts.tobytes(), self.state
            if key != self._known[0]:
                uids, lens = self.uids(seq_ids), np.ones(len(seq_ids), np.int64) if counts is None else counts
                spans = [self.spans[uid] for uid in uids]
                owned = [self._own.get(uid, span.stop + 1) for uid, span in zip(uids, spans, strict=True)]
                shared = any(span.stop - n < own for span, n, own in zip(spans, lens.tolist(), owned, strict=True))
                self._known = key, Places.of(uids, spans, lens), shared
            _, places, shared = self._known
            if shared:  # blocks of rows may have to be copied
                self._make_room(self._blocks(rows.count, len(seq_ids)))
            self._sequences.write_batch(layer, seq_ids, rows, counts)
            if places.uids is not None:
                self.rows._sequences.write_batch(layer, places.uids, given, places.lens)
            for uid, row, begin, end in places.parts:
                self.rows._sequences.write(layer, uid, row, given.part(begin, end))

    @property
    def state(self) -> tuple[int, int]:
        """Another one after each change of the sequences and of what they have unpacked."""
        return self.spans.version, len(self._table)  # `free` changes the latter alone

    # -- which tokens are unpacked: see paged/unpacked.py ----------------------------------------------------

    def pack(self, seq_id: int, num_tokens: int) -> None:
        with self.lock:
            uid = self._uid(seq_id)
            old = self.spans[uid]
            self._drop(uid, old, old.behind(min(num_tokens, old.stop), self.firsts))

    def unpack(self, seq_id: int, newest: Sequence[KvRows], firsts: Sequence[KvRows]) -> None:
        ahead, count = (each[0].count if each else 0 for each in (firsts, newest))
        with self.lock:
            uid = self._uid(seq_id)
            span = self.spans[uid].with_unpacked(ahead, count, self.length, self.firsts)
            try:
                self._make_room(self._blocks(ahead + count))
                self.rows.allocate(PARTS, ahead + count)
                for part, first in ((firsts, 0), (newest, ahead)):
                    for layer, each in enumerate(part):
                        self.rows._sequences.write(layer, PARTS, first, each)
                self._moving = (uid,)
                self._share([uid])
                self.rows.swap(uid, PARTS)
                self.spans[uid], self._moving = span, ()
            finally:
                self.free_parts()

    # -- invariants -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        with self.lock:
            self.rows.check()
            for seq_id in self._table.seq_ids():
                uid = self._table.uid(seq_id)
                assert self._is_sound(seq_id, uid), f"sequence {seq_id}: its rows differ from {self.spans.get(uid)}"
            assert all(seq_id < PARTS for seq_id in self.rows.sequence_ids()), "forks of an attention are left"

    def _is_sound(self, seq_id: int, uid: int) -> bool:
        span, held = self.spans.get(uid), self.rows.get_sequence(uid)
        return (
            span is not None and held is not None and span.stop == self._table.info(seq_id)[0]
            and held.num_tokens == span.num_rows
        )  # fmt: skip

    def _mend(self) -> None:
        """Drop the unpacked rows that an interrupted call left inconsistent: these tokens are then read packed."""
        self.free_parts()
        self._own.clear()
        self.spans.version += 1
        for seq_id in self._table.seq_ids():
            uid = self._table.uid(seq_id)
            moved = uid in self._moving
            if moved or not self._is_sound(seq_id, uid):
                span, count, held = self.spans.get(uid), self._table.info(seq_id)[0], self.rows.get_sequence(uid)
                if held is None:
                    self.rows.allocate(uid, 0)
                    held = self.rows.get_sequence(uid)
                firsts = 0
                if span is not None and held is not None and not moved:
                    whole = span.has(self.firsts)
                    firsts = self.firsts if whole and min(count, span.stop, held.num_tokens) >= self.firsts else 0
                self.rows.truncate(uid, firsts)
                gone = self._gone(seq_id)
                self.spans[uid] = Span(firsts, count, count, gone) if count else Span(0, 0, 0, gone)
        self._moving = ()

    # -- below the verbs ------------------------------------------------------------------------------------

    def uids(self, seq_ids: Iterable[int] | UInt64) -> tuple[int, ...]:
        return tuple([self._uid(int(each)) for each in seq_ids])

    def _uid(self, seq_id: int) -> int:
        uid = self._table.uid(seq_id)
        if uid == -1:
            raise SequenceNotFoundError(seq_id)
        return uid

    def _begin(self, seq_ids: Iterable[int] | UInt64, num_tokens: int = 0) -> None:
        """Start sequences of `num_tokens` tokens that are packed alone."""
        uids = self.uids(seq_ids)
        self._reap(len(uids))
        self.rows.allocate_batch(uids, [0] * len(uids))
        self.spans.update((uid, Span(0, num_tokens, num_tokens)) for uid in uids)

    def _end(self, seq_ids: Iterable[int] | UInt64) -> None:
        """Free sequences that a failed call has started."""
        for seq_id in seq_ids:
            with suppress(SequenceNotFoundError):
                self._sequences.free(int(seq_id))

    def _shorten(self, seq_ids: Sequence[int], counts: Sequence[int]) -> None:
        """Drop tokens that a failed call has appended."""
        with suppress(SequenceNotFoundError):
            for seq_id, uid, count in zip(seq_ids, self.uids(seq_ids), counts, strict=True):
                before = self._table.info(seq_id)[0] - count
                self._sequences.truncate(seq_id, before)
                if self.spans[uid].stop > before:
                    self._cut([seq_id], [before])

    def _cut(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> None:
        uids = self.uids(seq_ids)
        spans = [
            self.spans[uid].cut(pos, self._gone(seq_id))
            for seq_id, uid, pos in zip(seq_ids, uids, num_tokens, strict=True)
        ]
        self.rows.truncate_batch(uids, [span.num_rows for span in spans])
        self.spans.update(zip(uids, spans, strict=True))

    def _share(self, uids: Iterable[int]) -> None:
        """Note that other sequences may have the blocks of these."""
        for uid in uids:
            self._own.pop(uid, None)

    def _extend(self, uids: Sequence[int], counts: Sequence[int]) -> None:
        """Add rows for new tokens of the packed sequences, and drop those of groups that no new query reads."""
        before = [self.spans[uid] for uid in uids]
        after = [span.longer(count, self.length, self.firsts) for span, count in zip(before, counts, strict=True)]
        if not self.length:
            counts = [new.num_rows - old.num_rows for old, new in zip(before, after, strict=True)]
        ids, more = np.array(uids, np.uint64), np.array(counts, np.int64)
        try:
            self.rows._sequences.append_batch(ids, more)
        except OutOfMemoryError as error:
            self._make_room(error.requested)
            self.rows._sequences.append_batch(ids, more)
        for uid, old, new in zip(uids, before, after, strict=True):
            self._own[uid] = min(old.stop, self._own.get(uid, old.stop))
            if self.length:
                self._drop(uid, old, new)
            else:
                self.spans[uid] = new

    def _drop(self, uid: int, old: Span, new: Span) -> None:
        """Drop the rows that a span has no longer."""
        if new.base > old.base:
            self.rows.keep_tokens(uid, np.r_[0 : new.firsts, old.row(new.base) : old.row(new.stop)])
        self.spans[uid] = new  # last: after an interrupt in between, rows are missing, as `_mend` sees

    def _gone(self, seq_id: int) -> int:
        """How many tokens were evicted before the last one."""
        count, next_position, *_ = self._table.info(seq_id)
        return next_position - count

    def _evict(self, seq_id: int, kept: Int64, evict: Callable[..., Any], *args: Any) -> Any:
        """`evict(seq_id, *args)`, which keeps the tokens at `kept` alone, and their unpacked rows."""
        uid = self._uid(seq_id)
        old = self.spans[uid]
        if len(kept) and not (kept[0] >= 0 and kept[-1] < old.stop and (kept[1:] > kept[:-1]).all()):
            return evict(seq_id, *args)  # which refuses them
        new, rows = old.thinned(kept, self.length, self.firsts)
        if fewer := len(rows) < old.num_rows:
            self.rows._sequences.fork(uid, PARTS)
            self.rows._sequences.keep(PARTS, rows)
        self._moving = (uid,)
        try:
            result = evict(seq_id, *args)
        except Exception:
            self._moving = ()  # nothing has changed
            raise
        if fewer:
            self.rows._sequences.swap(uid, PARTS)  # takes no memory
            self.rows._sequences.free(PARTS)
        self.spans[uid], self._moving = new, ()
        return result

    def _blocks(self, num_tokens: int, num_texts: int = 1) -> int:
        """Blocks of unpacked rows that so many new tokens touch at most."""
        if not self.length:
            num_tokens = min(num_tokens, num_texts * self.firsts)
        return num_tokens // self.rows.block_size + 2 * num_texts

    def _make_room(self, num_blocks: int) -> None:
        if self.rows._pool.num_free < num_blocks:
            self._reap()
            if self.rows.free_block_count < num_blocks:
                self.rows.grow(max(num_blocks, self.rows.total_blocks))

    def _reap(self, num_new: int = 0) -> None:
        """Free the rows of sequences that are gone, where the last `num_new` have none yet."""
        if self.rows.num_sequences > len(self._table) - num_new:
            alive = set(map(self._table.uid, self._table.seq_ids()))
            dead = [each for each in map(int, self.rows.sequence_ids()) if each not in alive]
            self.rows.free_batch(dead)
            for uid in dead:
                self.spans.pop(uid, None)
                self._own.pop(uid, None)

    def free_parts(self) -> None:
        for part in [each for each in self.rows.sequence_ids() if each >= PARTS]:
            self.rows.free(part)
