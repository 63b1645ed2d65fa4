"""The records of sequences: found by id, in rows that keep their room for the next sequence; see paged/records.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc

from kvcache.core.counts cimport blocks_of
from kvcache.core.idmap cimport IdMap
from kvcache.core.kernels cimport kvc_run
from kvcache.core.pool cimport BlockPool

import numpy as np

from kvcache.errors import InvalidOperationError, SequenceNotFoundError

__all__ = ["SequenceRecords"]

cdef class SequenceRecords:
    """Records of sequences over one pool.

    Args:
        pool: the `BlockPool` that the blocks come from; it may have other holders too.
        block_size: tokens per block, 1 to 256.
    """

    def __cinit__(self):
        self.rows = IdMap()

    def __init__(self, BlockPool pool not None, int32_t block_size):
        if not 1 <= block_size <= 256:
            raise ValueError(f"expected 1 <= block_size <= 256, got {block_size}")
        self.pool = pool
        self.block_size = block_size
        self.spare = np.empty(0, np.int32)

    def __dealloc__(self):
        cdef int32_t row
        for row in range(self.capacity):
            free(self.seqs[row].runs)
            free(self.seqs[row].positions)
        free(self.seqs)

    def __len__(self):
        return self.rows.used

    def __contains__(self, uint64_t seq_id):
        return self.rows.get(seq_id) >= 0

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

    @property
    def nbytes(self):
        """Bytes of the records, of the ids, and of all room for runs."""
        return self.capacity * (sizeof(Sequence) + sizeof(int32_t)) + self.rows.nbytes + self.run_room * sizeof(kvc_run)

    def check(self):
        """Verify every invariant of the records.

        Raises:
            AssertionError: naming the broken one.
        """
        self.rows.check()
        assert self.rows.used + self.num_spare == self.capacity, "a row is lost"
        room = sum(self.seqs[i].capacity * (1 + (self.seqs[i].positions != NULL)) for i in range(self.capacity))
        assert self.run_room == room, f"room for {room} runs is counted as {self.run_room}"
        idle = sum(self.seqs[i].capacity for i in range(self.capacity) if self.seqs[i].uid < 0)
        assert self.idle_room == idle <= self.pool.num_blocks, f"idle room for {idle} runs, counted {self.idle_room}"

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int64_t blocks_for(self, int64_t num_tokens) except -1:
        if num_tokens < 0:
            raise ValueError(f"expected a count of tokens >= 0, got {num_tokens}")
        return blocks_of(num_tokens, self.block_size)

    cdef int refuse_taken(self, uint64_t seq_id) except -1:
        if self.rows.get(seq_id) >= 0:
            raise InvalidOperationError(f"sequence {seq_id} already exists")
        return 0

    cdef int32_t row_of(self, uint64_t seq_id) except -1:
        cdef int32_t row = self.rows.get(seq_id)
        if row < 0:
            raise SequenceNotFoundError(seq_id)
        return row

    cdef int32_t open_(self, uint64_t seq_id, int64_t num_runs, bint holes) except -1:
        if self.num_spare == 0:
            self.grow_rows()
        self.rows.reserve(self.rows.used + 1)
        cdef int32_t row = self.spare[self.num_spare - 1]
        cdef Sequence *seq = &self.seqs[row]
        self.reuse_(row, num_runs + 1, holes)
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

    cdef bint close_(self, int32_t row) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef bint one_left = False
        if seq.num_runs:
            one_left = self.pool.release_each(&seq.runs[0].block, seq.num_runs, RUN_STRIDE)
        self.rows.drop(seq.seq_id)
        self.spare[self.num_spare] = row
        self.num_spare += 1
        seq.uid = -1
        # The next sequence takes over the room: memory fresh from the system costs more than all of this.
        self.idle_room += seq.capacity
        self.drop_room_(seq, keep_runs=self.idle_room <= self.pool.num_blocks)
        return one_left

    cdef void drop_room_(self, Sequence *seq, bint keep_runs) noexcept nogil:
        if seq.positions != NULL:
            self.run_room -= seq.capacity
            free(seq.positions)
            seq.positions = NULL
        if not keep_runs:
            self.run_room -= seq.capacity
            self.idle_room -= seq.capacity
            free(seq.runs)
            seq.runs, seq.capacity = NULL, 0

    cdef int reuse_(self, int32_t row, int64_t num_runs, bint holes) except -1:
        cdef Sequence *seq = &self.seqs[row]
        if seq.capacity > 2 * num_runs + 16:
            self.drop_room_(seq, keep_runs=False)
        self.idle_room -= seq.capacity
        try:
            self.reserve_(row, num_runs)
            if holes:
                seq.positions = <int64_t *>malloc(seq.capacity * sizeof(int64_t))
                if seq.positions == NULL:
                    raise MemoryError(f"no memory for {num_runs} positions")
                self.run_room += seq.capacity
        except MemoryError:
            self.idle_room += seq.capacity
            self.drop_room_(seq, keep_runs=self.idle_room <= self.pool.num_blocks)
            raise
        return 0

    cdef int reserve_(self, int32_t row, int64_t num_runs) except -1:
        cdef Sequence *seq = &self.seqs[row]
        if num_runs <= seq.capacity:
            return 0
        cdef int64_t capacity = max(num_runs, seq.capacity + seq.capacity // 2)
        cdef kvc_run *runs = <kvc_run *>realloc(seq.runs, capacity * sizeof(kvc_run))
        if runs == NULL:
            raise MemoryError(f"no memory for {num_runs} runs")
        seq.runs = runs
        cdef int64_t *positions
        if seq.positions != NULL:
            positions = <int64_t *>realloc(seq.positions, capacity * sizeof(int64_t))
            if positions == NULL:
                raise MemoryError(f"no memory for {num_runs} runs")
            seq.positions = positions
            self.run_room += capacity - seq.capacity
        self.run_room += capacity - seq.capacity
        seq.capacity = capacity
        return 0
