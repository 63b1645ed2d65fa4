"""Block tables: allocate, append, fork, truncate, keep, evict, in integers only; the bytes are the store's.

Every public call checks first and changes afterwards, so a call that raises has changed nothing.
"""

from cython cimport wraparound
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from kvcache._heap cimport IndexedHeap
from kvcache._idmap cimport IdMap
from kvcache._kernels cimport kvc_run, kvc_seq
from kvcache._pool cimport BlockPool

import numpy as np

from kvcache.errors import InvalidOperationError, OutOfMemoryError, SequenceNotFoundError

__all__ = ["RANKS", "RUN", "SequenceTable"]

# One run as NumPy sees it: the same 8 bytes as kvc_run.
RUN = np.dtype([("block", np.int32), ("first", np.uint16), ("stop", np.uint16)])

cdef enum:
    RANK_RECENCY = 0
    RANK_FREQUENCY = 1
    RANK_LENGTH = 2
    RANK_PRIORITY = 3

# What the next victim has least of (most, for length).
RANKS = {"recency": RANK_RECENCY, "frequency": RANK_FREQUENCY, "length": RANK_LENGTH, "priority": RANK_PRIORITY}


cdef inline int64_t run_length(kvc_run run) noexcept nogil:
    return <int64_t>run.stop - run.first


