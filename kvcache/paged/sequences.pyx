"""The verbs of a paged cache over its sequences: table, bytes and lock together; see paged/sequences.pxd."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from kvcache.core.block_pool cimport BlockPool
from kvcache.core.counts cimport blocks_of
from kvcache.core.kvrows cimport KvRows
from kvcache.core.locks cimport CallLock
from kvcache.core.store cimport BlockStore
from kvcache.kernels.kernels cimport kvc_run, num_threads
from kvcache.paged.records cimport RunList, Sequence, Span
from kvcache.paged.residual cimport Residual, Rows
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.seq_ids cimport uint64_ids
from kvcache.paged.sharing cimport Stretch, blocks_to_own, own_all, reorder_runs
from kvcache.paged.tables cimport BlockTables, count_at, counts_of, start_at
from kvcache.support.mapped cimport MappedMemory

from functools import partial

import numpy as np

from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.support.arguments import described

__all__ = ["PagedSequences"]

cnp.import_array()


cdef class PagedSequences:
    """K and V of the sequences of one table, in the blocks of one store.

    Args:
        lock: of the table and the store.
        store: the `BlockStore` that the table's blocks lie in.
        table: the `BlockTables` that say which tokens lie where.

    The caller has converted all arguments; each call takes the lock. New tokens read as zeros until they are
    written. Errors are those of `BlockTables` and `BlockStore`; a call that raises has changed nothing.
    """

    def __cinit__(self, CallLock lock not None, BlockStore store not None, BlockTables table not None):
        self.lock, self.store, self.table, self.residual = lock, store, table, table.residual

    def __dealloc__(self):
        free(self.stretches)

    # A `with` statement costs 80 ns more than the lock itself: the most frequent calls enter and leave it by hand.

    # -- sequences start and end ----------------------------------------------------------------------------

    def allocate(self, uint64_t seq_id, int64_t num_tokens):
        """A new sequence of `num_tokens` tokens."""
        self.lock.enter()
        try:
            self.store.expect_room_()
            self.table.allocate_(&seq_id, &num_tokens, 1)
            self._clear_new(&num_tokens, 1)
        finally:
            self.lock.leave()

    def allocate_batch(self, seq_ids, const int64_t[::1] num_tokens):
        """Many new sequences, of `num_tokens[i]` tokens each."""
        with self.lock:
            self.store.expect_room_()
            n = self.table.allocate_batch(seq_ids, num_tokens)
            self._clear_new(counts_of(num_tokens, n, "num_tokens"), n)

    def adopt(self, uint64_t seq_id, blocks, int64_t num_tokens):
        """A new sequence of tokens that lie in blocks in use."""
        with self.lock:
            self.table.adopt(seq_id, blocks, num_tokens)

    def fork(self, uint64_t source, uint64_t target):
        """A new sequence that shares the blocks of another."""
        self.lock.enter()
        try:
            self.table.fork_(&source, &target, 1)
        finally:
            self.lock.leave()

    def fork_batch(self, sources, targets):
        """Many forks."""
        with self.lock:
            self.table.fork_batch(sources, targets)

    def swap(self, uint64_t first, uint64_t second):
        """Exchange two ids."""
        with self.lock:
            self.table.swap(first, second)

    def free(self, uint64_t seq_id):
        """End a sequence; inside another call of this thread, when that call ends."""
        if self.lock.is_inside():
            self.table.records.find(seq_id)
        self.lock.run_to_release(partial(self.table.free, seq_id), True)
        self.store.trim_()

    def free_batch(self, seq_ids):
        """End many sequences; inside another call of this thread, when that call ends."""
        if not self.lock.is_inside():
            self.lock.run_to_release(partial(self.table.free_batch, seq_ids), True)
            self.store.trim_()
            return
        # Without the table's scratch, which the other call may be using.
        ids = seq_ids.tolist()
        for seq_id in ids:
            self.table.records.find(seq_id)
        if len(set(ids)) < len(ids):
            raise ValueError("seq_ids: expected each sequence once, got one twice")
        # One by one: a sequence that another release frees first does not keep the others.
        for seq_id in ids:
            self.lock.run_to_release(partial(self.table.free, seq_id), True)

    # -- tokens come and go ---------------------------------------------------------------------------------

    def append(self, uint64_t seq_id, int64_t num_new_tokens):
        """More tokens at the end of a sequence."""
        self.lock.enter()
        try:
            self.store.expect_room_()
            self.table.append_(&seq_id, &num_new_tokens, 1)
            self._clear_new(&num_new_tokens, 1)
        finally:
            self.lock.leave()

    def append_batch(self, seq_ids, const int64_t[::1] counts=None):
        """`counts[i]` more tokens in each of many sequences, None: one each."""
        self.lock.enter()
        try:
            self.store.expect_room_()
            n = self.table.append_batch(seq_ids, counts)
            self._clear_new(counts_of(counts, n, "counts"), n)
        finally:
            self.lock.leave()

    def truncate(self, uint64_t seq_id, int64_t num_tokens):
        """Keep the first `num_tokens` tokens."""
        self.lock.enter()
        try:
            self.table.truncate_(&seq_id, &num_tokens, 1)
        finally:
            self.lock.leave()

    def truncate_batch(self, seq_ids, num_tokens):
        """Keep the first `num_tokens[i]` tokens of each of many sequences."""
        with self.lock:
            self.table.truncate_batch(seq_ids, num_tokens)

    def reorder(self, seq_ids, const int64_t[::1] rows not None):
        """Sequence `seq_ids[i]` gets the tokens of `seq_ids[rows[i]]`."""
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        cdef const int64_t *row = counts_of(rows, ids.shape[0], "rows")
        with self.lock:
            reorder_runs(self.table, <const uint64_t *>cnp.PyArray_DATA(ids), row, ids.shape[0])

    def resize(self, uint64_t seq_id, int64_t num_tokens, int64_t uid):
        """`append` or `truncate` to this length, of the sequence with this uid."""
        cdef int64_t old, more
        with self.lock:
            self._expect(seq_id, uid)
            old = self.table.records.seqs[self.table.records.find(seq_id)].tokens.num_tokens
            if num_tokens > old:
                more = num_tokens - old
                self.store.expect_room_()
                self.table.append_(&seq_id, &more, 1)
                self._clear_new(&more, 1)
            else:
                self.table.truncate_(&seq_id, &num_tokens, 1)

    def keep(self, uint64_t seq_id, indices):
        """Keep the tokens at `indices`, int64, ascending."""
        with self.lock:
            self.table.keep(seq_id, indices)

    def stream(self, uint64_t seq_id, int64_t sink_tokens, int64_t window_tokens):
        """Keep the first and the last tokens; the number of dropped ones."""
        with self.lock:
            return self.table.stream(seq_id, sink_tokens, window_tokens)

    def compact(self, uint64_t seq_id):
        """Move the tokens into as few blocks as they need."""
        cdef const int32_t[::1] leaving
        with self.lock:
            moves, blocks = self.table.compact_(seq_id)
            leaving = blocks
            try:
                self.store.move_slots(moves)
            finally:
                if leaving.shape[0]:
                    self.table.pool.release_each(&leaving[0], leaving.shape[0], 1)

    # -- blocks ---------------------------------------------------------------------------------------------

    def grow(self, int64_t num_blocks, reserves):
        """`num_blocks` more blocks, after every function of `reserves` has made room for all blocks."""
        cdef BlockPool pool = self.table.pool
        cdef MappedMemory memory
        if num_blocks < 0:
            raise ValueError(f"num_blocks: expected a count >= 0, got {num_blocks}")
        with self.lock:
            total = <object>pool.num_blocks + num_blocks    # no sum wraps around
            memory = self.store.memory_for(total)
            for reserve in reserves:
                reserve(total)
            pool.grow(total)
            self.store.move_to(memory, total)
            self.table.records.most_idle = total

    # -- K and V --------------------------------------------------------------------------------------------

    def write(self, int64_t layer, uint64_t seq_id, start, KvRows rows not None):
        """Store rows at tokens `start`.. of a sequence, None: at its last ones; an access."""
        cdef int64_t first = 0 if start is None else start, count = rows.count
        self.lock.enter()
        try:
            self._write(layer, &seq_id, NULL if start is None else &first, &count, 1, rows, "start")
        finally:
            self.lock.leave()

    def write_batch(self, int64_t layer, seq_ids, KvRows rows not None, const int64_t[::1] counts=None):
        """Store `counts[i]` rows each, None: one, at the last tokens of many sequences; an access to each, in order."""
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        cdef const int64_t *numbers = counts_of(counts, ids.shape[0], "lens")
        self.lock.enter()
        try:
            self._write(layer, <const uint64_t *>cnp.PyArray_DATA(ids), NULL, numbers, ids.shape[0], rows, "lens")
        finally:
            self.lock.leave()

    def read(self, int64_t layer, uint64_t seq_id, int64_t start, stop, int64_t uid=-1, keys=None, values=None):
        """Tokens `start`..`stop` (None: the end) as `(keys, values)`, float32, as `PagedKvCache.read`; an access.

        Args:
            uid: of the sequence that is meant; -1 for whichever has the id.
            keys, values: arrays to write to, which `as_output` made; None: new ones.
        """
        cdef BlockTables table = self.table
        cdef RunLists lists = table.run_lists
        cdef RunList *held
        cdef bint to_end = stop is None
        cdef int64_t last = 0 if to_end else stop
        with self.lock:
            if uid >= 0:
                self._expect(seq_id, uid)
            table.find_(&seq_id, 1)
            held = &table.records.seqs[table.picked[0]].tokens
            last = held.num_tokens if to_end else last
            if not 0 <= start <= last <= held.num_tokens:
                raise IndexError(f"start: expected 0 <= start <= stop <= {held.num_tokens}, got [{start}, {last})")
            self.store.named_layer(layer)
            if keys is None:
                keys, values = [self.store.new_rows(layer, last - start, side) for side in range(2)]
            else:
                self._check_outputs(layer, keys, values, last - start)
            lists.num_cut = 0
            lists.slice_(held, start, last)
            if lists.num_cut:
                self.store.read_(layer, lists.cut, lists.num_cut, keys, values)
            table.victims.touched(table.picked[0])
        return keys, values

    # -- rows in f16 ----------------------------------------------------------------------------------------

    def pack(self, uint64_t seq_id, int64_t num_tokens):
        """Drop the rows in f16 of the first `num_tokens` tokens, but for those that every query reads."""
        with self.lock:
            self.table.pack_(seq_id, num_tokens)

    def unpack(self, uint64_t seq_id, list newest, list firsts):
        """Replace the rows in f16 by those of the last and the first tokens: one `KvRows` a layer each, or none."""
        with self.lock:
            self._unpack(seq_id, newest, firsts)

    def read_unpacked(self, int64_t layer, uint64_t seq_id):
        """The rows in f16 as `(keys, values)`, float32, the first ones first."""
        cdef RunList *held
        with self.lock:
            held = &self.table.records.seqs[self.table.records.find(seq_id)].residual
            self.residual.store.named_layer(layer)
            keys, values = [self.residual.store.new_rows(layer, held.num_tokens, side) for side in range(2)]
            if held.num_runs:
                self.residual.store.read_(layer, held.runs, held.num_runs, keys, values)
        return keys, values

    def reserve_unpacked(self, int64_t num_tokens):
        """Map memory for `num_tokens` rows in f16."""
        with self.lock:
            self.residual.grow_to_(blocks_of(num_tokens, self.residual.store.layout.block_size))

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int _expect(self, uint64_t seq_id, int64_t uid) except -1:
        if self.table.uid(seq_id) != uid:
            raise InvalidOperationError(f"sequence {seq_id} of this handle was freed or evicted")
        return 0

    cdef int _check_outputs(self, int64_t layer, keys, values, int64_t count) except -1:
        for side, out in enumerate((keys, values)):
            shape = (count, self.store.layout.num_heads, self.store.dim_(layer, side))
            if type(out) is not np.ndarray or out.dtype != np.float32 or out.shape != shape or not _is_writeable(out):
                name = "V" if side else "K"
                raise ValueError(f"out: expected two writeable float32 arrays, {name} of shape {shape}, the channels "
                                 f"of a head together, got {described(out)}")
        if _share_memory(keys, values):
            raise ValueError("out: expected arrays with memory of their own, got the same memory twice")
        return 0

    cdef int _write(self, int64_t layer, const uint64_t *ids, const int64_t *starts, const int64_t *counts, int64_t n,
                    KvRows rows, str name) except -1:
        cdef BlockTables table = self.table
        cdef Residual residual = self.residual
        cdef KvRows given = rows
        cdef Sequence *seq
        cdef Stretch *own
        cdef int64_t i, start, count, blocks, rest = 0, total = 0
        self.store.named_layer(layer)
        table.pick_(ids, n)
        self._reserve_stretches(3 * n)
        own = self.stretches
        for i in range(n):
            seq = &table.records.seqs[table.picked[i]]
            if counts == NULL and seq.tokens.num_tokens == 0:
                raise ValueError(f"seq_ids: expected sequences with tokens, got an empty one: {ids[i]}")
            count = count_at(counts, i)
            start = start_at(seq, starts, i, max(count, 0))
            if name == "start" and starts == NULL and count > seq.tokens.num_tokens:
                raise ValueError(f"keys: expected at most {seq.tokens.num_tokens} rows for sequence {ids[i]}, "
                                 f"got {count}")
            if count < 0 or start < 0 or start > seq.tokens.num_tokens - count:
                raise IndexError(f"{name}: expected tokens within [0, {seq.tokens.num_tokens}), "
                                 f"got {count} from {start} on")
            own[i] = Stretch(&seq.tokens, start, start + count, total)
            total += count
        if rows.count != total:
            raise ValueError(f"keys: expected {total} rows for {n} sequences, got {rows.count}")
        if residual is not None:
            given = rows if rows.given is None else rows.given
            residual.store.check_values_(given, layer)
        self.store.check_values_(rows, layer)
        self._cut(table.run_lists, own, n)
        if table.run_lists.cut_is_shared():
            blocks = blocks_to_own(table.run_lists, own, n)
            if blocks > table.pool.num_free:
                raise OutOfMemoryError(blocks, table.pool.num_free)
            table.run_lists.reserve_copies_(blocks)
        if residual is not None:
            rest = self._find_rows(n)
            self._cut(residual.run_lists, own + n, rest)    # room for them, and what they lie in now
            if residual.run_lists.cut_is_shared():
                blocks = blocks_to_own(residual.run_lists, own + n, rest)
                residual.make_room_(blocks)
                residual.run_lists.reserve_copies_(blocks)
                own_all(residual.run_lists, own + n, rest)
        # From here on nothing fails, but for blocks that spill: what cannot be read back is told behind.
        if table.run_lists.cut_is_shared():
            own_all(table.run_lists, own, n)
        self._copy_blocks()
        self._store(self.store, table.run_lists, layer, own, n, rows)
        if residual is not None:
            self._store(residual.store, residual.run_lists, layer, own + n, rest, given)
        for i in range(n):
            table.victims.touched(table.picked[i])
        return self.store.expect_good_()

    cdef void _clear_new(self, const int64_t *counts, int64_t n) noexcept:
        cdef Sequence *seq
        cdef int64_t i
        self._copy_blocks()
        for i in range(n):
            seq = &self.table.records.seqs[self.table.picked[i]]
            self.store.clear_new_(seq.tokens.runs, seq.tokens.num_runs, count_at(counts, i))
            if self.residual is not None:
                self.residual.store.clear_new_(seq.residual.runs, seq.residual.num_runs, self.table.more_rows[i])
        self.store.forget_faults_()

    cdef void _copy_blocks(self) noexcept:
        copy_blocks(self.store, self.table.run_lists)
        if self.residual is not None:
            copy_blocks(self.residual.store, self.residual.run_lists)

    cdef int _reserve_stretches(self, int64_t n) except -1:
        cdef Stretch *grown
        if n > self.capacity:
            grown = <Stretch *>realloc(self.stretches, 2 * n * sizeof(Stretch))
            if grown == NULL:
                raise MemoryError(f"no memory for a batch of {n} sequences")
            self.stretches, self.capacity = grown, 2 * n
        return 0

    cdef int64_t _find_rows(self, int64_t n) noexcept:
        cdef const Stretch *tokens
        cdef Sequence *seq
        cdef Rows[2] rows
        cdef int64_t i, found = n
        cdef int part
        for i in range(n):
            tokens, seq = &self.stretches[i], &self.table.records.seqs[self.table.picked[i]]
            for part in range(self.residual.find_rows(seq, tokens.first, tokens.stop, rows)):
                self.stretches[found] = Stretch(
                    &seq.residual, rows[part].row, rows[part].row + rows[part].stop - rows[part].first,
                    tokens.row + rows[part].first - tokens.first)
                found += 1
        return found - n

    cdef bint _cut(self, RunLists lists, const Stretch *stretches, int64_t n) except -1:
        cdef int64_t i, row = 0
        cdef bint joined = True
        lists.num_cut = 0
        for i in range(n):
            lists.slice_(stretches[i].held, stretches[i].first, stretches[i].stop)
            joined = joined and stretches[i].row - stretches[0].row == row
            row += stretches[i].stop - stretches[i].first
        return joined

    cdef void _store(self, BlockStore store, RunLists lists, int64_t layer, const Stretch *stretches, int64_t n,
                     KvRows rows) noexcept:
        cdef int64_t i
        if self._cut(lists, stretches, n):
            if lists.num_cut:
                with nogil:
                    store.write_(layer, lists.cut, lists.num_cut, rows, stretches[0].row, num_threads())
            return
        for i in range(n):
            self._cut(lists, stretches + i, 1)
            if lists.num_cut:
                store.write_(layer, lists.cut, lists.num_cut, rows, stretches[i].row, 1)

    cdef int _unpack(self, uint64_t seq_id, list newest, list firsts) except -1:
        cdef Residual residual = self.residual
        cdef RunLists lists = residual.run_lists
        cdef Sequence *seq = &self.table.records.seqs[self.table.records.find(seq_id)]
        cdef RunList fresh
        cdef int64_t ahead = (<KvRows>firsts[0]).count if firsts else 0
        cdef int64_t count = ahead + ((<KvRows>newest[0]).count if newest else 0)
        cdef int64_t layer, num_ahead, blocks = blocks_of(count, lists.block_size)
        cdef Span span = residual.unpacked(seq, ahead, count - ahead)
        residual.make_room_(blocks)
        while lists.cut_capacity < blocks + 1:    # a block may have tokens of both
            lists.grow_cut()
        memset(&fresh, 0, sizeof(RunList))
        fresh.capacity = blocks + 1
        fresh.runs = <kvc_run *>malloc(fresh.capacity * sizeof(kvc_run))
        fresh.positions = <int64_t *>malloc(fresh.capacity * sizeof(int64_t))
        if fresh.runs == NULL or fresh.positions == NULL:
            free(fresh.runs)
            free(fresh.positions)
            raise MemoryError(f"no memory for {fresh.capacity} runs")
        lists.extend_(&fresh, count)
        lists.count_positions_(&fresh)
        lists.num_cut = 0
        lists.slice_(&fresh, 0, ahead)
        num_ahead = lists.num_cut
        lists.slice_(&fresh, ahead, count)
        for layer in range(residual.store.num_named):
            if ahead:
                residual.store.write_(layer, lists.cut, num_ahead, <KvRows>firsts[layer], 0, 1)
            if count > ahead:
                residual.store.write_(layer, lists.cut + num_ahead, lists.num_cut - num_ahead, <KvRows>newest[layer],
                                      0, 1)
        lists.become_(&seq.residual, &fresh)
        seq.span = span
        return 0


cdef void copy_blocks(BlockStore store, RunLists lists) noexcept:
    if lists.num_copies:
        store.copy_(&lists.copy_src[0], &lists.copy_dst[0], lists.num_copies)
        lists.num_copies = 0


cdef bint _is_writeable(cnp.ndarray out):
    """Aligned, writeable, native float32 whose channels lie together, without negative strides."""
    if out.shape[0] == 0:    # its strides are any
        return cnp.PyArray_ISWRITEABLE(out)
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(out)
    return cnp.PyArray_ISBEHAVED(out) and strides[0] >= 0 and strides[1] >= 0 and strides[2] == sizeof(float)


cdef bint _share_memory(cnp.ndarray a, cnp.ndarray b):
    """Whether two arrays share a byte; True as well where that is hard to tell."""
    try:
        return np.shares_memory(a, b, max_work=10_000)
    except np.exceptions.TooHardError:
        return True
