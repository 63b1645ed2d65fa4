"""What happens to one sequence's runs, and what can be read off them.

Steps that can fail come before steps that change, so the verbs in paged/table.pyx are atomic; see paged/sequences.pxd.
"""

from cython cimport wraparound
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from kvcache.core.counts cimport blocks_of
from kvcache.core.kernels cimport kvc_run, kvc_seq
from kvcache.core.pool cimport BlockPool
from kvcache.paged.records cimport RUN_STRIDE, Sequence, SequenceRecords, position_of, run_length

import numpy as np

from kvcache.core.runs import RUN
from kvcache.errors import OutOfMemoryError

__all__ = ["SequenceRows"]


cdef class SequenceRows(SequenceRecords):
    """Records of sequences and their runs over one pool.

    Args:
        pool: the `BlockPool` that the blocks come from; it may have other holders too.
        block_size: tokens per block, 1 to 256.
    """

    def __init__(self, BlockPool pool not None, int32_t block_size):
        SequenceRecords.__init__(self, pool, block_size)
        self.copy_src = np.empty(16, np.int32)
        self.copy_dst = np.empty(16, np.int32)

    def __dealloc__(self):
        free(self.cut)

    # -- views ----------------------------------------------------------------------------------------------

    def runs(self, uint64_t seq_id):
        """The sequence's runs, a copy, dtype `RUN`."""
        cdef Sequence *seq = &self.seqs[self.row_of(seq_id)]
        out = np.empty(seq.num_runs, RUN)
        cdef unsigned char[::1] view = out.view(np.uint8)
        if seq.num_runs:
            memcpy(&view[0], seq.runs, seq.num_runs * sizeof(kvc_run))
        return out

    def run_positions(self, uint64_t seq_id):
        """Text position of each run's first token, int64, a copy."""
        cdef Sequence *seq = &self.seqs[self.row_of(seq_id)]
        out = np.empty(seq.num_runs, np.int64)
        cdef int64_t[::1] view = out
        cdef int64_t i
        for i in range(seq.num_runs):
            view[i] = position_of(seq, i, self.block_size)
        return out

    @wraparound(True)
    def blocks(self, uint64_t seq_id):
        """The blocks in the order of the text, each once, int32."""
        block = self.runs(seq_id)["block"]
        return np.ascontiguousarray(block[np.r_[True, block[1:] != block[:-1]]] if len(block) else block)

    def take_copies(self):
        """`(source, target)` block ids, int32, that copy-on-write wants copied; the list is empty afterwards."""
        cdef int32_t n = self.num_copies
        self.num_copies = 0
        return np.array(self.copy_src[:n]), np.array(self.copy_dst[:n])

    def references(self):
        """References that the sequences hold on each block, int32 `(num_blocks,)`."""
        counts = np.zeros(self.pool.num_blocks, np.int32)
        for seq_id in self.seq_ids():
            np.add.at(counts, self.blocks(seq_id), 1)
        return counts

    @property
    def nbytes(self):
        """Bytes of this bookkeeping."""
        scratch = 2 * sizeof(int32_t) * self.copy_src.shape[0] + self.cut_capacity * sizeof(kvc_run)
        return SequenceRecords.nbytes.__get__(self) + scratch

    @wraparound(True)
    def check(self):
        """Verify every invariant of the tables; references against the pool are the owner's to compare.

        Raises:
            AssertionError: naming the broken one.
        """
        SequenceRecords.check(self)
        assert self.num_copies == 0, "copies were ordered and not carried out"
        for seq_id in self.seq_ids():
            row = self.row_of(seq_id)
            n, next_position, _, _, _, _, sinks = self.info(seq_id)
            runs, positions = self.runs(seq_id), self.run_positions(seq_id)
            lengths = runs["stop"].astype(np.int64) - runs["first"]
            whole = (lengths > 0).all() and (runs["stop"] <= self.block_size).all()
            assert whole, f"{seq_id}: a run is empty or too long"
            assert lengths.sum() == n, f"{seq_id}: runs hold {lengths.sum()} tokens, not {n}"
            ends = np.r_[0, positions + lengths]
            assert (positions >= ends[:-1]).all() and next_position >= ends[-1], f"{seq_id}: positions do not ascend"
            blocks = self.blocks(seq_id)
            assert len(np.unique(blocks)) == len(blocks), f"{seq_id}: runs of one block are apart"
            same = runs["block"][1:] == runs["block"][:-1]
            assert (runs["first"][1:][same] >= runs["stop"][:-1][same]).all(), f"{seq_id}: slots overlap"
            assert 0 <= sinks <= n, f"{seq_id}: more sinks than tokens"
            if self.seqs[row].positions == NULL:
                assert self.seqs[row].dense and next_position == n, f"{seq_id}: holes and no positions"
            if self.seqs[row].dense:
                assert (lengths[:-1] == self.block_size).all() and (runs["first"] == 0).all(), f"{seq_id}: not dense"
        assert (self.references() <= self.pool.ref_counts()).all(), "a block has fewer references than holders"

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int reserve_copies_(self, int64_t count) except -1:
        if self.num_copies + count > self.copy_src.shape[0]:
            size = 2 * (self.num_copies + count)
            src, dst = np.empty(size, np.int32), np.empty(size, np.int32)
            src[:self.num_copies] = self.copy_src[:self.num_copies]
            dst[:self.num_copies] = self.copy_dst[:self.num_copies]
            self.copy_src, self.copy_dst = src, dst
        return 0

    cdef int64_t need_(self, int32_t row, int64_t count) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t tail = 0, blocks = 0
        cdef kvc_run last
        if count == 0:
            return 0
        if seq.num_runs:
            last = seq.runs[seq.num_runs - 1]
            tail = self.block_size - last.stop
            blocks = tail > 0 and self.pool.refs[last.block] > 1
        if count > tail:
            blocks += blocks_of(count - tail, self.block_size)
        return blocks

    cdef void extend_(self, int32_t row, int64_t count) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef kvc_run *last = &seq.runs[seq.num_runs - 1] if seq.num_runs else NULL
        if count > 0 and last != NULL and last.stop < self.block_size:
            count -= self.fill_tail_(row, count)
        if count > 0 and last != NULL and last.first > 0:
            seq.dense = False
        if count > 0:
            self.add_blocks_(seq, count)

    cdef void add_blocks_(self, Sequence *seq, int64_t count) noexcept nogil:
        cdef int64_t i, fresh = blocks_of(count, self.block_size)
        cdef kvc_run *runs = seq.runs + seq.num_runs
        self.pool.take_each(&runs[0].block, fresh, RUN_STRIDE)
        for i in range(fresh):
            runs[i].first = 0
            runs[i].stop = <uint16_t>self.block_size
        runs[fresh - 1].stop = <uint16_t>(count - (fresh - 1) * self.block_size)
        if seq.positions != NULL:
            for i in range(fresh):
                seq.positions[seq.num_runs + i] = seq.next_position + i * self.block_size
        seq.num_runs += fresh
        seq.num_tokens += count
        seq.next_position += count

    cdef int64_t fill_tail_(self, int32_t row, int64_t count) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef kvc_run *last = &seq.runs[seq.num_runs - 1]
        cdef int64_t length = min(count, <int64_t>self.block_size - last.stop)
        if self.pool.refs[last.block] > 1:
            self.copy_on_write_(row, seq.num_runs - 1)
        if position_of(seq, seq.num_runs - 1, self.block_size) + run_length(last[0]) == seq.next_position:
            last.stop += <uint16_t>length
        else:    # a hole lies before these tokens: a run of their own in the same block
            seq.dense = False
            seq.runs[seq.num_runs].block = last.block
            seq.runs[seq.num_runs].first = last.stop
            seq.runs[seq.num_runs].stop = <uint16_t>(last.stop + length)
            seq.positions[seq.num_runs] = seq.next_position
            seq.num_runs += 1
        seq.num_tokens += length
        seq.next_position += length
        return length

    cdef void copy_on_write_(self, int32_t row, int64_t run) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef int32_t old = seq.runs[run].block
        cdef int32_t new = self.pool.take()
        cdef int64_t i = run
        while i > 0 and seq.runs[i - 1].block == old:
            i -= 1
        while i < seq.num_runs and seq.runs[i].block == old:
            seq.runs[i].block = new
            i += 1
        self.pool.release_(old)
        self.copy_src[self.num_copies], self.copy_dst[self.num_copies] = old, new
        self.num_copies += 1

    cdef int64_t slice_(self, int32_t row, int64_t start, int64_t stop) except -1:
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t run = 0, before = 0, n = 0, length
        cdef kvc_run piece
        if seq.dense:
            run = start // self.block_size
            before = run * self.block_size
        while run < seq.num_runs and before + run_length(seq.runs[run]) <= start:
            before += run_length(seq.runs[run])
            run += 1
        while start < stop:
            if n == self.cut_capacity:
                self.grow_cut()
            piece = seq.runs[run]
            length = min(stop - start, before + run_length(piece) - start)
            piece.first += <uint16_t>(start - before)
            piece.stop = <uint16_t>(piece.first + length)
            self.cut[n] = piece
            n += 1
            before += run_length(seq.runs[run])
            start += length
            run += 1
        return n

    cdef int grow_cut(self) except -1:
        cdef int64_t capacity = max(2 * self.cut_capacity, 64)
        cdef kvc_run *cut = <kvc_run *>realloc(self.cut, capacity * sizeof(kvc_run))
        if cut == NULL:
            raise MemoryError(f"no memory for {capacity} runs")
        self.cut, self.cut_capacity = cut, capacity
        return 0

    cdef int own_(self, int32_t row, int64_t start, int64_t stop) except -1:
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t i, n = self.slice_(row, start, stop), blocks = 0
        for i in range(n):
            if (i == 0 or self.cut[i].block != self.cut[i - 1].block) and self.pool.refs[self.cut[i].block] > 1:
                blocks += 1
        if blocks == 0:
            return 0
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        self.reserve_copies_(blocks)
        cdef int64_t run = 0, before = 0
        while run < seq.num_runs and before < stop:
            before += run_length(seq.runs[run])
            if before > start and self.pool.refs[seq.runs[run].block] > 1:
                self.copy_on_write_(row, run)
            run += 1
        return 0

    cdef int keep_(self, int32_t row, const int64_t *bounds, int64_t num_ranges) except -1:
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t capacity = seq.num_runs + num_ranges
        cdef kvc_run *runs = <kvc_run *>malloc(max(capacity, 1) * sizeof(kvc_run))
        cdef int64_t *positions = <int64_t *>malloc(max(capacity, 1) * sizeof(int64_t))
        if runs == NULL or positions == NULL:
            free(runs)
            free(positions)
            raise MemoryError(f"no memory for {capacity} runs")
        cdef int64_t i, run = 0, before = 0, n = 0, kept = 0, start, stop, length
        for i in range(num_ranges):
            start, stop = bounds[2 * i], bounds[2 * i + 1]
            while start < stop:
                while before + run_length(seq.runs[run]) <= start:
                    before += run_length(seq.runs[run])
                    run += 1
                length = min(stop - start, before + run_length(seq.runs[run]) - start)
                runs[n].block = seq.runs[run].block
                runs[n].first = <uint16_t>(seq.runs[run].first + start - before)
                runs[n].stop = <uint16_t>(runs[n].first + length)
                positions[n] = position_of(seq, run, self.block_size) + start - before
                n += 1
                kept += length
                start += length
        # Both lists are in the order of the text, so one walk finds the blocks that no run names any more.
        cdef int64_t j = 0
        for i in range(seq.num_runs):
            if i > 0 and seq.runs[i].block == seq.runs[i - 1].block:
                continue
            while j > 0 and j < n and runs[j].block == runs[j - 1].block:
                j += 1
            if j < n and runs[j].block == seq.runs[i].block:
                j += 1
            else:
                self.pool.release_(seq.runs[i].block)
        self.run_room += 2 * max(capacity, 1) - seq.capacity * (1 + (seq.positions != NULL))
        free(seq.runs)
        free(seq.positions)
        seq.runs, seq.positions, seq.capacity = runs, positions, max(capacity, 1)
        seq.num_runs, seq.num_tokens = n, kept
        seq.dense = True
        for i in range(n):
            seq.dense = seq.dense and runs[i].first == 0 and (i == n - 1 or runs[i].stop == self.block_size)
        return 0

    cdef void describe(self, int32_t row, int64_t num_queries, kvc_seq *out) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        out.runs, out.num_runs, out.num_tokens = seq.runs, seq.num_runs, seq.num_tokens
        out.sink_tokens, out.num_queries = seq.sink_tokens, num_queries
