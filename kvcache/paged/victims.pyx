"""Who leaves next: the order of the sequences that may be evicted; see paged/victims.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.heap cimport IndexedHeap
from kvcache.core.pool cimport BlockPool
from kvcache.paged.records cimport Sequence
from kvcache.paged.sequences cimport SequenceRows

import numpy as np

from kvcache.errors import InvalidOperationError

__all__ = ["RANKS", "RankedRows"]

cdef enum:
    RANK_RECENCY = 0
    RANK_FREQUENCY = 1
    RANK_LENGTH = 2
    RANK_PRIORITY = 3

# What the next victim has least of (most, for length).
RANKS = {"recency": RANK_RECENCY, "frequency": RANK_FREQUENCY, "length": RANK_LENGTH, "priority": RANK_PRIORITY}


cdef class RankedRows(SequenceRows):
    """Sequences in the order in which they leave."""

    def __cinit__(self):
        self.order = IndexedHeap()

    def rank_by(self, strategy):
        """Order the victims by an `EvictionStrategy`, which becomes `strategy`; ties go to the lowest id."""
        cdef int32_t row
        self.ranking = RANKS[strategy.rank]
        self.strategy = strategy
        for row in range(self.capacity):
            if self.seqs[row].uid >= 0:
                self.rank_(row)

    def victim(self):
        """The id of the next sequence to evict, pinned ones never; None when there is none."""
        cdef int32_t row = self.victim_()
        return None if row < 0 else self.seqs[row].seq_id

    def evict(self):
        """Let go of every block of the victim, whose id is returned; None when there is none."""
        cdef int32_t row = self.victim_()
        if row < 0:
            return None
        seq_id = self.seqs[row].seq_id
        self.leave_(row)
        self.evictions += 1
        return seq_id

    def evict_to(self, double utilization):
        """Evict until at most this share of the pool is in use; the ids that left, in order, uint64.

        A sequence whose blocks are all shared frees nothing: such are passed over while there is another.
        """
        # Row by row both lists together: there is room for whatever happens before the first leaves.
        cdef int64_t i, num_evicted = 0, first = 0, last = 0
        rows, names = np.empty(len(self), np.int32), np.empty(len(self), np.uint64)
        cdef int32_t[::1] passed = rows
        cdef uint64_t[::1] evicted = names
        cdef int32_t row
        cdef bint released
        cdef BlockPool pool = self.pool
        while pool.num_blocks - pool.num_free > utilization * pool.num_blocks:
            row = self.victim_()
            if row >= 0 and self.all_shared_(row):
                self.order.drop(row)
                passed[last] = row
                last += 1
                continue
            if row < 0:
                if first == last:
                    break
                row = passed[first]
                first += 1
            evicted[num_evicted] = self.seqs[row].seq_id
            num_evicted += 1
            released = self.leave_(row)
            # What it shared may now belong to one alone that was passed over.
            if released:
                for i in range(first, last):
                    self.rank_(passed[i])
                first = last = 0
        for i in range(first, last):
            self.rank_(passed[i])
        self.evictions += num_evicted
        return names[:num_evicted]

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

    @property
    def nbytes(self):
        """Bytes of this bookkeeping, the order of victims included."""
        return SequenceRows.nbytes.__get__(self) + self.order.nbytes

    def check(self):
        """Verify every invariant of the tables; references against the pool are the owner's to compare.

        Raises:
            AssertionError: naming the broken one.
        """
        SequenceRows.check(self)
        self.order.check()
        for seq_id in self.seq_ids():
            row = self.row_of(seq_id)
            pinned = self.seqs[row].pins > 0
            assert (row in self.order) != pinned, f"{seq_id}: pinned and a victim, or neither"
            if not pinned:
                assert self.order.key(row) <= self.key_(row), f"{seq_id}: stands behind its place among the victims"
                exact = self.ranking in (RANK_LENGTH, RANK_PRIORITY)
                assert not exact or self.order.key(row) == self.key_(row), f"{seq_id}: not at its place"
        assert len(self.order) <= len(self), "a sequence that is gone is still a victim"

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int32_t enter_(self, uint64_t seq_id, int64_t num_runs, bint holes) except -1:
        # One row more may double the rows: reserve for that, so that ranking cannot fail.
        self.order.reserve(2 * self.capacity + 8)
        return self.open_(seq_id, num_runs, holes)

    cdef bint leave_(self, int32_t row) noexcept nogil:
        self.order.drop(row)
        return self.close_(row)

    cdef void touch_(self, int32_t row) noexcept nogil:
        self.clock += 1
        self.seqs[row].last_access = self.clock
        self.seqs[row].access_count += 1

    cdef void lengthened_(self, int32_t row) noexcept nogil:
        if self.ranking == RANK_LENGTH:
            self.rank_(row)

    cdef double key_(self, int32_t row) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        if self.ranking == RANK_FREQUENCY:
            return <double>seq.access_count
        if self.ranking == RANK_LENGTH:
            return <double>-seq.num_tokens
        if self.ranking == RANK_PRIORITY:
            return <double>seq.priority
        return <double>seq.last_access

    cdef void rank_(self, int32_t row) noexcept nogil:
        if self.seqs[row].pins > 0:
            self.order.drop(row)
        else:
            self.order.put_tied(row, self.key_(row), self.seqs[row].seq_id)

    cdef int32_t victim_(self) noexcept nogil:
        cdef int32_t row = self.order.top()
        while row >= 0 and self.order.items[0].key != self.key_(row):
            self.rank_(row)
            row = self.order.top()
        return row

    cdef bint all_shared_(self, int32_t row) noexcept nogil:
        cdef Sequence *seq = &self.seqs[row]
        cdef int64_t i
        for i in range(seq.num_runs):
            if self.pool.refs[seq.runs[i].block] == 1:
                return False
        return True
