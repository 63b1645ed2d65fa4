"""Block tables: allocate, append, fork, truncate, keep, compact, in integers only; the bytes are the store's.

Every public call checks first and changes afterwards, so a call that raises has changed nothing.
"""

from cython cimport wraparound
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kvcache.core.kernels cimport kvc_run
from kvcache.paged.victims cimport RankedRows
from kvcache.paged.records cimport RUN_STRIDE, Sequence, position_of, run_length

import numpy as np

from kvcache.errors import OutOfMemoryError

__all__ = ["SequenceTable"]


cdef class SequenceTable(RankedRows):
    """The block tables of all sequences over one pool.

    Args:
        pool: the `BlockPool` that the blocks come from; it may have other holders too.
        block_size: tokens per block, 1 to 256.
    """

    # -- life of a sequence ---------------------------------------------------------------------------------

    def allocate(self, uint64_t seq_id, int64_t num_tokens):
        """A new sequence of `num_tokens` tokens on fresh blocks.

        Raises:
            InvalidOperationError: the id is taken.
            OutOfMemoryError: too few blocks are free.
        """
        cdef int64_t blocks = self.blocks_for(num_tokens)
        self.refuse_taken(seq_id)
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        cdef int32_t row = self.enter_(seq_id, blocks, holes=False)
        self.extend_(row, num_tokens)
        self.touch_(row)
        self.rank_(row)

    def adopt(self, uint64_t seq_id, blocks, int64_t num_tokens):
        """A new sequence whose first `num_tokens` tokens lie in `blocks`, which are in use: shared, not copied.

        The last block may be covered in part; the first append then copies it for this sequence alone.

        Args:
            blocks: int32 `(ceil(num_tokens / block_size),)`, full but for the last.

        Raises:
            InvalidOperationError: the id is taken.
            ValueError: the number of blocks does not fit `num_tokens`.
            BlockNotFoundError: a block is not in use.
        """
        cdef const int32_t[::1] ids = np.ascontiguousarray(blocks, np.int32)
        cdef int64_t i, count = self.blocks_for(num_tokens)
        self.refuse_taken(seq_id)
        if ids.shape[0] != count or len(np.unique(ids)) != count:
            raise ValueError(f"expected {count} distinct blocks for {num_tokens} tokens, got {np.asarray(ids)}")
        self.pool.retain(ids)
        cdef int32_t row
        try:
            row = self.enter_(seq_id, count, holes=False)
        except BaseException:
            for i in range(count):
                self.pool.release_(ids[i])
            raise
        cdef Sequence *seq = &self.seqs[row]
        for i in range(count):
            seq.runs[i].block = ids[i]
            seq.runs[i].first = 0
            seq.runs[i].stop = <uint16_t>min(<int64_t>self.block_size, num_tokens - i * self.block_size)
        seq.num_runs = count
        seq.num_tokens = seq.next_position = num_tokens
        self.touch_(row)
        self.rank_(row)

    def append(self, uint64_t seq_id, int64_t count):
        """`count` more tokens at the end; a shared tail block is copied first (see `take_copies`).

        Raises:
            SequenceNotFoundError, ValueError: no such sequence, a negative count.
            OutOfMemoryError: too few blocks are free, the copy counted in `requested`.
        """
        cdef int32_t row = self.row_of(seq_id)
        if count < 0:
            raise ValueError(f"expected a count of tokens >= 0, got {count}")
        cdef int64_t blocks = self.need_(row, count)
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        self.reserve_(row, self.seqs[row].num_runs + blocks + 1)
        self.reserve_copies_(1)
        self.extend_(row, count)
        self.touch_(row)
        self.lengthened_(row)

    def fork(self, uint64_t source, uint64_t target):
        """A new sequence `target` that shares every block of `source`.

        Raises:
            InvalidOperationError: `target` is taken (looked at first).
            SequenceNotFoundError: there is no `source`.
        """
        self.refuse_taken(target)
        cdef int32_t from_row = self.row_of(source)
        self.fork_(from_row, self.enter_fork_(from_row, target))

    def swap(self, uint64_t first, uint64_t second):
        """Two sequences exchange their ids, and their handles. Takes no memory: the way back to a fork that was kept.

        Raises:
            SequenceNotFoundError: one of them is not there.
        """
        cdef int32_t a = self.row_of(first), b = self.row_of(second)
        self.seqs[a].seq_id, self.seqs[b].seq_id = second, first
        self.seqs[a].uid, self.seqs[b].uid = self.seqs[b].uid, self.seqs[a].uid
        self.rows.put(first, b)
        self.rows.put(second, a)
        self.rank_(a)
        self.rank_(b)

    def free(self, uint64_t seq_id):
        """Let go of every block of the sequence.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        self.leave_(self.row_of(seq_id))

    # -- which tokens stay ----------------------------------------------------------------------------------

    def truncate(self, uint64_t seq_id, int64_t num_tokens):
        """Keep the first `num_tokens` tokens; the next one takes the position of the first that left.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; not between 0 and its length.
        """
        cdef int32_t row = self.row_of(seq_id)
        cdef Sequence *seq = &self.seqs[row]
        if not 0 <= num_tokens <= seq.num_tokens:
            raise ValueError(f"expected 0 <= num_tokens <= {seq.num_tokens}, got {num_tokens}")
        cdef kvc_run *last
        cdef int64_t drop = seq.num_tokens - num_tokens, length
        while drop > 0:
            last = &seq.runs[seq.num_runs - 1]
            length = min(drop, run_length(last[0]))
            last.stop -= <uint16_t>length
            drop -= length
            seq.next_position = position_of(seq, seq.num_runs - 1, self.block_size) + run_length(last[0])
            if last.stop == last.first:
                seq.num_runs -= 1
                if seq.num_runs == 0 or seq.runs[seq.num_runs - 1].block != last.block:
                    self.pool.release_(last.block)
        seq.num_tokens = num_tokens
        seq.sink_tokens = min(seq.sink_tokens, num_tokens)
        self.rank_(row)

    def keep(self, uint64_t seq_id, const int64_t[::1] indices):
        """Keep only the tokens at `indices` (strictly ascending, among those alive).

        Raises:
            SequenceNotFoundError, ValueError, IndexError: no such sequence; not ascending; out of range.
        """
        cdef int32_t row = self.row_of(seq_id)
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t i, n = indices.shape[0], ranges = 0, sinks = 0
        for i in range(n):
            if not 0 <= indices[i] < seq.num_tokens:
                raise IndexError(f"expected token indices in [0, {seq.num_tokens}), got {indices[i]}")
            if i > 0 and indices[i] <= indices[i - 1]:
                raise ValueError(f"expected ascending indices, got {indices[i]} after {indices[i - 1]}")
            ranges += i == 0 or indices[i] != indices[i - 1] + 1
            sinks += indices[i] < seq.sink_tokens
        cdef int64_t *bounds = <int64_t *>malloc(max(ranges, 1) * 2 * sizeof(int64_t))
        if bounds == NULL:
            raise MemoryError(f"no memory for {ranges} ranges")
        ranges = 0
        for i in range(n):
            if i == 0 or indices[i] != indices[i - 1] + 1:
                bounds[2 * ranges] = indices[i]
                ranges += 1
            bounds[2 * ranges - 1] = indices[i] + 1
        try:
            self.keep_(row, bounds, ranges)
        finally:
            free(bounds)
        seq.sink_tokens = sinks
        self.rank_(row)

    def stream(self, uint64_t seq_id, int64_t sink_tokens, int64_t window_tokens):
        """Keep the first `sink_tokens` and the last `window_tokens` tokens; the number that left.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; a negative count.
        """
        cdef int32_t row = self.row_of(seq_id)
        if sink_tokens < 0 or window_tokens < 0:
            raise ValueError(f"expected counts >= 0, got sink {sink_tokens} and window {window_tokens}")
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t n = seq.num_tokens
        if sink_tokens >= n or window_tokens >= n - sink_tokens:
            return 0
        cdef int64_t[4] bounds
        bounds[0], bounds[1], bounds[2], bounds[3] = 0, sink_tokens, n - window_tokens, n
        self.keep_(row, bounds, 2)
        seq.sink_tokens = sink_tokens
        self.rank_(row)
        return n - sink_tokens - window_tokens

    @wraparound(True)
    def compact(self, uint64_t seq_id):
        """Move the tokens into as few blocks as they need, one after another.

        Without shared blocks the tokens move forward within the sequence's own blocks and nothing is
        allocated; with shared ones they move to fresh blocks.

        Returns:
            int32 `(n, 5)`, the moves to carry out in this order: source block, source slot, target block,
            target slot, tokens. Source and target may overlap, the target never behind the source.

        Raises:
            SequenceNotFoundError: no such sequence.
            OutOfMemoryError: too few blocks are free for the fresh ones.
        """
        cdef int32_t row = self.row_of(seq_id)
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t i, count = self.blocks_for(seq.num_tokens), own = 0
        cdef bint shared = False
        for i in range(seq.num_runs):
            shared |= self.pool.refs[seq.runs[i].block] > 1
            own += i == 0 or seq.runs[i].block != seq.runs[i - 1].block
        if own == count:
            return np.empty((0, 5), np.int32)
        if shared and count > self.pool.num_free:
            raise OutOfMemoryError(count, self.pool.num_free)
        old_runs, old_positions = self.runs(seq_id), self.run_positions(seq_id)
        blocks = old_runs["block"]
        old_blocks = np.ascontiguousarray(blocks[np.r_[True, blocks[1:] != blocks[:-1]]])
        # At most one more piece per target block than there are runs. All memory is there before the first change.
        moves = np.empty((seq.num_runs + count, 5), np.int32)
        self.reserve_(row, seq.num_runs + count)
        cdef const kvc_run[::1] olds = old_runs
        cdef const int64_t[::1] places = old_positions
        cdef const int32_t[::1] leaving = old_blocks if shared else old_blocks[count:]
        cdef int32_t[::1] target = self.pool.acquire(count) if shared else old_blocks
        cdef int32_t[:, ::1] move = moves
        cdef int64_t done = 0, run = 0, n = 0, length, first, position
        for i in range(olds.shape[0]):
            first, position = olds[i].first, places[i]
            while first < olds[i].stop:
                length = min(olds[i].stop - first, self.block_size - done % self.block_size)
                seq.runs[run].block = target[done // self.block_size]
                seq.runs[run].first = <uint16_t>(done % self.block_size)
                seq.runs[run].stop = <uint16_t>(done % self.block_size + length)
                seq.positions[run] = position
                move[n, 0], move[n, 1] = olds[i].block, <int32_t>first
                move[n, 2], move[n, 3], move[n, 4] = seq.runs[run].block, seq.runs[run].first, <int32_t>length
                n += 1
                if run > 0 and seq.runs[run - 1].block == seq.runs[run].block \
                        and seq.positions[run - 1] + run_length(seq.runs[run - 1]) == position:
                    seq.runs[run - 1].stop = seq.runs[run].stop
                else:
                    run += 1
                done += length
                first += length
                position += length
        seq.num_runs = run
        seq.dense = run == count
        if leaving.shape[0]:
            self.pool.release_each(&leaving[0], leaving.shape[0], 1)
        return moves[:n]

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int32_t enter_fork_(self, int32_t from_row, uint64_t seq_id) except -1:
        return self.enter_(seq_id, self.seqs[from_row].num_runs, self.seqs[from_row].positions != NULL)

    cdef void fork_(self, int32_t from_row, int32_t row) noexcept nogil:
        cdef Sequence *old = &self.seqs[from_row]
        cdef Sequence *new = &self.seqs[row]
        memcpy(new.runs, old.runs, old.num_runs * sizeof(kvc_run))
        if old.positions != NULL:
            memcpy(new.positions, old.positions, old.num_runs * sizeof(int64_t))
        new.num_runs, new.num_tokens, new.next_position = old.num_runs, old.num_tokens, old.next_position
        new.sink_tokens, new.dense, new.priority = old.sink_tokens, old.dense, old.priority
        if new.num_runs:
            self.pool.retain_each(&new.runs[0].block, new.num_runs, RUN_STRIDE)
        self.forks += 1
        self.touch_(row)
        self.rank_(row)
