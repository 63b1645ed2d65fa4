"""The verbs of a paged cache over its sequences: table, bytes and lock together; see paged/sequences.pxd."""

cimport numpy as cnp
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t, uint64_t

from kvcache.core.locks cimport CallLock
from kvcache.core.kernels cimport num_threads
from kvcache.core.kvrows cimport KvRows
from kvcache.core.mapped cimport MappedMemory
from kvcache.core.pool cimport BlockPool
from kvcache.core.store cimport BlockStore
from kvcache.paged.records cimport Sequence
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.seq_ids cimport uint64_ids
from kvcache.paged.sharing cimport own_runs, reorder_runs
from kvcache.paged.tables cimport BlockTables, count_at, counts_of, start_at

from functools import partial

import numpy as np

from kvcache.core.arguments import described
from kvcache.errors import InvalidOperationError

__all__ = ["PagedSequences"]

cnp.import_array()


cdef inline bint is_inside(CallLock lock) noexcept:
    """Whether this thread holds the lock."""
    return lock.owner == PyThread_get_thread_ident()


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
        self.lock, self.store, self.table = lock, store, table

    # A `with` statement costs 80 ns more than the lock itself: the most frequent calls enter and leave it by hand.

    # -- sequences start and end ----------------------------------------------------------------------------

    def allocate(self, uint64_t seq_id, int64_t num_tokens):
        """A new sequence of `num_tokens` tokens."""
        self.lock.enter()
        try:
            self.table.allocate_(&seq_id, &num_tokens, 1)
            self._clear_new(&num_tokens, 1)
        finally:
            self.lock.leave()

    def allocate_batch(self, seq_ids, const int64_t[::1] num_tokens):
        """Many new sequences, of `num_tokens[i]` tokens each."""
        with self.lock:
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
        if is_inside(self.lock):
            self.table.records.find(seq_id)
        self.lock.run_to_release(partial(self.table.free, seq_id), True)

    def free_batch(self, seq_ids):
        """End many sequences; inside another call of this thread, when that call ends."""
        if not is_inside(self.lock):
            self.lock.run_to_release(partial(self.table.free_batch, seq_ids), True)
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
            self.table.append_(&seq_id, &num_new_tokens, 1)
            self._clear_new(&num_new_tokens, 1)
        finally:
            self.lock.leave()

    def append_batch(self, seq_ids, const int64_t[::1] counts=None):
        """`counts[i]` more tokens in each of many sequences, None: one each."""
        self.lock.enter()
        try:
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
            old = self.table.records.seqs[self.table.records.find(seq_id)].num_tokens
            if num_tokens > old:
                more = num_tokens - old
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
        with self.lock:
            self.store.move_slots(self.table.compact_(seq_id))

    # -- blocks ---------------------------------------------------------------------------------------------

    def grow(self, int64_t num_blocks, reserves):
        """`num_blocks` more blocks, after every function of `reserves` has made room for so many in all."""
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
        cdef Sequence *seq
        cdef bint to_end = stop is None
        cdef int64_t last = 0 if to_end else stop
        with self.lock:
            if uid >= 0:
                self._expect(seq_id, uid)
            table.find_(&seq_id, 1)
            seq = &table.records.seqs[table.picked[0]]
            last = seq.num_tokens if to_end else last
            if not 0 <= start <= last <= seq.num_tokens:
                raise IndexError(f"start: expected 0 <= start <= stop <= {seq.num_tokens}, got [{start}, {last})")
            self.store.named_layer(layer)
            if keys is None:
                keys, values = self.store.new_rows(last - start, 0), self.store.new_rows(last - start, 1)
            else:
                self._check_outputs(keys, values, last - start)
            lists.num_cut = 0
            lists.slice_(seq, start, last)
            if lists.num_cut:
                self.store.read_(layer, lists.cut, lists.num_cut, keys, values)
            table.victims.touched(table.picked[0])
        return keys, values

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int _expect(self, uint64_t seq_id, int64_t uid) except -1:
        if self.table.uid(seq_id) != uid:
            raise InvalidOperationError(f"sequence {seq_id} of this handle was freed or evicted")
        return 0

    cdef int _check_outputs(self, keys, values, int64_t count) except -1:
        for side, out in enumerate((keys, values)):
            shape = (count, self.store.layout.num_heads, self.store.dim_(side))
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
        cdef BlockStore store = self.store
        cdef RunLists lists = table.run_lists
        cdef Sequence *seq
        cdef int64_t i, start, count, total = 0
        store.named_layer(layer)
        table.pick_(ids, n)
        lists.num_cut = 0
        for i in range(n):
            seq = &table.records.seqs[table.picked[i]]
            if counts == NULL and seq.num_tokens == 0:
                raise ValueError(f"seq_ids: expected sequences with tokens, got an empty one: {ids[i]}")
            count = count_at(counts, i)
            start = start_at(seq, starts, i, max(count, 0))
            if name == "start" and starts == NULL and count > seq.num_tokens:
                raise ValueError(f"keys: expected at most {seq.num_tokens} rows for sequence {ids[i]}, got {count}")
            if count < 0 or start < 0 or start > seq.num_tokens - count:
                raise IndexError(f"{name}: expected tokens within [0, {seq.num_tokens}), got {count} from {start} on")
            lists.slice_(seq, start, start + count)
            total += count
        if rows.count != total:
            raise ValueError(f"keys: expected {total} rows for {n} sequences, got {rows.count}")
        store.check_values_(rows, layer)
        if lists.cut_is_shared():
            own_runs(table, starts, counts, n)
            self._copy_blocks()
            lists.num_cut = 0
            for i in range(n):    # the same tokens in blocks of their own, into room that is there
                seq = &table.records.seqs[table.picked[i]]
                start = start_at(seq, starts, i, count_at(counts, i))
                lists.slice_(seq, start, start + count_at(counts, i))
        if lists.num_cut:
            with nogil:
                store.write_(layer, lists.cut, lists.num_cut, rows, num_threads())
        for i in range(n):
            table.victims.touched(table.picked[i])
        return 0

    cdef void _clear_new(self, const int64_t *counts, int64_t n) noexcept:
        cdef Sequence *seq
        cdef int64_t i
        self._copy_blocks()
        for i in range(n):
            seq = &self.table.records.seqs[self.table.picked[i]]
            self.store.clear_new_(seq.runs, seq.num_runs, count_at(counts, i))

    cdef void _copy_blocks(self) noexcept:
        cdef RunLists lists = self.table.run_lists
        if lists.num_copies:
            self.store.copy_(&lists.copy_src[0], &lists.copy_dst[0], lists.num_copies)
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