cdef class SequenceTable:
    """The block tables of all sequences over one pool.

    Args:
        pool: the `BlockPool` that the blocks come from; it may have other holders too.
        block_size: tokens per block, 1 to 256.
    """

    def __cinit__(self):
        self.rows = IdMap()
        self.order = IndexedHeap()

    def __init__(self, BlockPool pool not None, int32_t block_size):
        if not 1 <= block_size <= 256:
            raise ValueError(f"expected 1 <= block_size <= 256, got {block_size}")
        self.pool = pool
        self.block_size = block_size
        self.spare = np.empty(0, np.int32)
        self.copy_src = np.empty(16, np.int32)
        self.copy_dst = np.empty(16, np.int32)

    def __dealloc__(self):
        cdef int32_t row
        for row in range(self.capacity):
            free(self.seqs[row].runs)
            free(self.seqs[row].positions)
        free(self.seqs)
        free(self.cut)

    def __len__(self):
        return self.rows.used

    def __contains__(self, uint64_t seq_id):
        return self.rows.get(seq_id) >= 0

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
        cdef int32_t row = self.open_(seq_id, blocks)
        self.extend_(row, num_tokens)
        self.touch_(row)

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
            row = self.open_(seq_id, count)
        except MemoryError:
            self.pool.release(ids)
            raise
        cdef Sequence *seq = &self.seqs[row]
        for i in range(count):
            seq.runs[i].block = ids[i]
            seq.runs[i].first = 0
            seq.runs[i].stop = <uint16_t>min(<int64_t>self.block_size, num_tokens - i * self.block_size)
            seq.positions[i] = i * self.block_size
        seq.num_runs = count
        seq.num_tokens = seq.next_position = num_tokens
        self.touch_(row)

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

    def append_batch(self, const uint64_t[::1] seq_ids):
        """One more token for each of `seq_ids`, all or nothing.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; an id named twice.
            OutOfMemoryError: too few blocks are free for all of them together.
        """
        cdef Py_ssize_t i, n = seq_ids.shape[0]
        cdef int64_t blocks = 0
        cdef int32_t row
        cdef Sequence *seq
        cdef int32_t[::1] rows = np.empty(n, np.int32)
        self.batch += 1
        for i in range(n):
            row = rows[i] = self.row_of(seq_ids[i])
            if self.seqs[row].mark == self.batch:
                raise ValueError(f"expected each sequence once, got {seq_ids[i]} twice")
            self.seqs[row].mark = self.batch
            self.reserve_(row, self.seqs[row].num_runs + 2)
        self.reserve_copies_(n)
        # Of two that share one tail block only the first copies it: count with its reference already gone.
        for i in range(n):
            seq = &self.seqs[rows[i]]
            blocks += self.need_(rows[i], 1)
            if seq.num_runs:
                self.pool.refs[seq.runs[seq.num_runs - 1].block] -= 1
        for i in range(n):
            seq = &self.seqs[rows[i]]
            if seq.num_runs:
                self.pool.refs[seq.runs[seq.num_runs - 1].block] += 1
        if blocks > self.pool.num_free:
            raise OutOfMemoryError(blocks, self.pool.num_free)
        for i in range(n):
            self.extend_(rows[i], 1)
            self.touch_(rows[i])

    def fork(self, uint64_t source, uint64_t target):
        """A new sequence `target` that shares every block of `source`.

        Raises:
            InvalidOperationError: `target` is taken (looked at first).
            SequenceNotFoundError: there is no `source`.
        """
        self.refuse_taken(target)
        cdef int32_t from_row = self.row_of(source)
        cdef int32_t row = self.open_(target, self.seqs[from_row].num_runs)
        cdef Sequence *old = &self.seqs[from_row]
        cdef Sequence *new = &self.seqs[row]
        cdef int64_t i
        memcpy(new.runs, old.runs, old.num_runs * sizeof(kvc_run))
        memcpy(new.positions, old.positions, old.num_runs * sizeof(int64_t))
        new.num_runs, new.num_tokens, new.next_position = old.num_runs, old.num_tokens, old.next_position
        new.sink_tokens, new.dense, new.priority = old.sink_tokens, old.dense, old.priority
        for i in range(new.num_runs):
            if i == 0 or new.runs[i].block != new.runs[i - 1].block:
                self.pool.retain_(new.runs[i].block)
        self.touch_(row)

    def free(self, uint64_t seq_id):
        """Let go of every block of the sequence.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        self.close_(self.row_of(seq_id))

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
            seq.next_position = seq.positions[seq.num_runs - 1] + run_length(last[0])
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
        old_runs = self.runs(seq_id)
        old_positions = self.run_positions(seq_id)
        # At most one more piece per target block than there are runs.
        self.reserve_(row, seq.num_runs + count)
        blocks = old_runs["block"]
        old_blocks = blocks[np.r_[True, blocks[1:] != blocks[:-1]]]
        if shared:
            target = self.pool.acquire(count)
        else:
            target = old_blocks[:count].copy()
        moves = []
        cdef int64_t done = 0, run = 0, length, left
        for (block, first, stop), position in zip(old_runs.tolist(), old_positions.tolist()):
            left = stop - first
            while left:
                length = min(left, self.block_size - done % self.block_size)
                seq.runs[run].block = target[done // self.block_size]
                seq.runs[run].first = <uint16_t>(done % self.block_size)
                seq.runs[run].stop = <uint16_t>(done % self.block_size + length)
                seq.positions[run] = position
                moves.append((block, first, seq.runs[run].block, seq.runs[run].first, length))
                if run > 0 and seq.runs[run - 1].block == seq.runs[run].block \
                        and seq.positions[run - 1] + run_length(seq.runs[run - 1]) == position:
                    seq.runs[run - 1].stop = seq.runs[run].stop
                else:
                    run += 1
                done += length
                first += length
                position += length
                left -= length
        seq.num_runs = run
        seq.dense = run == count
        self.pool.release(old_blocks if shared else old_blocks[count:])
        return np.array(moves, np.int32).reshape(-1, 5)

    # -- who leaves -----------------------------------------------------------------------------------------

    def rank_by(self, rank):
        """Order the victims by `rank`, a key of `RANKS`; ties go to the lowest id."""
        cdef int32_t row
        self.strategy = RANKS[rank]
        for row in range(self.capacity):
            if self.seqs[row].uid >= 0:
                self.rank_(row)

    def victim(self):
        """The id of the next sequence to evict, pinned ones never; None when there is none."""
        cdef int32_t row = self.order.top()
        return None if row < 0 else self.seqs[row].seq_id

    def evict_to(self, double utilization):
        """Evict until at most this share of the pool is in use; the ids that left, in order.

        A sequence whose blocks are all shared frees nothing: such are passed over while there is another.
        """
        evicted = []
        passed = []
        cdef int32_t row
        cdef BlockPool pool = self.pool
        while pool.num_blocks - pool.num_free > utilization * pool.num_blocks:
            row = self.order.top()
            if row >= 0 and self.all_shared_(row):
                self.order.drop(row)
                passed.append(row)
                continue
            if row < 0:
                if not passed:
                    break
                row = passed.pop(0)
            evicted.append(self.seqs[row].seq_id)
            self.close_(row)
            # What it shared may now belong to one that was passed over.
            for other in passed:
                self.rank_(other)
            passed.clear()
        for other in passed:
            self.rank_(other)
        return evicted

    def set_priority(self, uint64_t seq_id, int64_t priority):
        """Under the rank "priority", the lowest leaves first."""
        cdef int32_t row = self.row_of(seq_id)
        self.seqs[row].priority = priority
        self.rank_(row)

    def pin(self, uint64_t seq_id):
        """Never a victim until as many `unpin`."""
        cdef int32_t row = self.row_of(seq_id)
        self.seqs[row].pins += 1
        self.rank_(row)

    def unpin(self, uint64_t seq_id):
        """
        Raises:
            InvalidOperationError: the sequence is not pinned.
        """
        cdef int32_t row = self.row_of(seq_id)
        if self.seqs[row].pins == 0:
            raise InvalidOperationError(f"sequence {seq_id} is not pinned")
        self.seqs[row].pins -= 1
        self.rank_(row)

    def touch(self, uint64_t seq_id):
        """Count an access now."""
        self.touch_(self.row_of(seq_id))

    # -- views ----------------------------------------------------------------------------------------------

    def seq_ids(self):
        """Every id, ascending."""
        return self.rows.keys_list()

    def uid(self, uint64_t seq_id):
        """A number that no other sequence ever has, also under the same id; -1 when there is no such id."""
        cdef int32_t row = self.rows.get(seq_id)
        return -1 if row < 0 else self.seqs[row].uid

    def num_tokens(self, uint64_t seq_id):
        """Tokens alive."""
        return self.seqs[self.row_of(seq_id)].num_tokens

    def info(self, uint64_t seq_id):
        """`(num_tokens, next_position, last_access, access_count, priority, pins, sink_tokens)`."""
        cdef Sequence *seq = &self.seqs[self.row_of(seq_id)]
        return (seq.num_tokens, seq.next_position, seq.last_access, seq.access_count, seq.priority, seq.pins,
                seq.sink_tokens)

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
            view[i] = seq.positions[i]
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
        cdef int64_t total = self.capacity * (sizeof(Sequence) + 4) + self.rows.nbytes + 8 * len(self.copy_src)
        cdef int32_t row
        for row in range(self.capacity):
            total += self.seqs[row].capacity * (sizeof(kvc_run) + sizeof(int64_t))
        return total

    @wraparound(True)
    def check(self):
        """Verify every invariant of the tables; references against the pool are the owner's to compare.

        Raises:
            AssertionError: naming the broken one.
        """
        self.rows.check()
        self.order.check()
        assert self.num_copies == 0, "copies were ordered and not carried out"
        assert self.rows.used + self.num_spare == self.capacity, "a row is lost"
        for seq_id in self.seq_ids():
            row = self.row_of(seq_id)
            n, next_position, _, _, _, pins, sinks = self.info(seq_id)
            runs, positions = self.runs(seq_id), self.run_positions(seq_id)
            lengths = runs["stop"].astype(np.int64) - runs["first"]
            assert (lengths > 0).all() and (runs["stop"] <= self.block_size).all(), f"{seq_id}: a run is empty or too long"
            assert lengths.sum() == n, f"{seq_id}: runs hold {lengths.sum()} tokens, not {n}"
            ends = np.r_[0, positions + lengths]
            assert (positions >= ends[:-1]).all() and next_position >= ends[-1], f"{seq_id}: positions do not ascend"
            blocks = self.blocks(seq_id)
            assert len(np.unique(blocks)) == len(blocks), f"{seq_id}: runs of one block are apart"
            same = runs["block"][1:] == runs["block"][:-1]
            assert (runs["first"][1:][same] >= runs["stop"][:-1][same]).all(), f"{seq_id}: slots overlap"
            assert 0 <= sinks <= n, f"{seq_id}: more sinks than tokens"
            if self.seqs[row].dense:
                assert (lengths[:-1] == self.block_size).all() and (runs["first"] == 0).all(), f"{seq_id}: not dense"
            assert (row in self.order) == (pins == 0), f"{seq_id}: pinned and a victim, or neither"
        assert (self.references() <= self.pool.ref_counts()).all(), "a block has fewer references than holders"

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int64_t blocks_for(self, int64_t num_tokens) except -1:
        if num_tokens < 0:
            raise ValueError(f"expected a count of tokens >= 0, got {num_tokens}")
        return (num_tokens + self.block_size - 1) // self.block_size

    cdef int refuse_taken(self, uint64_t seq_id) except -1:
        if self.rows.get(seq_id) >= 0:
            raise InvalidOperationError(f"sequence {seq_id} already exists")
        return 0

    cdef int32_t row_of(self, uint64_t seq_id) except -1:
        cdef int32_t row = self.rows.get(seq_id)
        if row < 0:
            raise SequenceNotFoundError(seq_id)
        return row

    cdef int32_t open_(self, uint64_t seq_id, int64_t num_runs) except -1:
        if self.num_spare == 0:
            self.grow_rows()
        self.rows.reserve(self.rows.used + 1)
        self.order.reserve(self.capacity)
        cdef int32_t row = self.spare[self.num_spare - 1]
        cdef Sequence *seq = &self.seqs[row]
        self.reserve_(row, num_runs + 1)
        self.num_spare -= 1
        seq.seq_id, seq.uid = seq_id, self.next_uid
        seq.num_runs = seq.num_tokens = seq.next_position = seq.sink_tokens = 0
        seq.access_count = seq.priority = seq.pins = seq.mark = 0
        seq.dense = True
        self.next_uid += 1
        self.rows.put(seq_id, row)
        return row

    cdef int grow_rows(self) except -1:
        cdef int32_t row, old = self.capacity, new = max(2 * self.capacity, 8)
        spare = np.empty(new, np.int32)
        cdef Sequence *seqs = <Sequence *>realloc(self.seqs, new * sizeof(Sequence))
        if seqs == NULL:
            raise MemoryError(f"no memory for {new} sequences")
        self.seqs, self.capacity, self.spare = seqs, new, spare
        for row in range(old, new):
            self.seqs[row].runs, self.seqs[row].positions = NULL, NULL
            self.seqs[row].capacity, self.seqs[row].uid = 0, -1
            self.spare[new - 1 - row] = row       # row `old` comes off the stack first
        self.num_spare = new - old
        return 0

    cdef void close_(self, int32_t row) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t i
        for i in range(seq.num_runs):
            if i == 0 or seq.runs[i].block != seq.runs[i - 1].block:
                self.pool.release_(seq.runs[i].block)
        self.rows.drop(seq.seq_id)
        self.order.drop(row)
        free(seq.runs)
        free(seq.positions)
        seq.runs, seq.positions, seq.capacity, seq.uid = NULL, NULL, 0, -1
        self.spare[self.num_spare] = row
        self.num_spare += 1

    cdef int reserve_(self, int32_t row, int64_t num_runs) except -1:
        cdef Sequence *seq = &self.seqs[row]
        if num_runs <= seq.capacity:
            return 0
        cdef int64_t capacity = max(num_runs, seq.capacity + seq.capacity // 2)
        cdef kvc_run *runs = <kvc_run *>realloc(seq.runs, capacity * sizeof(kvc_run))
        if runs == NULL:
            raise MemoryError(f"no memory for {num_runs} runs")
        seq.runs = runs
        cdef int64_t *positions = <int64_t *>realloc(seq.positions, capacity * sizeof(int64_t))
        if positions == NULL:
            raise MemoryError(f"no memory for {num_runs} runs")
        seq.positions = positions
        seq.capacity = capacity
        return 0

    cdef int reserve_copies_(self, int64_t count) except -1:
        if self.num_copies + count > self.copy_src.shape[0]:
            size = 2 * (self.num_copies + count)
            src, dst = np.empty(size, np.int32), np.empty(size, np.int32)
            src[:self.num_copies], dst[:self.num_copies] = self.copy_src[:self.num_copies], self.copy_dst[:self.num_copies]
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
            blocks += (count - tail + self.block_size - 1) // self.block_size
        return blocks

    cdef void extend_(self, int32_t row, int64_t count) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef kvc_run *last
        cdef kvc_run run
        cdef int64_t length
        while count > 0:
            last = &seq.runs[seq.num_runs - 1] if seq.num_runs else NULL
            if last == NULL or last.stop == self.block_size:
                run.block, run.first = self.pool.take(), 0
                if last != NULL and last.first > 0:
                    seq.dense = False
            else:
                if self.pool.refs[last.block] > 1:
                    self.copy_on_write_(row, seq.num_runs - 1)
                run.block, run.first = last.block, last.stop
            length = min(count, <int64_t>self.block_size - run.first)
            run.stop = <uint16_t>(run.first + length)
            if run.first > 0 and seq.positions[seq.num_runs - 1] + run_length(last[0]) == seq.next_position:
                last.stop = run.stop
            else:
                seq.dense = seq.dense and run.first == 0
                seq.runs[seq.num_runs] = run
                seq.positions[seq.num_runs] = seq.next_position
                seq.num_runs += 1
            seq.num_tokens += length
            seq.next_position += length
            count -= length

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
                positions[n] = seq.positions[run] + start - before
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
        free(seq.runs)
        free(seq.positions)
        seq.runs, seq.positions, seq.capacity = runs, positions, max(capacity, 1)
        seq.num_runs, seq.num_tokens = n, kept
        seq.dense = True
        for i in range(n):
            seq.dense = seq.dense and runs[i].first == 0 and (i == n - 1 or runs[i].stop == self.block_size)
        self.rank_(row)
        return 0

    cdef void describe(self, int32_t row, int64_t num_queries, kvc_seq *out) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        out.runs, out.num_runs, out.num_tokens = seq.runs, seq.num_runs, seq.num_tokens
        out.sink_tokens, out.num_queries = seq.sink_tokens, num_queries

    cdef void touch_(self, int32_t row) noexcept nogil:
        self.clock += 1
        self.seqs[row].last_access = self.clock
        self.seqs[row].access_count += 1
        self.rank_(row)

    cdef void rank_(self, int32_t row) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t key
        if seq.pins > 0:
            self.order.drop(row)
            return
        if self.strategy == RANK_FREQUENCY:
            key = seq.access_count
        elif self.strategy == RANK_LENGTH:
            key = -seq.num_tokens
        elif self.strategy == RANK_PRIORITY:
            key = seq.priority
        else:
            key = seq.last_access
        self.order.put_tied(row, <double>key, seq.seq_id)

    cdef bint all_shared_(self, int32_t row) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t i
        for i in range(seq.num_runs):
            if self.pool.refs[seq.runs[i].block] == 1:
                return False
        return True
