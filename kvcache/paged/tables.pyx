"""Block tables: sequences start, grow, fork, shrink, end and are evicted, in integers only; see paged/tables.pxd.

Every verb checks and reserves first and changes afterwards, so a call that raises has changed nothing.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from kvcache.core.block_pool cimport BlockPool
from kvcache.core.counts cimport blocks_of, saturating_sum
from kvcache.core.idmap cimport IdMap
from kvcache.paged.records cimport (
    RUN_STRIDE, RunList, Sequence, SequenceRecords, Span, begins_block, blocks_in_order,
)
from kvcache.paged.residual cimport Residual
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.seq_ids cimport uint64_ids
from kvcache.paged.victims cimport VictimOrder
from kvcache.support.token_ids cimport int32s

import numpy as np

from kvcache.errors import OutOfMemoryError

__all__ = ["BlockTables"]

cnp.import_array()

cdef enum:
    FIRST_ROOM = 16    # rows that `picked` has room for at once: a `free` must not need memory


cdef inline const uint64_t *numbers(cnp.ndarray ids) noexcept:
    return <const uint64_t *>cnp.PyArray_DATA(ids)


cdef const int64_t *counts_of(const int64_t[::1] counts, int64_t n, str name) except? NULL:
    if counts is None:
        return NULL
    if counts.shape[0] != n:
        raise ValueError(f"{name}: expected {n} counts, one per sequence, got {counts.shape[0]}")
    return &counts[0] if n else NULL


cdef bint _distinct(const int32_t[::1] values) except -1:
    """Whether no two are equal; `np.unique` makes eight calls of Python."""
    cdef int32_t[::1] ordered
    cdef Py_ssize_t i
    found = np.array(values)
    found.sort()
    ordered = found
    for i in range(1, ordered.shape[0]):
        if ordered[i - 1] == ordered[i]:
            return False
    return True


cdef class BlockTables:
    """The block tables of all sequences over one pool.

    Args:
        pool: the `BlockPool` that the blocks come from; it may have other holders too.
        block_size: tokens per block, 1 to 256.
        residual: the `Residual` of the sequences; None: they have none.

    A call that names a sequence that does not exist raises SequenceNotFoundError, one that names a sequence twice
    ValueError, one that needs more blocks than are free OutOfMemoryError.
    """

    def __cinit__(self, BlockPool pool not None, int32_t block_size, Residual residual=None):
        self.pool, self.block_size, self.residual = pool, block_size, residual
        self.records = SequenceRecords(pool.num_blocks)
        self.run_lists = RunLists(pool, self.records, block_size)
        if residual is not None:
            residual.run_lists = RunLists(residual.pool, self.records, residual.store.layout.block_size)
        self.victims = VictimOrder(self.records)
        self._make_room(FIRST_ROOM)

    def __dealloc__(self):
        free(self.picked)
        free(self.more_rows)

    # -- reading --------------------------------------------------------------------------------------------

    def __len__(self):
        return self.records.row_by_id.used

    def __contains__(self, uint64_t seq_id):
        return self.records.row_by_id.get(seq_id) >= 0

    def seq_ids(self):
        """Every id, ascending."""
        return self.records.row_by_id.keys_list()

    def uid(self, uint64_t seq_id):
        """A number that no other sequence ever has, also under the same id; -1 when there is no such id.

        Without the lock too: a handle asks for it inside other calls.
        """
        return self.records.uid_(seq_id)

    def info(self, uint64_t seq_id):
        """`(num_tokens, next_position, last_access, access_count, priority, pins, sink_tokens)`."""
        cdef Sequence *seq = &self.records.seqs[self.records.find(seq_id)]
        return (seq.tokens.num_tokens, seq.tokens.next_position, seq.last_access, seq.access_count, seq.priority,
                seq.pins, seq.tokens.sink_tokens)

    def span(self, uint64_t seq_id):
        """`(firsts, base, num_tokens)`: the tokens [0, firsts) and [base, num_tokens) have rows in f16."""
        cdef Sequence *seq = &self.records.seqs[self.records.find(seq_id)]
        return seq.span.firsts, seq.span.base, seq.tokens.num_tokens

    def runs(self, uint64_t seq_id):
        """The sequence's runs, a copy, dtype `RUN`."""
        return self.run_lists.copy_runs(&self.records.seqs[self.records.find(seq_id)].tokens)

    def run_positions(self, uint64_t seq_id):
        """Text position of each run's first token, int64, a copy."""
        return self.run_lists.copy_positions(&self.records.seqs[self.records.find(seq_id)].tokens)

    def blocks(self, uint64_t seq_id):
        """The blocks in the order of the text, each once, int32."""
        return self.run_lists.distinct_blocks(&self.records.seqs[self.records.find(seq_id)].tokens)

    def csr(self, seq_ids):
        """`(indptr, indices, last_page_len)`, int32: the block tables one after another, each block once."""
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        cdef int64_t i, n = ids.shape[0], total = 0
        cdef RunList *held
        self.find_(numbers(ids), n)
        for i in range(n):
            total += self.records.seqs[self.picked[i]].tokens.num_runs
        cdef cnp.ndarray indptr = np.zeros(n + 1, np.int32), lengths = np.zeros(n, np.int32)
        cdef cnp.ndarray blocks = np.empty(total, np.int32)
        total = 0
        for i in range(n):
            held = &self.records.seqs[self.picked[i]].tokens
            total += blocks_in_order(held, int32s(blocks) + total)
            int32s(indptr)[i + 1] = <int32_t>total
            if held.num_runs:
                int32s(lengths)[i] = held.runs[held.num_runs - 1].stop
        return indptr, blocks[:total], lengths

    def references(self):
        """References that the sequences hold on each block, int32 `(num_blocks,)`."""
        return self._count_references(self.pool, False)

    cdef object _count_references(self, BlockPool pool, bint residual):
        cdef cnp.ndarray counts = np.zeros(pool.num_blocks, np.int32)
        cdef int64_t row, run
        cdef Sequence *seq
        cdef RunList *held
        for row in range(self.records.capacity):
            seq = &self.records.seqs[row]
            held = &seq.residual if residual else &seq.tokens
            for run in range(held.num_runs if seq.uid >= 0 else 0):
                int32s(counts)[held.runs[run].block] += begins_block(held, run)
        return counts

    @property
    def nbytes(self):
        """Bytes of this bookkeeping, the order of victims included."""
        scratch = self.room * (sizeof(int32_t) + sizeof(int64_t))
        return self.records.nbytes + self.run_lists.nbytes + self.victims.nbytes + scratch

    def check(self):
        """Verify every invariant of the tables; the owner compares their references with those of the pool.

        Raises:
            AssertionError: naming the broken one.
        """
        self.records.check()
        self.victims.check()
        assert self.run_lists.num_copies == 0, "copies were ordered and not carried out"
        cdef Sequence *seq
        for seq_id in self.seq_ids():
            seq = &self.records.seqs[self.records.find(seq_id)]
            self.run_lists.check_(&seq.tokens, f"sequence {seq_id}")
            if self.residual is not None:
                self.residual.check_(seq)
        if self.residual is not None:
            assert self.residual.run_lists.num_copies == 0, "copies of rows in f16 were ordered and not carried out"
            self.residual.pool.check()
            held = self._count_references(self.residual.pool, True)
            assert (held == self.residual.pool.ref_counts()).all(), "a block of rows in f16 has other references"
        assert (self.references() <= self.pool.ref_counts()).all(), "a block has fewer references than holders"

    # -- many sequences in one call -------------------------------------------------------------------------

    def allocate_batch(self, seq_ids, const int64_t[::1] num_tokens):
        """A new sequence of `num_tokens[i]` tokens on fresh blocks under each of `seq_ids`; returns how many."""
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        self.allocate_(numbers(ids), counts_of(num_tokens, ids.shape[0], "num_tokens"), ids.shape[0])
        return ids.shape[0]

    def append_batch(self, seq_ids, const int64_t[::1] counts=None):
        """`counts[i]` more tokens for each of `seq_ids`, None: one each; returns how many sequences."""
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        self.append_(numbers(ids), counts_of(counts, ids.shape[0], "counts"), ids.shape[0])
        return ids.shape[0]

    def fork_batch(self, sources, targets):
        """A new sequence `targets[i]` that shares every block of `sources[i]`; returns how many."""
        cdef cnp.ndarray olds = uint64_ids(sources), news = uint64_ids(targets)
        if news.shape[0] != olds.shape[0]:
            raise ValueError(f"dst_seqs: expected {olds.shape[0]} sequences, one per source, got {news.shape[0]}")
        self.fork_(numbers(olds), numbers(news), olds.shape[0])
        return olds.shape[0]

    def truncate_batch(self, seq_ids, const int64_t[::1] num_tokens not None):
        """The first `num_tokens[i]` tokens alone of each of `seq_ids`."""
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        self.truncate_(numbers(ids), counts_of(num_tokens, ids.shape[0], "num_tokens"), ids.shape[0])

    def free_batch(self, seq_ids):
        """Drop every block of all these sequences."""
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        self.free_(numbers(ids), ids.shape[0])

    # -- one sequence ---------------------------------------------------------------------------------------

    def free(self, uint64_t seq_id):
        """Drop every block of the sequence; takes no memory."""
        self.free_(&seq_id, 1)

    def adopt(self, uint64_t seq_id, const int32_t[::1] blocks, int64_t num_tokens):
        """A new sequence whose first `num_tokens` tokens lie in `blocks`, which are in use: shared, not copied."""
        cdef int64_t i, count = self._blocks_for(num_tokens)
        self.records.refuse_taken(seq_id)
        if blocks.shape[0] != count or not _distinct(blocks):
            raise ValueError(f"block_ids: expected {count} distinct blocks for {num_tokens} tokens, "
                             f"got {np.asarray(blocks)}")
        self.pool.retain(blocks)
        try:
            self._start(&seq_id, &num_tokens, 1)
        except BaseException:
            for i in range(count):
                self.pool.release_(blocks[i])
            raise
        self.run_lists.adopt_(&self.records.seqs[self.picked[0]].tokens, &blocks[0] if count else NULL, num_tokens)
        self.records.seqs[self.picked[0]].span.base = num_tokens    # no token has a row in f16
        self.victims.entered(self.picked[0])

    def swap(self, uint64_t first, uint64_t second):
        """Two sequences exchange their ids, and their handles; takes no memory."""
        cdef int32_t a = self.records.find(first), b = self.records.find(second)
        self.records.swap_ids_(a, b)
        self.victims.changed(a)
        self.victims.changed(b)

    def keep(self, uint64_t seq_id, const int64_t[::1] indices):
        """Keep only the tokens at `indices`, strictly ascending, among those alive."""
        cdef int32_t row = self.records.find(seq_id)
        cdef int64_t n = indices.shape[0], ranges
        cdef int64_t *bounds = <int64_t *>malloc(max(n, 1) * 2 * sizeof(int64_t))
        if bounds == NULL:
            raise MemoryError(f"no memory for {n} ranges")
        try:
            ranges = self.run_lists.ranges_(&self.records.seqs[row].tokens, &indices[0] if n else NULL, n, bounds)
            if n < self.records.seqs[row].tokens.num_tokens:
                self.keep_(row, bounds, ranges)
        finally:
            free(bounds)

    def stream(self, uint64_t seq_id, int64_t sink_tokens, int64_t window_tokens):
        """Keep the first `sink_tokens` and the last `window_tokens` tokens; the number of dropped ones."""
        cdef int32_t row = self.records.find(seq_id)
        cdef int64_t n = self.records.seqs[row].tokens.num_tokens
        cdef int64_t[4] bounds
        if sink_tokens < 0:
            raise ValueError(f"sink_tokens: expected a count >= 0, got {sink_tokens}")
        if window_tokens < 0:
            raise ValueError(f"window_tokens: expected a count >= 0, got {window_tokens}")
        if sink_tokens >= n or window_tokens >= n - sink_tokens:
            return 0
        bounds[0], bounds[1], bounds[2], bounds[3] = 0, sink_tokens, n - window_tokens, n
        self.keep_(row, bounds, 2)
        self.records.seqs[row].tokens.sink_tokens = sink_tokens
        return n - sink_tokens - window_tokens

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int _make_room(self, int64_t n) except -1:
        cdef int32_t *picked
        cdef int64_t *more
        if n > self.room:
            picked = <int32_t *>realloc(self.picked, 2 * n * sizeof(int32_t))
            if picked == NULL:
                raise MemoryError(f"no memory for a batch of {n} sequences")
            self.picked = picked
            more = <int64_t *>realloc(self.more_rows, 2 * n * sizeof(int64_t))
            if more == NULL:
                raise MemoryError(f"no memory for a batch of {n} sequences")
            self.more_rows, self.room = more, 2 * n
        return 0

    cdef int find_(self, const uint64_t *ids, int64_t n) except -1:
        cdef int64_t i
        self._make_room(n)
        for i in range(n):
            self.picked[i] = self.records.find(ids[i])
        return 0

    cdef int pick_(self, const uint64_t *ids, int64_t n) except -1:
        cdef IdMap row_by_id = self.records.row_by_id
        cdef Sequence *seqs = self.records.seqs
        cdef int64_t i
        cdef int32_t row
        self._make_room(n)
        self.calls += 1
        for i in range(n):
            row = row_by_id.get(ids[i])
            if row < 0:
                self.records.find(ids[i])
            if seqs[row].mark == self.calls:
                raise ValueError(f"seq_ids: expected each sequence once, got {ids[i]} twice")
            seqs[row].mark = self.calls
            self.picked[i] = row
        return 0

    cdef int64_t _blocks_for(self, int64_t num_tokens, str name="num_tokens") except -1:
        if num_tokens < 0:
            raise ValueError(f"{name}: expected a count >= 0, got {num_tokens}")
        return blocks_of(num_tokens, self.block_size)

    cdef int _start(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1:
        cdef int64_t i, num_runs, residual_runs = -1 if self.residual is None else 0, taken = 0
        cdef bint holes = False
        cdef Sequence *source
        try:
            for i in range(n):
                # None of the ids existed when the call began: one that exists now was started by this call.
                if self.records.row_by_id.get(ids[i]) >= 0:
                    raise ValueError(f"seq_ids: expected each new sequence once, got {ids[i]} twice")
                if counts != NULL:
                    num_runs = blocks_of(counts[i], self.block_size)
                else:
                    source = &self.records.seqs[self.picked[n + i]]
                    num_runs, holes = source.tokens.num_runs, source.tokens.positions != NULL
                    residual_runs = source.residual.num_runs if residual_runs >= 0 else -1
                self.victims.reserve_()
                self.picked[i] = self.records.open_(ids[i], num_runs, holes, residual_runs)
                taken += 1
        except BaseException:
            for i in range(taken):
                self.end_(self.picked[i])
            raise
        return 0

    cdef bint end_(self, int32_t row) noexcept:
        cdef Sequence *seq = &self.records.seqs[row]
        cdef bint one_left = False
        if seq.tokens.num_runs:
            one_left = self.pool.release_each(&seq.tokens.runs[0].block, seq.tokens.num_runs, RUN_STRIDE)
        if seq.residual.num_runs:
            self.residual.pool.release_each(&seq.residual.runs[0].block, seq.residual.num_runs, RUN_STRIDE)
        self.victims.left(row)
        self.records.close_(row)
        return one_left

    cdef int allocate_(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1:
        cdef int64_t i, blocks = 0
        cdef Sequence *seq
        for i in range(n):
            self.records.refuse_taken(ids[i])
        for i in range(n):
            blocks = saturating_sum(blocks, self._blocks_for(counts[i]))
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        self._make_room(n)
        self._start(ids, counts, n)
        try:
            self._reserve_rows(counts, n)
        except BaseException:
            for i in range(n):
                self.end_(self.picked[i])
            raise
        for i in range(n):
            seq = &self.records.seqs[self.picked[i]]
            self._append_rows(seq, counts[i], self.more_rows[i])
            self.run_lists.extend_(&seq.tokens, counts[i])
            self.victims.entered(self.picked[i])
        return 0

    cdef int _reserve_rows(self, const int64_t *counts, int64_t n) except -1:
        cdef Residual residual = self.residual
        cdef int64_t i, size
        cdef Sequence *seq
        if residual is None:
            return 0
        for i in range(n):
            seq = &self.records.seqs[self.picked[i]]
            self.more_rows[i] = residual.rows_to_append(seq, count_at(counts, i))
        residual.make_room_(residual.run_lists.blocks_to_append(self.picked, True, self.more_rows, n))
        residual.run_lists.reserve_copies_(n)
        size = residual.run_lists.block_size
        for i in range(n):    # one run more where rows between others leave
            seq = &self.records.seqs[self.picked[i]]
            self.records.reserve_(&seq.residual, seq.residual.num_runs + blocks_of(self.more_rows[i], size) + 1)
        return 0

    cdef void _append_rows(self, Sequence *seq, int64_t count, int64_t rows) noexcept nogil:
        cdef Span span
        if self.residual is not None:
            span = self.residual.appended(seq, count)
            self.residual.run_lists.extend_(&seq.residual, rows)
            self.residual.pack_(seq, span)

    cdef int append_(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1:
        cdef RunLists run_lists = self.run_lists
        cdef VictimOrder victims = self.victims
        cdef Sequence *seqs = self.records.seqs
        cdef Sequence *seq
        cdef int64_t i, count = 1, blocks
        self.pick_(ids, n)
        if counts != NULL:
            for i in range(n):
                self._blocks_for(counts[i], "counts")
        blocks = run_lists.blocks_to_append(self.picked, False, counts, n)
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        for i in range(n):
            seq = &seqs[self.picked[i]]
            if counts != NULL:
                count = counts[i]
            # A run for each block, and one in the tail block where a hole lies before the new tokens.
            if seq.tokens.num_runs + count + 1 > seq.tokens.capacity:
                self.records.reserve_(&seq.tokens, seq.tokens.num_runs + blocks_of(count, self.block_size) + 1)
        if blocks > 0:
            run_lists.reserve_copies_(n)
        self._reserve_rows(counts, n)
        for i in range(n):
            seq = &seqs[self.picked[i]]
            if counts != NULL:
                count = counts[i]
            self._append_rows(seq, count, self.more_rows[i])
            if count != 1 or not run_lists.step_(&seq.tokens):
                run_lists.extend_(&seq.tokens, count)
            victims.touched(self.picked[i])
            victims.lengthened(self.picked[i])
        return 0

    cdef int fork_(self, const uint64_t *sources, const uint64_t *targets, int64_t n) except -1:
        cdef int64_t i
        cdef Sequence *source
        cdef Sequence *target
        for i in range(n):
            self.records.refuse_taken(targets[i])
        self._make_room(2 * n)
        for i in range(n):
            self.picked[n + i] = self.records.find(sources[i])
        self._start(targets, NULL, n)
        for i in range(n):
            source, target = &self.records.seqs[self.picked[n + i]], &self.records.seqs[self.picked[i]]
            self.share_(source, target)
            target.priority = source.priority
            self.victims.entered(self.picked[i])
        self.forks += n
        return 0

    cdef void share_(self, const Sequence *source, Sequence *target) noexcept nogil:
        self.run_lists.share_(&source.tokens, &target.tokens)
        target.span = source.span
        if self.residual is not None:
            self.residual.run_lists.share_(&source.residual, &target.residual)

    cdef int truncate_(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1:
        cdef int64_t i, most
        cdef Sequence *seq
        self.pick_(ids, n)
        for i in range(n):
            most = self.records.seqs[self.picked[i]].tokens.num_tokens
            if not 0 <= counts[i] <= most:
                raise ValueError(f"num_tokens: expected 0 to {most} for sequence {ids[i]}, got {counts[i]}")
        for i in range(n):
            seq = &self.records.seqs[self.picked[i]]
            if self.residual is not None:
                self.residual.truncate_(seq, counts[i])
            self.run_lists.truncate_(&seq.tokens, counts[i])
            self.victims.changed(self.picked[i])
        return 0

    cdef int free_(self, const uint64_t *ids, int64_t n) except -1:
        cdef int64_t i
        self.pick_(ids, n)
        for i in range(n):
            self.end_(self.picked[i])
        return 0

    cdef object compact_(self, uint64_t seq_id):
        return self.run_lists.compact_(&self.records.seqs[self.records.find(seq_id)].tokens)

    cdef int pack_(self, uint64_t seq_id, int64_t num_tokens) except -1:
        cdef Sequence *seq = &self.records.seqs[self.records.find(seq_id)]
        self.records.reserve_(&seq.residual, seq.residual.num_runs + 1)
        self.residual.pack_(seq, self.residual.packed(seq, min(num_tokens, seq.tokens.num_tokens)))
        return 0

    cdef int keep_(self, int32_t row, const int64_t *bounds, int64_t ranges) except -1:
        cdef Sequence *seq = &self.records.seqs[row]
        cdef RunList kept
        cdef RunList rows
        cdef int64_t *row_bounds = NULL
        cdef int64_t row_ranges = 0
        cdef Span span
        memset(&kept, 0, sizeof(RunList))
        memset(&rows, 0, sizeof(RunList))
        try:
            self.run_lists.select_(&seq.tokens, bounds, ranges, &kept)
            if self.residual is not None:
                row_bounds = <int64_t *>malloc((4 * ranges + 1) * sizeof(int64_t))
                if row_bounds == NULL:
                    raise MemoryError(f"no memory for {2 * ranges} ranges")
                span = self.residual.thinned(seq, bounds, ranges, row_bounds, &row_ranges)
                self.residual.run_lists.select_(&seq.residual, row_bounds, row_ranges, &rows)
        except MemoryError:
            free(kept.runs)
            free(kept.positions)
            free(rows.runs)
            free(rows.positions)
            raise
        finally:
            free(row_bounds)
        self.run_lists.become_(&seq.tokens, &kept)
        if self.residual is not None:
            self.residual.run_lists.become_(&seq.residual, &rows)
            self.residual.run_lists.count_positions_(&seq.residual)
            seq.span = span
        self.victims.changed(row)
        return 0
