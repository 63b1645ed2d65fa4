"""Every change of a sequence's runs, and what is read from them, in integers alone; see paged/run_lists.pxd."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint16_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from kvcache.core.counts cimport blocks_of
from kvcache.core.kernels cimport kvc_run
from kvcache.core.pool cimport BlockPool
from kvcache.core.tokens cimport int32s
from kvcache.paged.records cimport (
    RUN_STRIDE, Sequence, SequenceRecords, blocks_in_order, position_of, room_in_tail, run_length,
)

import numpy as np

from kvcache.core.runs import RUN
from kvcache.errors import OutOfMemoryError

__all__ = ["RunLists"]

cnp.import_array()


cdef class RunLists:
    """The runs of sequences over one pool.

    Args:
        pool: the `BlockPool` that the blocks come from; it may have other holders too.
        records: the `SequenceRecords` that the runs are kept in.
        block_size: tokens per block, 1 to 256.
    """

    def __cinit__(self, BlockPool pool not None, SequenceRecords records not None, int32_t block_size):
        self.pool, self.records, self.block_size = pool, records, block_size
        self.copy_src, self.copy_dst = np.empty(16, np.int32), np.empty(16, np.int32)

    def __dealloc__(self):
        free(self.cut)

    @property
    def nbytes(self):
        """Bytes of the scratch arrays."""
        return 2 * sizeof(int32_t) * self.copy_src.shape[0] + self.cut_capacity * sizeof(kvc_run)

    # -- reading --------------------------------------------------------------------------------------------

    cdef bint shares_all(self, const Sequence *seq) noexcept nogil:
        cdef int64_t i
        for i in range(seq.num_runs):
            if self.pool.refs[seq.runs[i].block] == 1:
                return False
        return True

    cdef int64_t _run_at(self, const Sequence *seq, int64_t token, int64_t *before) noexcept nogil:
        """The run of a token, and in `before` the tokens of the runs before it."""
        cdef int64_t run = 0
        before[0] = 0
        if seq.dense:
            run = token // self.block_size
            before[0] = run * self.block_size
        while run < seq.num_runs and before[0] + run_length(seq.runs[run]) <= token:
            before[0] += run_length(seq.runs[run])
            run += 1
        return run

    cdef int slice_(self, const Sequence *seq, int64_t start, int64_t stop) except -1:
        cdef int64_t before, length, run = self._run_at(seq, start, &before)
        cdef kvc_run piece
        while start < stop:
            if self.num_cut == self.cut_capacity:
                self._grow_cut()
            piece = seq.runs[run]
            length = min(stop - start, before + run_length(piece) - start)
            piece.first += <uint16_t>(start - before)
            piece.stop = <uint16_t>(piece.first + length)
            self.cut[self.num_cut] = piece
            self.num_cut += 1
            before += run_length(seq.runs[run])
            start += length
            run += 1
        return 0

    cdef int _grow_cut(self) except -1:
        cdef int64_t capacity = max(2 * self.cut_capacity, 64)
        cdef kvc_run *cut = <kvc_run *>realloc(self.cut, capacity * sizeof(kvc_run))
        if cut == NULL:
            raise MemoryError(f"no memory for {capacity} runs")
        self.cut, self.cut_capacity = cut, capacity
        return 0

    cdef object copy_runs(self, const Sequence *seq):
        cdef cnp.ndarray out = np.empty(seq.num_runs, RUN)
        if seq.num_runs:
            memcpy(cnp.PyArray_DATA(out), seq.runs, seq.num_runs * sizeof(kvc_run))
        return out

    cdef object copy_positions(self, const Sequence *seq):
        cdef cnp.ndarray out = np.empty(seq.num_runs, np.int64)
        cdef int64_t *positions = <int64_t *>cnp.PyArray_DATA(out)
        cdef int64_t i
        for i in range(seq.num_runs):
            positions[i] = position_of(seq, i, self.block_size)
        return out

    cdef object distinct_blocks(self, const Sequence *seq):
        cdef cnp.ndarray out = np.empty(seq.num_runs, np.int32)
        cdef int64_t num_blocks = blocks_in_order(seq, int32s(out))
        return out if num_blocks == seq.num_runs else out[:num_blocks].copy()

    cdef int check_(self, const Sequence *seq) except -1:
        cdef int64_t i, position, end = 0, num_tokens = 0
        cdef kvc_run run, before
        where, blocks = f"sequence {seq.seq_id}", self.distinct_blocks(seq).tolist()
        assert len(set(blocks)) == len(blocks), f"{where}: runs of one block are apart"
        for i in range(seq.num_runs):
            run, position = seq.runs[i], position_of(seq, i, self.block_size)
            assert run.first < run.stop <= self.block_size, f"{where}: a run is empty or too long"
            assert position >= end, f"{where}: positions do not ascend"
            if i:
                before = seq.runs[i - 1]
                assert run.block != before.block or run.first >= before.stop, f"{where}: slots overlap"
                assert not seq.dense or before.stop == self.block_size, f"{where}: not dense"
            assert not seq.dense or run.first == 0, f"{where}: not dense"
            num_tokens += run_length(run)
            end = position + run_length(run)
        assert seq.next_position >= end, f"{where}: positions do not ascend"
        assert num_tokens == seq.num_tokens, f"{where}: runs hold {num_tokens} tokens, not {seq.num_tokens}"
        assert 0 <= seq.sink_tokens <= seq.num_tokens, f"{where}: more sinks than tokens"
        if seq.positions == NULL:
            assert seq.dense and seq.next_position == seq.num_tokens, f"{where}: holes and no positions"
        return 0

    # -- more tokens ----------------------------------------------------------------------------------------

    cdef bint step_(self, Sequence *seq) noexcept nogil:
        cdef kvc_run *last = &seq.runs[seq.num_runs - 1]
        if seq.num_runs == 0 or last.stop == self.block_size or self.pool.refs[last.block] > 1:
            return False
        if position_of(seq, seq.num_runs - 1, self.block_size) + last.stop - last.first != seq.next_position:
            return False
        last.stop += 1
        seq.num_tokens += 1
        seq.next_position += 1
        return True

    cdef void extend_(self, Sequence *seq, int64_t count) noexcept nogil:
        cdef int64_t tail = min(count, room_in_tail(seq, self.block_size))
        if tail > 0:
            self._fill_tail(seq, tail)
        if count > tail:
            if seq.num_runs and seq.runs[seq.num_runs - 1].first > 0:
                seq.dense = False
            self._add_blocks(seq, count - tail)

    cdef void _fill_tail(self, Sequence *seq, int64_t count) noexcept nogil:
        cdef kvc_run *last = &seq.runs[seq.num_runs - 1]
        if self.pool.refs[last.block] > 1:
            self._copy_on_write(seq, seq.num_runs - 1)
        if position_of(seq, seq.num_runs - 1, self.block_size) + run_length(last[0]) == seq.next_position:
            last.stop += <uint16_t>count
        else:    # a hole lies before these tokens: a run of their own in the same block
            seq.dense = False
            last[1].block, last[1].first, last[1].stop = last.block, last.stop, <uint16_t>(last.stop + count)
            seq.positions[seq.num_runs] = seq.next_position
            seq.num_runs += 1
        seq.num_tokens += count
        seq.next_position += count

    cdef void _add_blocks(self, Sequence *seq, int64_t count) noexcept nogil:
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

    # -- shared blocks --------------------------------------------------------------------------------------

    cdef void adopt_(self, Sequence *seq, const int32_t *blocks, int64_t num_tokens) noexcept nogil:
        cdef int64_t i
        seq.num_runs = blocks_of(num_tokens, self.block_size)
        seq.num_tokens = seq.next_position = num_tokens
        for i in range(seq.num_runs):
            seq.runs[i].block = blocks[i]
            seq.runs[i].first = 0
            seq.runs[i].stop = <uint16_t>min(<int64_t>self.block_size, num_tokens - i * self.block_size)

    cdef void share_(self, const Sequence *source, Sequence *target) noexcept nogil:
        memcpy(target.runs, source.runs, source.num_runs * sizeof(kvc_run))
        if source.positions != NULL:
            memcpy(target.positions, source.positions, source.num_runs * sizeof(int64_t))
        target.num_runs, target.num_tokens = source.num_runs, source.num_tokens
        target.next_position, target.sink_tokens, target.dense = source.next_position, source.sink_tokens, source.dense
        if target.num_runs:
            self.pool.retain_each(&target.runs[0].block, target.num_runs, RUN_STRIDE)

    cdef int reserve_copies_(self, int64_t count) except -1:
        cdef int32_t[::1] src, dst
        if self.num_copies + count > self.copy_src.shape[0]:
            size = 2 * (self.num_copies + count)
            src, dst = np.empty(size, np.int32), np.empty(size, np.int32)
            src[:self.num_copies] = self.copy_src[:self.num_copies]
            dst[:self.num_copies] = self.copy_dst[:self.num_copies]
            self.copy_src, self.copy_dst = src, dst
        return 0

    cdef bint cut_is_shared(self) noexcept nogil:
        cdef int64_t i
        for i in range(self.num_cut):
            if self.pool.refs[self.cut[i].block] > 1:
                return True
        return False

    cdef int64_t drop_(self, const Sequence *seq, int64_t start, int64_t stop, int32_t change) noexcept nogil:
        cdef int64_t end, run = self._run_at(seq, start, &end), first = run, blocks = 0
        while start < stop and end < stop:
            if run == first or seq.runs[run].block != seq.runs[run - 1].block:
                blocks += self.pool.refs[seq.runs[run].block] > 1
                self.pool.refs[seq.runs[run].block] += change
            end += run_length(seq.runs[run])
            run += 1
        return blocks

    cdef void own_(self, Sequence *seq, int64_t start, int64_t stop) noexcept nogil:
        cdef int64_t end, run = self._run_at(seq, start, &end)
        while start < stop and end < stop:
            if self.pool.refs[seq.runs[run].block] > 1:
                self._copy_on_write(seq, run)
            end += run_length(seq.runs[run])
            run += 1

    cdef void _copy_on_write(self, Sequence *seq, int64_t run) noexcept nogil:
        """A fresh block in place of a run's block, in all runs of it."""
        cdef int32_t old = seq.runs[run].block
        cdef int32_t new = self.pool.take()
        while run > 0 and seq.runs[run - 1].block == old:
            run -= 1
        while run < seq.num_runs and seq.runs[run].block == old:
            seq.runs[run].block = new
            run += 1
        self.pool.release_(old)
        self.copy_src[self.num_copies], self.copy_dst[self.num_copies] = old, new
        self.num_copies += 1

    # -- fewer tokens ---------------------------------------------------------------------------------------

    cdef void truncate_(self, Sequence *seq, int64_t num_tokens) noexcept nogil:
        cdef kvc_run *last
        cdef int64_t drop = seq.num_tokens - num_tokens, length
        while drop > 0:
            last = &seq.runs[seq.num_runs - 1]
            length = min(drop, run_length(last[0]))
            last.stop -= <uint16_t>length
            drop -= length
            # The next token takes the position of the first one that is dropped.
            seq.next_position = position_of(seq, seq.num_runs - 1, self.block_size) + run_length(last[0])
            if last.stop == last.first:
                seq.num_runs -= 1
                if seq.num_runs == 0 or seq.runs[seq.num_runs - 1].block != last.block:
                    self.pool.release_(last.block)
        seq.num_tokens = num_tokens
        seq.sink_tokens = min(seq.sink_tokens, num_tokens)

    cdef int keep_(self, Sequence *seq, const int64_t *indices, int64_t n) except -1:
        cdef int64_t i, ranges = 0, sinks = 0
        cdef int64_t *bounds = <int64_t *>malloc(max(n, 1) * 2 * sizeof(int64_t))
        if bounds == NULL:
            raise MemoryError(f"no memory for {n} ranges")
        try:
            for i in range(n):
                if not 0 <= indices[i] < seq.num_tokens:
                    raise IndexError(f"indices: expected tokens in [0, {seq.num_tokens}), got {indices[i]}")
                if i > 0 and indices[i] <= indices[i - 1]:
                    raise ValueError(f"indices: expected ascending ones, got {indices[i]} after {indices[i - 1]}")
                if i == 0 or indices[i] != indices[i - 1] + 1:
                    bounds[2 * ranges] = indices[i]
                    ranges += 1
                bounds[2 * ranges - 1] = indices[i] + 1
                sinks += indices[i] < seq.sink_tokens
            self._keep_ranges(seq, bounds, ranges)
        finally:
            free(bounds)
        seq.sink_tokens = sinks
        return 0

    cdef int stream_(self, Sequence *seq, int64_t sink_tokens, int64_t window_tokens) except -1:
        cdef int64_t n = seq.num_tokens
        cdef int64_t[4] bounds
        if sink_tokens < 0:
            raise ValueError(f"sink_tokens: expected a count >= 0, got {sink_tokens}")
        if window_tokens < 0:
            raise ValueError(f"window_tokens: expected a count >= 0, got {window_tokens}")
        if sink_tokens >= n or window_tokens >= n - sink_tokens:
            return 0
        bounds[0], bounds[1], bounds[2], bounds[3] = 0, sink_tokens, n - window_tokens, n
        self._keep_ranges(seq, bounds, 2)
        seq.sink_tokens = sink_tokens
        return 0

    cdef int _keep_ranges(self, Sequence *seq, const int64_t *bounds, int64_t num_ranges) except -1:
        """Keep the tokens `bounds[2 * i]` to `bounds[2 * i + 1]`, for each of the ranges, ascending and disjoint."""
        cdef int64_t capacity = max(seq.num_runs + num_ranges, 1)
        cdef kvc_run *runs = <kvc_run *>malloc(capacity * sizeof(kvc_run))
        cdef int64_t *positions = <int64_t *>malloc(capacity * sizeof(int64_t))
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
        self.records.replace_room_(seq, runs, positions, capacity)
        seq.num_runs, seq.num_tokens = n, kept
        seq.dense = True
        for i in range(n):
            seq.dense = seq.dense and runs[i].first == 0 and (i == n - 1 or runs[i].stop == self.block_size)
        return 0

    # -- scattered tokens -----------------------------------------------------------------------------------

    cdef object compact_(self, Sequence *seq):
        """Name as few blocks as the tokens need: the sequence's own ones, or fresh ones if one of these is shared.

        Returns the moves in order: source block, source slot, target block, target slot, tokens. Source and target may
        overlap, the target never behind the source.
        """
        cdef int64_t i, count = blocks_of(seq.num_tokens, self.block_size)
        old_runs, old_positions, old_blocks = self.copy_runs(seq), self.copy_positions(seq), self.distinct_blocks(seq)
        cdef const kvc_run[::1] runs = old_runs
        cdef const int64_t[::1] positions = old_positions
        cdef const int32_t[::1] blocks = old_blocks
        cdef bint shared = False
        if blocks.shape[0] == count:
            return np.empty((0, 5), np.int32)
        for i in range(blocks.shape[0]):
            shared |= self.pool.refs[blocks[i]] > 1
        if shared and count > self.pool.num_free:
            raise OutOfMemoryError(count, self.pool.num_free)
        # At most one more piece per target block than there are runs. All memory is reserved before the first change.
        moves = np.empty((seq.num_runs + count, 5), np.int32)
        self.records.reserve_(seq, seq.num_runs + count)
        cdef const int32_t[::1] leaving = old_blocks if shared else old_blocks[count:]
        cdef int32_t[::1] target = np.empty(count, np.int32) if shared else old_blocks
        cdef int32_t[:, ::1] move = moves
        if shared:
            self.pool.take_each(&target[0], count, 1)
        cdef kvc_run piece
        cdef kvc_run *last = NULL
        cdef int64_t done = 0, n = 0, length, first, position
        seq.num_runs = 0
        for i in range(runs.shape[0]):
            first, position = runs[i].first, positions[i]
            while first < runs[i].stop:
                length = min(runs[i].stop - first, self.block_size - done % self.block_size)
                piece.block = target[done // self.block_size]
                piece.first = <uint16_t>(done % self.block_size)
                piece.stop = <uint16_t>(piece.first + length)
                move[n, 0], move[n, 1] = runs[i].block, <int32_t>first
                move[n, 2], move[n, 3], move[n, 4] = piece.block, piece.first, <int32_t>length
                n += 1
                if last != NULL and last.block == piece.block \
                        and seq.positions[seq.num_runs - 1] + run_length(last[0]) == position:
                    last.stop = piece.stop
                else:
                    last = &seq.runs[seq.num_runs]
                    last[0] = piece
                    seq.positions[seq.num_runs] = position
                    seq.num_runs += 1
                done += length
                first += length
                position += length
        seq.dense = seq.num_runs == count
        if leaving.shape[0]:
            self.pool.release_each(&leaving[0], leaving.shape[0], 1)
        return moves[:n]
