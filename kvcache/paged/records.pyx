"""The records of sequences, in rows that keep their room for the next sequence; see paged/records.pxd."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from kvcache.core.idmap cimport IdMap
from kvcache.kernels.kernels cimport kvc_run

import numpy as np

from kvcache.errors import InvalidOperationError, SequenceNotFoundError

__all__ = ["SequenceRecords"]


cdef class SequenceRecords:
    """Records of sequences by id, without their blocks and references.

    Args:
        most_idle: runs that the spare rows may keep room for.
    """

    def __cinit__(self, int64_t most_idle):
        self.row_by_id, self.most_idle = IdMap(), most_idle
        self.spare = np.empty(0, np.int32)

    def __dealloc__(self):
        cdef int32_t row, i
        cdef RunList *held
        for row in range(self.capacity):
            for i in range(2):
                held = &self.seqs[row].residual if i else &self.seqs[row].tokens
                free(held.runs)
                free(held.positions)
        free(self.seqs)

    @property
    def nbytes(self):
        """Bytes of the records, of the ids, and of all room for runs."""
        rows = self.capacity * (sizeof(Sequence) + sizeof(int32_t))
        return rows + self.row_by_id.nbytes + self.run_room * sizeof(kvc_run)

    def check(self):
        """Verify every invariant of the records; AssertionError names the broken one."""
        self.row_by_id.check()
        assert self.row_by_id.used + self.num_spare == self.capacity, "a row is lost"
        cdef int32_t row, i
        cdef int64_t room = 0, idle = 0
        cdef RunList *held
        for row in range(self.capacity):
            for i in range(2):
                held = &self.seqs[row].residual if i else &self.seqs[row].tokens
                room += held.capacity * (1 + (held.positions != NULL))
                idle += held.capacity if self.seqs[row].uid < 0 else 0
        assert self.run_room == room, f"room for {room} runs is counted as {self.run_room}"
        assert self.idle_room == idle <= self.most_idle, f"idle room for {idle} runs is counted as {self.idle_room}"

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int32_t find(self, uint64_t seq_id) except -1:
        cdef int32_t row = self.row_by_id.get(seq_id)
        if row < 0:
            raise SequenceNotFoundError(seq_id)
        return row

    cdef int refuse_taken(self, uint64_t seq_id) except -1:
        if self.row_by_id.get(seq_id) >= 0:
            raise InvalidOperationError(f"sequence {seq_id} already exists")
        return 0

    @cython.critical_section
    cdef int64_t uid_(self, uint64_t seq_id) noexcept:
        cdef int32_t row = self.row_by_id.get(seq_id)
        return -1 if row < 0 else self.seqs[row].uid

    @cython.critical_section
    cdef int32_t open_(self, uint64_t seq_id, int64_t num_runs, bint holes, int64_t residual_runs) except -1:
        if self.num_spare == 0:
            self._grow()
        self.row_by_id.reserve(self.row_by_id.used + 1)
        cdef int32_t row = self.spare[self.num_spare - 1]
        cdef Sequence *seq = &self.seqs[row]
        self._reuse_room(&seq.tokens, num_runs + 1, holes)
        try:
            self._reuse_room(&seq.residual, residual_runs + 1 if residual_runs >= 0 else 0, residual_runs >= 0)
        except MemoryError:
            self._leave_room(&seq.tokens)
            raise
        self.num_spare -= 1
        seq.seq_id, seq.uid = seq_id, self.next_uid
        make_empty(&seq.tokens)
        make_empty(&seq.residual)
        seq.span.firsts = seq.span.base = 0
        seq.access_count = seq.priority = seq.pins = seq.mark = 0
        self.next_uid += 1
        self.row_by_id.put(seq_id, row)
        return row

    @cython.critical_section
    cdef void close_(self, int32_t row) noexcept:
        cdef Sequence *seq = &self.seqs[row]
        self.row_by_id.drop(seq.seq_id)
        self.spare[self.num_spare] = row
        self.num_spare += 1
        seq.uid = -1
        self._leave_room(&seq.tokens)
        self._leave_room(&seq.residual)

    @cython.critical_section
    cdef void swap_ids_(self, int32_t first, int32_t second) noexcept:
        cdef Sequence *a = &self.seqs[first]
        cdef Sequence *b = &self.seqs[second]
        a.seq_id, b.seq_id = b.seq_id, a.seq_id
        a.uid, b.uid = b.uid, a.uid
        self.row_by_id.put(a.seq_id, first)
        self.row_by_id.put(b.seq_id, second)

    cdef int reserve_(self, RunList *held, int64_t num_runs) except -1:
        if num_runs <= held.capacity:
            return 0
        cdef int64_t capacity = max(num_runs, held.capacity + held.capacity // 2)
        cdef kvc_run *runs = <kvc_run *>realloc(held.runs, capacity * sizeof(kvc_run))
        if runs == NULL:
            raise MemoryError(f"no memory for {num_runs} runs")
        held.runs = runs
        cdef int64_t *positions
        if held.positions != NULL:
            positions = <int64_t *>realloc(held.positions, capacity * sizeof(int64_t))
            if positions == NULL:
                raise MemoryError(f"no memory for {num_runs} runs")
            held.positions = positions
            self.run_room += capacity - held.capacity
        self.run_room += capacity - held.capacity
        held.capacity = capacity
        return 0

    cdef void replace_room_(self, RunList *held, kvc_run *runs, int64_t *positions, int64_t capacity) noexcept nogil:
        self.run_room += capacity * (1 + (positions != NULL)) - held.capacity * (1 + (held.positions != NULL))
        free(held.runs)
        free(held.positions)
        held.runs, held.positions, held.capacity = runs, positions, capacity

    cdef int _grow(self) except -1:
        cdef int32_t row, old = self.capacity, new = max(2 * self.capacity, 8)
        cdef int32_t[::1] spare = np.empty(new, np.int32)
        cdef Sequence *seqs = <Sequence *>realloc(self.seqs, new * sizeof(Sequence))
        if seqs == NULL:
            raise MemoryError(f"no memory for {new} sequences")
        self.seqs, self.capacity, self.spare = seqs, new, spare
        memset(self.seqs + old, 0, (new - old) * sizeof(Sequence))
        for row in range(old, new):
            self.seqs[row].uid = -1
            self.spare[new - 1 - row] = row       # row `old` comes off the stack first
        self.num_spare = new - old
        return 0

    cdef int _reuse_room(self, RunList *held, int64_t num_runs, bint holes) except -1:
        if held.capacity > 2 * num_runs + 16:
            self._drop_room(held, keep_runs=False)
        self.idle_room -= held.capacity
        try:
            self.reserve_(held, num_runs)
            if holes:
                held.positions = <int64_t *>malloc(held.capacity * sizeof(int64_t))
                if held.positions == NULL:
                    raise MemoryError(f"no memory for {num_runs} positions")
                self.run_room += held.capacity
        except MemoryError:
            self._leave_room(held)
            raise
        return 0

    cdef void _leave_room(self, RunList *held) noexcept nogil:
        self.idle_room += held.capacity
        self._drop_room(held, keep_runs=self.idle_room <= self.most_idle)

    cdef void _drop_room(self, RunList *held, bint keep_runs) noexcept nogil:
        if held.positions != NULL:
            self.run_room -= held.capacity
            free(held.positions)
            held.positions = NULL
        if not keep_runs:
            self.run_room -= held.capacity
            self.idle_room -= held.capacity
            free(held.runs)
            held.runs, held.capacity = NULL, 0


cdef void make_empty(RunList *held) noexcept nogil:
    held.num_runs = held.num_tokens = held.next_position = held.sink_tokens = 0
    held.dense = True
