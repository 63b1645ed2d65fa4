"""Block tables: sequences start, grow, fork, shrink, end and are evicted, in integers only; see paged/tables.pxd.

Every verb checks and reserves first and changes afterwards, so a call that raises has changed nothing.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, realloc

from kvcache.core.counts cimport blocks_of, saturating_sum
from kvcache.core.idmap cimport IdMap
from kvcache.core.pool cimport BlockPool
from kvcache.core.tokens cimport int32s
from kvcache.paged.records cimport RUN_STRIDE, Sequence, SequenceRecords, begins_block, blocks_in_order, room_in_tail
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.seq_ids cimport uint64_ids
from kvcache.paged.victims cimport VictimOrder

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


cdef class BlockTables:
    """The block tables of all sequences over one pool.

    Args:
        pool: the `BlockPool` that the blocks come from; it may have other holders too.
        block_size: tokens per block, 1 to 256.

    A call that names a sequence that does not exist raises SequenceNotFoundError, one that names a sequence twice
    ValueError, one that needs more blocks than are free OutOfMemoryError.
    """

    def __cinit__(self, BlockPool pool not None, int32_t block_size):
        self.pool, self.block_size = pool, block_size
        self.records = SequenceRecords(pool.num_blocks)
        self.run_lists = RunLists(pool, self.records, block_size)
        self.victims = VictimOrder(self.records)
        self._make_room(FIRST_ROOM)

    def __dealloc__(self):
        free(self.picked)

    # -- reading --------------------------------------------------------------------------------------------

    def __len__(self):
        return self.records.row_by_id.used

    def __contains__(self, uint64_t seq_id):
        return self.records.row_by_id.get(seq_id) >= 0

    def seq_ids(self):
        """Every id, ascending."""
        return self.records.row_by_id.keys_list()

    def uid(self, uint64_t seq_id):
        """A number that no other sequence ever has, also under the same id; -1 when there is no such id."""
        cdef int32_t row = self.records.row_by_id.get(seq_id)
        return -1 if row < 0 else self.records.seqs[row].uid

    def info(self, uint64_t seq_id):
        """`(num_tokens, next_position, last_access, access_count, priority, pins, sink_tokens)`."""
        cdef Sequence *seq = &self.records.seqs[self.records.find(seq_id)]
        return (seq.num_tokens, seq.next_position, seq.last_access, seq.access_count, seq.priority, seq.pins,
                seq.sink_tokens)

    def runs(self, uint64_t seq_id):
        """The sequence's runs, a copy, dtype `RUN`."""
        return self.run_lists.copy_runs(&self.records.seqs[self.records.find(seq_id)])

    def run_positions(self, uint64_t seq_id):
        """Text position of each run's first token, int64, a copy."""
        return self.run_lists.copy_positions(&self.records.seqs[self.records.find(seq_id)])

    def blocks(self, uint64_t seq_id):
        """The blocks in the order of the text, each once, int32."""
        return self.run_lists.distinct_blocks(&self.records.seqs[self.records.find(seq_id)])

    def csr(self, seq_ids):
        """`(indptr, indices, last_page_len)`, int32: the block tables one after another, each block once."""
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        cdef int64_t i, n = ids.shape[0], total = 0
        cdef Sequence *seq
        self.find_(numbers(ids), n)
        for i in range(n):
            total += self.records.seqs[self.picked[i]].num_runs
        cdef cnp.ndarray indptr = np.zeros(n + 1, np.int32), lengths = np.zeros(n, np.int32)
        cdef cnp.ndarray blocks = np.empty(total, np.int32)
        total = 0
        for i in range(n):
            seq = &self.records.seqs[self.picked[i]]
            total += blocks_in_order(seq, int32s(blocks) + total)
            int32s(indptr)[i + 1] = <int32_t>total
            if seq.num_runs:
                int32s(lengths)[i] = seq.runs[seq.num_runs - 1].stop
        return indptr, blocks[:total], lengths

    def references(self):
        """References that the sequences hold on each block, int32 `(num_blocks,)`."""
        cdef cnp.ndarray counts = np.zeros(self.pool.num_blocks, np.int32)
        cdef int64_t row, run
        cdef Sequence *seq
        for row in range(self.records.capacity):
            seq = &self.records.seqs[row]
            for run in range(seq.num_runs if seq.uid >= 0 else 0):
                int32s(counts)[seq.runs[run].block] += begins_block(seq, run)
        return counts

    @property
    def nbytes(self):
        """Bytes of this bookkeeping, the order of victims included."""
        return self.records.nbytes + self.run_lists.nbytes + self.victims.nbytes + self.room * sizeof(int32_t)

    def check(self):
        """Verify every invariant of the tables; the owner compares their references with those of the pool.

        Raises:
            AssertionError: naming the broken one.
        """
        self.records.check()
        self.victims.check()
        assert self.run_lists.num_copies == 0, "copies were ordered and not carried out"
        for seq_id in self.seq_ids():
            self.run_lists.check_(&self.records.seqs[self.records.find(seq_id)])
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
        if blocks.shape[0] != count or len(np.unique(blocks)) != count:
            raise ValueError(f"block_ids: expected {count} distinct blocks for {num_tokens} tokens, "
                             f"got {np.asarray(blocks)}")
        self.pool.retain(blocks)
        try:
            self._start(&seq_id, &num_tokens, 1)
        except BaseException:
            for i in range(count):
                self.pool.release_(blocks[i])
            raise
        self.run_lists.adopt_(&self.records.seqs[self.picked[0]], &blocks[0] if count else NULL, num_tokens)
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
        cdef int64_t n = indices.shape[0]
        self.run_lists.keep_(&self.records.seqs[row], &indices[0] if n else NULL, n)
        self.victims.changed(row)

    def stream(self, uint64_t seq_id, int64_t sink_tokens, int64_t window_tokens):
        """Keep the first `sink_tokens` and the last `window_tokens` tokens; the number of dropped ones."""
        cdef int32_t row = self.records.find(seq_id)
        cdef int64_t before = self.records.seqs[row].num_tokens
        self.run_lists.stream_(&self.records.seqs[row], sink_tokens, window_tokens)
        self.victims.changed(row)
        return before - self.records.seqs[row].num_tokens

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int _make_room(self, int64_t n) except -1:
        cdef int32_t *grown
        if n > self.room:
            grown = <int32_t *>realloc(self.picked, 2 * n * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError(f"no memory for a batch of {n} sequences")
            self.picked, self.room = grown, 2 * n
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
        cdef int64_t i, num_runs, taken = 0
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
                    num_runs, holes = source.num_runs, source.positions != NULL
                self.victims.reserve_()
                self.picked[i] = self.records.open_(ids[i], num_runs, holes)
                taken += 1
        except BaseException:
            for i in range(taken):
                self.end_(self.picked[i])
            raise
        return 0

    cdef bint end_(self, int32_t row) noexcept nogil:
        cdef Sequence *seq = &self.records.seqs[row]
        cdef bint one_left = False
        if seq.num_runs:
            one_left = self.pool.release_each(&seq.runs[0].block, seq.num_runs, RUN_STRIDE)
        self.victims.left(row)
        self.records.close_(row)
        return one_left

    cdef int allocate_(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1:
        cdef int64_t i, blocks = 0
        for i in range(n):
            self.records.refuse_taken(ids[i])
        for i in range(n):
            blocks = saturating_sum(blocks, self._blocks_for(counts[i]))
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        self._make_room(n)
        self._start(ids, counts, n)
        for i in range(n):
            self.run_lists.extend_(&self.records.seqs[self.picked[i]], counts[i])
            self.victims.entered(self.picked[i])
        return 0

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
        blocks = self._blocks_to_append(counts, n)
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        for i in range(n):
            seq = &seqs[self.picked[i]]
            if counts != NULL:
                count = counts[i]
            # A run for each block, and one in the tail block where a hole lies before the new tokens.
            if seq.num_runs + count + 1 > seq.capacity:
                self.records.reserve_(seq, seq.num_runs + blocks_of(count, self.block_size) + 1)
        if blocks > 0:
            run_lists.reserve_copies_(n)
        for i in range(n):
            seq = &seqs[self.picked[i]]
            if counts != NULL:
                count = counts[i]
            if count != 1 or not run_lists.step_(seq):
                run_lists.extend_(seq, count)
            victims.touched(self.picked[i])
            victims.lengthened(self.picked[i])
        return 0

    cdef int64_t _blocks_to_append(self, const int64_t *counts, int64_t n) noexcept nogil:
        """Blocks that the picked sequences take for their new tokens, the copies of shared tails counted."""
        cdef Sequence *seqs = self.records.seqs
        cdef int32_t *refs = &self.pool.refs[0] if self.pool.num_blocks else NULL
        cdef Sequence *seq
        cdef int32_t tail
        cdef int64_t i, undo, count = 1, room, blocks = 0
        cdef bint shared = False
        for i in range(n):
            seq = &seqs[self.picked[i]]
            if counts != NULL:
                count = counts[i]
            room = room_in_tail(seq, self.block_size)
            if count > room:
                blocks = saturating_sum(blocks, blocks_of(count - room, self.block_size))
            if room > 0 and count > 0:
                shared |= refs[seq.runs[seq.num_runs - 1].block] > 1
        if not shared:
            return blocks
        # Of those that append to one shared tail block the last holder does not copy it: count each with the references
        # of those before it already dropped, and put them back.
        for undo in range(2):
            for i in range(n):
                seq = &seqs[self.picked[i]]
                if room_in_tail(seq, self.block_size) > 0 and (counts == NULL or counts[i] > 0):
                    tail = seq.runs[seq.num_runs - 1].block
                    blocks += undo == 0 and refs[tail] > 1
                    refs[tail] += 1 if undo else -1
        return blocks

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
            self.run_lists.share_(source, target)
            target.priority = source.priority
            self.victims.entered(self.picked[i])
        self.forks += n
        return 0

    cdef int truncate_(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1:
        cdef int64_t i, most
        self.pick_(ids, n)
        for i in range(n):
            most = self.records.seqs[self.picked[i]].num_tokens
            if not 0 <= counts[i] <= most:
                raise ValueError(f"num_tokens: expected 0 to {most} for sequence {ids[i]}, got {counts[i]}")
        for i in range(n):
            self.run_lists.truncate_(&self.records.seqs[self.picked[i]], counts[i])
            self.victims.changed(self.picked[i])
        return 0

    cdef int free_(self, const uint64_t *ids, int64_t n) except -1:
        cdef int64_t i
        self.pick_(ids, n)
        for i in range(n):
            self.end_(self.picked[i])
        return 0

    cdef object compact_(self, uint64_t seq_id):
        return self.run_lists.compact_(&self.records.seqs[self.records.find(seq_id)])
