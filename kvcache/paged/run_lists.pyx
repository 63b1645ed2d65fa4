"""Every change of a sequence's runs, and what is read from them, in integers alone; see paged/run_lists.pxd."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint16_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove

from kvcache.core.block_pool cimport BlockPool
from kvcache.core.counts cimport blocks_of, saturating_sum
from kvcache.kernels.kernels cimport kvc_run
from kvcache.paged.records cimport (
    RUN_STRIDE, RunList, Sequence, SequenceRecords, begins_block, blocks_in_order, position_of, room_in_tail,
    run_length,
)
from kvcache.support.token_ids cimport int32s

import numpy as np

from kvcache.core.runs import RUN
from kvcache.errors import OutOfMemoryError

__all__ = ["RunLists"]

cnp.import_array()


cdef class RunLists:
    """Lists of runs over one pool.

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

    cdef bint shares_all(self, const RunList *held) noexcept nogil:
        cdef int64_t i
        for i in range(held.num_runs):
            if self.pool.refs[held.runs[i].block] == 1:
                return False
        return True

    cdef int64_t _run_at(self, const RunList *held, int64_t token, int64_t *before) noexcept nogil:
        """The run of a token, and in `before` the tokens of the runs before it."""
        cdef int64_t run = 0
        before[0] = 0
        if held.dense:
            run = token // self.block_size
            before[0] = run * self.block_size
        while run < held.num_runs and before[0] + run_length(held.runs[run]) <= token:
            before[0] += run_length(held.runs[run])
            run += 1
        return run

    cdef int slice_(self, const RunList *held, int64_t start, int64_t stop) except -1:
        cdef int64_t before, length, run = self._run_at(held, start, &before)
        cdef kvc_run piece
        while start < stop:
            if self.num_cut == self.cut_capacity:
                self.grow_cut()
            piece = held.runs[run]
            length = min(stop - start, before + run_length(piece) - start)
            piece.first += <uint16_t>(start - before)
            piece.stop = <uint16_t>(piece.first + length)
            self.cut[self.num_cut] = piece
            self.num_cut += 1
            before += run_length(held.runs[run])
            start += length
            run += 1
        return 0

    cdef int grow_cut(self) except -1:
        cdef int64_t capacity = max(2 * self.cut_capacity, 64)
        cdef kvc_run *cut = <kvc_run *>realloc(self.cut, capacity * sizeof(kvc_run))
        if cut == NULL:
            raise MemoryError(f"no memory for {capacity} runs")
        self.cut, self.cut_capacity = cut, capacity
        return 0

    cdef object copy_runs(self, const RunList *held):
        cdef cnp.ndarray out = np.empty(held.num_runs, RUN)
        if held.num_runs:
            memcpy(cnp.PyArray_DATA(out), held.runs, held.num_runs * sizeof(kvc_run))
        return out

    cdef object copy_positions(self, const RunList *held):
        cdef cnp.ndarray out = np.empty(held.num_runs, np.int64)
        cdef int64_t *positions = <int64_t *>cnp.PyArray_DATA(out)
        cdef int64_t i
        for i in range(held.num_runs):
            positions[i] = position_of(held, i, self.block_size)
        return out

    cdef object distinct_blocks(self, const RunList *held):
        cdef cnp.ndarray out = np.empty(held.num_runs, np.int32)
        cdef int64_t num_blocks = blocks_in_order(held, int32s(out))
        return out if num_blocks == held.num_runs else out[:num_blocks].copy()

    cdef int check_(self, const RunList *held, str where) except -1:
        cdef int64_t i, position, end = 0, num_tokens = 0
        cdef kvc_run run, before
        blocks = self.distinct_blocks(held).tolist()
        assert len(set(blocks)) == len(blocks), f"{where}: runs of one block are apart"
        for i in range(held.num_runs):
            run, position = held.runs[i], position_of(held, i, self.block_size)
            assert run.first < run.stop <= self.block_size, f"{where}: a run is empty or too long"
            assert position >= end, f"{where}: positions do not ascend"
            if i:
                before = held.runs[i - 1]
                assert run.block != before.block or run.first >= before.stop, f"{where}: slots overlap"
                assert not held.dense or before.stop == self.block_size, f"{where}: not dense"
            assert not held.dense or run.first == 0, f"{where}: not dense"
            num_tokens += run_length(run)
            end = position + run_length(run)
        assert held.next_position >= end, f"{where}: positions do not ascend"
        assert num_tokens == held.num_tokens, f"{where}: runs hold {num_tokens} tokens, not {held.num_tokens}"
        assert 0 <= held.sink_tokens <= held.num_tokens, f"{where}: more sinks than tokens"
        if held.positions == NULL:
            assert held.dense and held.next_position == held.num_tokens, f"{where}: holes and no positions"
        return 0

    # -- more tokens ----------------------------------------------------------------------------------------

    cdef int64_t blocks_to_append(self, const int32_t *rows, bint residual, const int64_t *counts,
                                  int64_t n) noexcept nogil:
        cdef Sequence *seqs = self.records.seqs
        cdef int32_t *refs = &self.pool.refs[0] if self.pool.num_blocks else NULL
        cdef RunList *held
        cdef int32_t tail
        cdef int64_t i, undo, count = 1, room, blocks = 0
        cdef bint shared = False
        for i in range(n):
            held = &seqs[rows[i]].residual if residual else &seqs[rows[i]].tokens
            if counts != NULL:
                count = counts[i]
            room = room_in_tail(held, self.block_size)
            if count > room:
                blocks = saturating_sum(blocks, blocks_of(count - room, self.block_size))
            if room > 0 and count > 0:
                shared |= refs[held.runs[held.num_runs - 1].block] > 1
        if not shared:
            return blocks
        # k that append to one shared tail block make k - 1 copies if nobody else holds it: count by dropping references
        # one by one, then restore them.
        for undo in range(2):
            for i in range(n):
                held = &seqs[rows[i]].residual if residual else &seqs[rows[i]].tokens
                if room_in_tail(held, self.block_size) > 0 and (counts == NULL or counts[i] > 0):
                    tail = held.runs[held.num_runs - 1].block
                    blocks += undo == 0 and refs[tail] > 1
                    refs[tail] += 1 if undo else -1
        return blocks

    cdef bint step_(self, RunList *held) noexcept nogil:
        cdef kvc_run *last = &held.runs[held.num_runs - 1]
        if held.num_runs == 0 or last.stop == self.block_size or self.pool.refs[last.block] > 1:
            return False
        if position_of(held, held.num_runs - 1, self.block_size) + last.stop - last.first != held.next_position:
            return False
        last.stop += 1
        held.num_tokens += 1
        held.next_position += 1
        return True

    cdef void extend_(self, RunList *held, int64_t count) noexcept nogil:
        cdef int64_t tail = min(count, room_in_tail(held, self.block_size))
        if tail > 0:
            self._fill_tail(held, tail)
        if count > tail:
            if held.num_runs and held.runs[held.num_runs - 1].first > 0:
                held.dense = False
            self._add_blocks(held, count - tail)

    cdef void _fill_tail(self, RunList *held, int64_t count) noexcept nogil:
        cdef kvc_run *last = &held.runs[held.num_runs - 1]
        if self.pool.refs[last.block] > 1:
            self._copy_on_write(held, held.num_runs - 1)
        if position_of(held, held.num_runs - 1, self.block_size) + run_length(last[0]) == held.next_position:
            last.stop += <uint16_t>count
        else:    # a hole lies before these tokens: a run of their own in the same block
            held.dense = False
            last[1].block, last[1].first, last[1].stop = last.block, last.stop, <uint16_t>(last.stop + count)
            held.positions[held.num_runs] = held.next_position
            held.num_runs += 1
        held.num_tokens += count
        held.next_position += count

    cdef void _add_blocks(self, RunList *held, int64_t count) noexcept nogil:
        cdef int64_t i, fresh = blocks_of(count, self.block_size)
        cdef kvc_run *runs = held.runs + held.num_runs
        self.pool.take_each(&runs[0].block, fresh, RUN_STRIDE)
        for i in range(fresh):
            runs[i].first = 0
            runs[i].stop = <uint16_t>self.block_size
        runs[fresh - 1].stop = <uint16_t>(count - (fresh - 1) * self.block_size)
        if held.positions != NULL:
            for i in range(fresh):
                held.positions[held.num_runs + i] = held.next_position + i * self.block_size
        held.num_runs += fresh
        held.num_tokens += count
        held.next_position += count

    # -- shared blocks --------------------------------------------------------------------------------------

    cdef void adopt_(self, RunList *held, const int32_t *blocks, int64_t num_tokens) noexcept nogil:
        cdef int64_t i
        held.num_runs = blocks_of(num_tokens, self.block_size)
        held.num_tokens = held.next_position = num_tokens
        for i in range(held.num_runs):
            held.runs[i].block = blocks[i]
            held.runs[i].first = 0
            held.runs[i].stop = <uint16_t>min(<int64_t>self.block_size, num_tokens - i * self.block_size)

    cdef void share_(self, const RunList *source, RunList *target) noexcept nogil:
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

    cdef int64_t drop_(self, const RunList *held, int64_t start, int64_t stop, int32_t change) noexcept nogil:
        cdef int64_t end, run = self._run_at(held, start, &end), first = run, blocks = 0
        while start < stop and end < stop:
            if run == first or held.runs[run].block != held.runs[run - 1].block:
                blocks += self.pool.refs[held.runs[run].block] > 1
                self.pool.refs[held.runs[run].block] += change
            end += run_length(held.runs[run])
            run += 1
        return blocks

    cdef void own_(self, RunList *held, int64_t start, int64_t stop) noexcept nogil:
        cdef int64_t end, run = self._run_at(held, start, &end)
        while start < stop and end < stop:
            if self.pool.refs[held.runs[run].block] > 1:
                self._copy_on_write(held, run)
            end += run_length(held.runs[run])
            run += 1

    cdef void _copy_on_write(self, RunList *held, int64_t run) noexcept nogil:
        """A fresh block in place of a run's block, in all runs of it."""
        cdef int32_t old = held.runs[run].block
        cdef int32_t new = self.pool.take()
        while run > 0 and held.runs[run - 1].block == old:
            run -= 1
        while run < held.num_runs and held.runs[run].block == old:
            held.runs[run].block = new
            run += 1
        self.pool.release_(old)
        self.copy_src[self.num_copies], self.copy_dst[self.num_copies] = old, new
        self.num_copies += 1

    # -- fewer tokens ---------------------------------------------------------------------------------------

    cdef void truncate_(self, RunList *held, int64_t num_tokens) noexcept nogil:
        cdef kvc_run *last
        cdef int64_t drop = held.num_tokens - num_tokens, length
        while drop > 0:
            last = &held.runs[held.num_runs - 1]
            length = min(drop, run_length(last[0]))
            last.stop -= <uint16_t>length
            drop -= length
            # The next token takes the position of the first one that is dropped.
            held.next_position = position_of(held, held.num_runs - 1, self.block_size) + run_length(last[0])
            if last.stop == last.first:
                held.num_runs -= 1
                if held.num_runs == 0 or held.runs[held.num_runs - 1].block != last.block:
                    self.pool.release_(last.block)
        held.num_tokens = num_tokens
        held.sink_tokens = min(held.sink_tokens, num_tokens)

    cdef void drop_between_(self, RunList *held, int64_t first, int64_t stop) noexcept nogil:
        cdef int64_t before, end, i, a = self._run_at(held, first, &before), b = self._run_at(held, stop, &end)
        cdef int64_t left = a + (first > before)    # runs that stay in front: run a may lose its end, b its beginning
        cdef kvc_run *runs = held.runs
        if first >= stop:
            return
        if a == b and first > before:    # both of its ends stay
            memmove(runs + a + 1, runs + a, (held.num_runs - a) * sizeof(kvc_run))
            held.num_runs += 1
            b += 1
        if first > before:
            runs[a].stop = <uint16_t>(runs[a].first + first - before)
        if b < held.num_runs:
            runs[b].first += <uint16_t>(stop - end)
        for i in range(left, b):    # blocks that no other run has
            if i > 0 and (runs[i].block == runs[i - 1].block or left > 0 and runs[i].block == runs[left - 1].block):
                continue
            if b == held.num_runs or runs[i].block != runs[b].block:
                self.pool.release_(runs[i].block)
        memmove(runs + left, runs + b, (held.num_runs - b) * sizeof(kvc_run))
        held.num_runs -= b - left
        held.num_tokens -= stop - first
        self.count_positions_(held)

    cdef void count_positions_(self, RunList *held) noexcept nogil:
        cdef int64_t i
        held.next_position = 0
        held.dense = True
        for i in range(held.num_runs):
            held.positions[i] = held.next_position
            held.next_position += run_length(held.runs[i])
            held.dense = held.dense and held.runs[i].first == 0 \
                and (i == held.num_runs - 1 or held.runs[i].stop == self.block_size)

    cdef int64_t ranges_(self, const RunList *held, const int64_t *indices, int64_t n, int64_t *bounds) except -1:
        cdef int64_t i, ranges = 0
        for i in range(n):
            if not 0 <= indices[i] < held.num_tokens:
                raise IndexError(f"indices: expected tokens in [0, {held.num_tokens}), got {indices[i]}")
            if i > 0 and indices[i] <= indices[i - 1]:
                raise ValueError(f"indices: expected ascending ones, got {indices[i]} after {indices[i - 1]}")
            if i == 0 or indices[i] != indices[i - 1] + 1:
                bounds[2 * ranges] = indices[i]
                ranges += 1
            bounds[2 * ranges - 1] = indices[i] + 1
        return ranges

    cdef int select_(self, const RunList *held, const int64_t *bounds, int64_t ranges, RunList *kept) except -1:
        cdef int64_t i, run = 0, before = 0, n = 0, start, stop, length
        kept.capacity = max(held.num_runs + ranges, 1) + 1
        kept.runs = <kvc_run *>malloc(kept.capacity * sizeof(kvc_run))
        kept.positions = <int64_t *>malloc(kept.capacity * sizeof(int64_t))
        if kept.runs == NULL or kept.positions == NULL:
            raise MemoryError(f"no memory for {kept.capacity} runs")
        kept.num_tokens, kept.next_position, kept.dense = 0, held.next_position, True
        for i in range(ranges):
            start, stop = bounds[2 * i], bounds[2 * i + 1]
            kept.sink_tokens += max(0, min(stop, held.sink_tokens) - start)
            while start < stop:
                while before + run_length(held.runs[run]) <= start:
                    before += run_length(held.runs[run])
                    run += 1
                length = min(stop - start, before + run_length(held.runs[run]) - start)
                kept.runs[n].block = held.runs[run].block
                kept.runs[n].first = <uint16_t>(held.runs[run].first + start - before)
                kept.runs[n].stop = <uint16_t>(kept.runs[n].first + length)
                kept.positions[n] = position_of(held, run, self.block_size) + start - before
                n += 1
                kept.num_tokens += length
                start += length
        kept.num_runs = n
        for i in range(n):
            kept.dense = kept.dense and kept.runs[i].first == 0 \
                and (i == n - 1 or kept.runs[i].stop == self.block_size)
        return 0

    cdef void become_(self, RunList *held, const RunList *kept) noexcept nogil:
        cdef int64_t i, j = 0
        # Both lists are in the order of the text, so one walk finds the blocks that no run names any more.
        for i in range(held.num_runs):
            if not begins_block(held, i):
                continue
            while j > 0 and j < kept.num_runs and not begins_block(kept, j):
                j += 1
            if j < kept.num_runs and kept.runs[j].block == held.runs[i].block:
                j += 1
            else:
                self.pool.release_(held.runs[i].block)
        self.records.replace_room_(held, kept.runs, kept.positions, kept.capacity)
        held.num_runs, held.num_tokens, held.dense = kept.num_runs, kept.num_tokens, kept.dense
        held.next_position, held.sink_tokens = kept.next_position, kept.sink_tokens

    # -- scattered tokens -----------------------------------------------------------------------------------

    cdef object compact_(self, RunList *held):
        """Name as few blocks as the tokens need: the sequence's own ones, or fresh ones if one of these is shared.

        Returns the moves in order: source block, source slot, target block, target slot, tokens. Source and target may
        overlap, the target never behind the source. And the blocks that the sequence leaves: the caller releases them
        behind the moves, for what nobody refers to does not stay.
        """
        cdef int64_t i, count = blocks_of(held.num_tokens, self.block_size)
        old_runs, old_positions = self.copy_runs(held), self.copy_positions(held)
        old_blocks = self.distinct_blocks(held)
        cdef const kvc_run[::1] runs = old_runs
        cdef const int64_t[::1] positions = old_positions
        cdef const int32_t[::1] blocks = old_blocks
        cdef bint shared = False
        if blocks.shape[0] == count:
            return np.empty((0, 5), np.int32), old_blocks[:0]
        for i in range(blocks.shape[0]):
            shared |= self.pool.refs[blocks[i]] > 1
        if shared and count > self.pool.num_free:
            raise OutOfMemoryError(count, self.pool.num_free)
        # At most one more piece per target block than there are runs. All memory is reserved before the first change.
        moves = np.empty((held.num_runs + count, 5), np.int32)
        self.records.reserve_(held, held.num_runs + count)
        cdef int32_t[::1] target = np.empty(count, np.int32) if shared else old_blocks
        cdef int32_t[:, ::1] move = moves
        if shared:
            self.pool.take_each(&target[0], count, 1)
        cdef kvc_run piece
        cdef kvc_run *last = NULL
        cdef int64_t done = 0, n = 0, length, first, position
        held.num_runs = 0
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
                        and held.positions[held.num_runs - 1] + run_length(last[0]) == position:
                    last.stop = piece.stop
                else:
                    last = &held.runs[held.num_runs]
                    last[0] = piece
                    held.positions[held.num_runs] = position
                    held.num_runs += 1
                done += length
                first += length
                position += length
        held.dense = held.num_runs == count
        return moves[:n], old_blocks if shared else old_blocks[count:]
