"""Which sequence leaves next: a heap of those that may, ranked by recency, frequency, length or priority."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.heap cimport IndexedHeap
from kvcache.paged.sequences cimport SequenceRows


# A touch leaves the heap as it is: by recency and by frequency a key only grows, so the heap may hold an older,
# smaller one, and the top is brought up to its present key before it is believed. A decoding step touches every
# running sequence and evicts none of them: it pays nothing for the order, and an eviction pays at most what the
# touches since would have cost. Keys of length and priority are always exact.
cdef class RankedRows(SequenceRows):
    cdef IndexedHeap order    # rows that may be evicted, next victim on top
    cdef readonly object strategy      # an EvictionStrategy, by whose rank they leave
    cdef int ranking          # the number of that, one of RANK_*
    cdef int64_t clock        # recency counter
    cdef readonly int64_t evictions    # sequences evicted, ever

    cdef int32_t enter_(self, uint64_t seq_id, int64_t num_runs, bint holes) except -1    # open_, and room to rank it
    cdef bint leave_(self, int32_t row) noexcept nogil        # close_, out of the order
    cdef void touch_(self, int32_t row) noexcept nogil        # count an access
    cdef void lengthened_(self, int32_t row) noexcept nogil   # after it got more tokens
    cdef double key_(self, int32_t row) noexcept nogil        # the least leaves first
    cdef void rank_(self, int32_t row) noexcept nogil         # put it where it belongs among the victims
    cdef int32_t victim_(self) noexcept nogil                 # the row that leaves next, -1 when there is none
    cdef bint all_shared_(self, int32_t row) noexcept nogil   # evicting it would free nothing
