"""The order in which sequences are evicted; see paged/victims.pxd."""

cimport cython
from libc.stdint cimport int32_t

from kvcache.core.heap cimport IndexedHeap
from kvcache.paged.records cimport Sequence, SequenceRecords

__all__ = ["VictimOrder"]

# By `EvictionStrategy.rank`: the next victim has least of this (most, for length).
KEYS = {"recency": KEY_RECENCY, "frequency": KEY_FREQUENCY, "length": KEY_LENGTH, "priority": KEY_PRIORITY}


cdef class VictimOrder:
    """The rows of records that are not pinned, in the order of an `EvictionStrategy`; ties go to the lowest id.

    Args:
        records: the `SequenceRecords` that are ordered; their owner reports each change of one.
    """

    def __cinit__(self, SequenceRecords records not None):
        self.records, self.heap = records, IndexedHeap()

    def order_by(self, strategy):
        """Order by an `EvictionStrategy` from now on."""
        cdef int32_t row
        self.key = KEYS[strategy.rank]
        with cython.critical_section(self):
            self.order = strategy
        for row in range(self.records.capacity):
            if self.records.seqs[row].uid >= 0:
                self.changed(row)

    @property
    def strategy(self):
        """The `EvictionStrategy`; asked for without the lock too."""
        with cython.critical_section(self):
            return self.order

    @property
    def nbytes(self):
        """Bytes of the heap."""
        return self.heap.nbytes

    def check(self):
        """Verify every invariant of the order; AssertionError names the broken one."""
        cdef int32_t row
        cdef Sequence *seq
        self.heap.check()
        exact = self.key in (KEY_LENGTH, KEY_PRIORITY)
        for row in range(self.records.capacity):
            seq = &self.records.seqs[row]
            expected = seq.uid >= 0 and seq.pins == 0
            assert (row in self.heap) == expected, f"row {row}: pinned or spare and a victim, or neither"
            if expected:
                key, now = self.heap.key(row), self._key_of(row)
                assert key <= now, f"sequence {seq.seq_id}: its key in the heap is larger than its key"
                assert key == now or not exact, f"sequence {seq.seq_id}: its key in the heap is not current"

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int reserve_(self) except -1:
        # One row more may double the rows: reserve for that, so that placing one cannot fail.
        self.heap.reserve(2 * self.records.capacity + 8)
        return 0

    cdef void entered(self, int32_t row) noexcept nogil:
        self.touched(row)
        self.changed(row)

    cdef void changed(self, int32_t row) noexcept nogil:
        cdef Sequence *seq = &self.records.seqs[row]
        if seq.pins > 0:
            self.heap.drop(row)
        else:
            self.heap.put_tied(row, self._key_of(row), seq.seq_id)

    cdef int32_t first(self) noexcept nogil:
        cdef int32_t row = self.heap.top()
        while row >= 0 and self.heap.items[0].key != self._key_of(row):
            self.changed(row)
            row = self.heap.top()
        return row

    cdef double _key_of(self, int32_t row) noexcept nogil:
        cdef Sequence *seq = &self.records.seqs[row]
        if self.key == KEY_FREQUENCY:
            return <double>seq.access_count
        if self.key == KEY_LENGTH:
            return <double>-seq.tokens.num_tokens
        if self.key == KEY_PRIORITY:
            return <double>seq.priority
        return <double>seq.last_access
