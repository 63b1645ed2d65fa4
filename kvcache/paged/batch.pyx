"""Allocate, append, fork, free for many sequences in one call, each all or nothing; see paged/batch.pxd.

Ids may be any integers; a uint64 array is read without a copy. A call costs some nanoseconds per sequence.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, realloc

from kvcache.core.counts cimport saturating_sum
from kvcache.core.kernels cimport kvc_run
from kvcache.paged.seq_ids cimport uint64_ids
from kvcache.paged.records cimport Sequence, position_of
from kvcache.paged.table cimport SequenceTable

import numpy as np

from kvcache.errors import OutOfMemoryError

__all__ = ["BatchTable"]

cnp.import_array()


cdef inline const uint64_t *numbers(cnp.ndarray ids) noexcept:
    return <const uint64_t *>cnp.PyArray_DATA(ids)


cdef class BatchTable(SequenceTable):
    """Block tables whose verbs also come for many sequences at once."""

    def __dealloc__(self):
        free(self.picked)

    def allocate_batch(self, seq_ids, const int64_t[::1] num_tokens):
        """A new sequence of `num_tokens[i]` tokens under each of `seq_ids`.

        Raises:
            InvalidOperationError, ValueError: an id is taken or named twice; lengths do not fit.
            OutOfMemoryError: too few blocks are free for all of them together.
        """
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        cdef int64_t i, n = ids.shape[0], blocks = 0, taken = 0
        cdef int32_t row
        if num_tokens.shape[0] != n:
            raise ValueError(f"expected {n} token counts, got {num_tokens.shape[0]}")
        self.refuse_new_(numbers(ids), n)
        for i in range(n):
            blocks = saturating_sum(blocks, self.blocks_for(num_tokens[i]))
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        self.make_room_(n)
        try:
            for i in range(n):
                self.refuse_twice_(numbers(ids)[i])
                self.picked[i] = self.enter_(numbers(ids)[i], self.blocks_for(num_tokens[i]), holes=False)
                taken += 1
        except BaseException:
            self.leave_picked_(taken)
            raise
        for i in range(n):
            row = self.picked[i]
            self.extend_(row, num_tokens[i])
            self.touch_(row)
            self.rank_(row)

    def append_batch(self, seq_ids):
        """One more token for each of `seq_ids`; returns how many.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; an id named twice.
            OutOfMemoryError: too few blocks are free for all of them together.
        """
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        cdef int64_t i, n = ids.shape[0], blocks
        cdef int32_t row
        self.pick_(numbers(ids), n)
        for i in range(n):
            if self.seqs[self.picked[i]].num_runs + 2 > self.seqs[self.picked[i]].capacity:
                self.reserve_(self.picked[i], self.seqs[self.picked[i]].num_runs + 2)
        blocks = self.need_one_each_(n)
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        if blocks > 0:
            self.reserve_copies_(n)
        for i in range(n):
            row = self.picked[i]
            if not self.step_(&self.seqs[row]):
                self.extend_(row, 1)
            self.touch_(row)
            self.lengthened_(row)
        return n

    def fork_batch(self, sources, targets):
        """A new sequence `targets[i]` that shares every block of `sources[i]`; returns how many.

        Raises:
            InvalidOperationError, ValueError: a target is taken or named twice; not as many as sources.
            SequenceNotFoundError: there is no such source.
        """
        cdef cnp.ndarray olds = uint64_ids(sources), news = uint64_ids(targets)
        cdef int64_t i, n = olds.shape[0], taken = 0
        if news.shape[0] != n:
            raise ValueError(f"expected {n} targets, got {news.shape[0]}")
        self.refuse_new_(numbers(news), n)
        for i in range(n):
            self.row_of(numbers(olds)[i])
        self.make_room_(n)
        try:
            for i in range(n):
                self.refuse_twice_(numbers(news)[i])
                self.picked[i] = self.enter_fork_(self.rows.get(numbers(olds)[i]), numbers(news)[i])
                taken += 1
        except BaseException:
            self.leave_picked_(taken)
            raise
        for i in range(n):
            self.fork_(self.rows.get(numbers(olds)[i]), self.picked[i])
        return n

    def free_batch(self, seq_ids):
        """Let go of every block of all these sequences.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; an id named twice.
        """
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        self.pick_(numbers(ids), ids.shape[0])
        self.leave_picked_(ids.shape[0])

    def csr(self, seq_ids):
        """`(indptr, block_ids, last_block_len)`, int32: the block tables one after another, each block once.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        cdef int64_t i, j, n = ids.shape[0], total = 0
        cdef Sequence *seq
        self.make_room_(n)
        for i in range(n):
            self.picked[i] = self.row_of(numbers(ids)[i])
            total += self.seqs[self.picked[i]].num_runs
        indptr, blocks, lengths = np.zeros(n + 1, np.int32), np.empty(total, np.int32), np.zeros(n, np.int32)
        cdef int32_t[::1] begin = indptr, block = blocks, last = lengths
        total = 0
        for i in range(n):
            seq = &self.seqs[self.picked[i]]
            for j in range(seq.num_runs):
                if j == 0 or seq.runs[j].block != seq.runs[j - 1].block:
                    block[total] = seq.runs[j].block
                    total += 1
            begin[i + 1] = <int32_t>total
            if seq.num_runs:
                last[i] = seq.runs[seq.num_runs - 1].stop
        return indptr, blocks[:total], lengths

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int make_room_(self, int64_t n) except -1:
        cdef int32_t *grown
        if n > self.room:
            grown = <int32_t *>realloc(self.picked, 2 * n * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError(f"no memory for a batch of {n} sequences")
            self.picked, self.room = grown, 2 * n
        return 0

    cdef int pick_(self, const uint64_t *ids, int64_t n) except -1:
        cdef int64_t i
        cdef int32_t row
        self.make_room_(n)
        self.batch += 1
        for i in range(n):
            row = self.rows.get(ids[i])
            if row < 0:
                self.row_of(ids[i])
            if self.seqs[row].mark == self.batch:
                raise ValueError(f"expected each sequence once, got {ids[i]} twice")
            self.seqs[row].mark = self.batch
            self.picked[i] = row
        return 0

    cdef int refuse_new_(self, const uint64_t *ids, int64_t n) except -1:
        cdef int64_t i
        for i in range(n):
            self.refuse_taken(ids[i])
        return 0

    cdef int refuse_twice_(self, uint64_t id) except -1:
        # It was not there when the call began: this call has entered it.
        if self.rows.get(id) >= 0:
            raise ValueError(f"expected each new sequence once, got {id} twice")
        return 0

    cdef void leave_picked_(self, int64_t n) noexcept nogil:
        cdef int64_t i
        for i in range(n):
            self.leave_(self.picked[i])

    cdef bint step_(self, Sequence *seq) noexcept nogil:
        """The common case of `extend_(row, 1)`: a slot left in a tail block of its own; False if it is another."""
        cdef kvc_run *last = &seq.runs[seq.num_runs - 1]
        if seq.num_runs == 0 or last.stop == self.block_size or self.pool.refs[last.block] > 1:
            return False
        if position_of(seq, seq.num_runs - 1, self.block_size) + last.stop - last.first != seq.next_position:
            return False
        last.stop += 1
        seq.num_tokens += 1
        seq.next_position += 1
        return True

    cdef int64_t need_one_each_(self, int64_t n) noexcept nogil:
        cdef int64_t i, blocks = 0
        cdef Sequence *seq
        cdef kvc_run *last
        cdef bint shared = False
        for i in range(n):
            seq = &self.seqs[self.picked[i]]
            last = &seq.runs[seq.num_runs - 1]
            if seq.num_runs == 0 or last.stop == self.block_size:
                blocks += 1
            else:
                shared |= self.pool.refs[last.block] > 1
        if not shared:
            return blocks
        # Of two that share one tail block only the first copies it: count with its reference already gone.
        blocks = 0
        for i in range(n):
            seq = &self.seqs[self.picked[i]]
            blocks += self.need_(self.picked[i], 1)
            if seq.num_runs:
                self.pool.refs[seq.runs[seq.num_runs - 1].block] -= 1
        for i in range(n):
            seq = &self.seqs[self.picked[i]]
            if seq.num_runs:
                self.pool.refs[seq.runs[seq.num_runs - 1].block] += 1
        return blocks
