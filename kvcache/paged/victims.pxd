"""Which sequence is evicted next: a heap of those that may be, by recency, frequency, length or priority."""

from cython cimport final
from libc.stdint cimport int32_t, int64_t

from kvcache.core.heap cimport IndexedHeap
from kvcache.paged.records cimport Sequence, SequenceRecords


cdef enum:
    KEY_RECENCY = 0
    KEY_FREQUENCY = 1
    KEY_LENGTH = 2
    KEY_PRIORITY = 3


# A touch does not change the heap. By recency and by frequency a key only grows, so the heap may hold an older, smaller
# key, and `first` updates the key of the top until it is current. A decoding step touches every running sequence and
# evicts none: it pays nothing for the order, and an eviction pays at most what the touches since would have cost. Keys
# of length and priority are always current.
@final
cdef class VictimOrder:
    cdef SequenceRecords records
    cdef IndexedHeap heap              # rows that may be evicted, the next one on top
    cdef object order                  # an EvictionStrategy
    cdef int key                       # what it compares, one of KEY_*
    cdef int64_t clock                 # recency counter

    cdef int reserve_(self) except -1                         # room for a row that the records are about to add
    cdef void entered(self, int32_t row) noexcept nogil       # the sequence is new, which is an access
    cdef void changed(self, int32_t row) noexcept nogil       # its pins, priority, id or number of tokens have changed
    cdef int32_t first(self) noexcept nogil                   # the row to evict next, -1: there is none
    cdef double _key_of(self, int32_t row) noexcept nogil     # the least is evicted first

    cdef inline void touched(self, int32_t row) noexcept nogil:    # it was accessed
        cdef Sequence *seq = &self.records.seqs[row]
        self.clock += 1
        seq.last_access = self.clock
        seq.access_count += 1

    cdef inline void lengthened(self, int32_t row) noexcept nogil:    # it has more tokens
        if self.key == KEY_LENGTH:
            self.changed(row)

    cdef inline void left(self, int32_t row) noexcept nogil:       # it ends, or is passed over for now
        self.heap.drop(row)
