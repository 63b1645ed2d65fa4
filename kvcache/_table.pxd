"""The block tables of all sequences: the verbs over their rows, and who leaves next."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache._heap cimport IndexedHeap
from kvcache._sequences cimport SequenceRows


cdef class SequenceTable(SequenceRows):
    cdef IndexedHeap order    # rows that may be evicted, next victim on top
    cdef int strategy         # which number ranks them, one of RANK_*
    cdef int64_t clock        # recency counter
    cdef int64_t batch        # counts batch calls, for `mark`

    cdef int32_t enter_(self, uint64_t seq_id, int64_t num_runs) except -1    # open_, with room in the order
    cdef void leave_(self, int32_t row) noexcept nogil                        # close_, out of the order
    cdef void touch_(self, int32_t row) noexcept nogil
    cdef void rank_(self, int32_t row) noexcept nogil         # put it where it belongs among the victims
    cdef bint all_shared_(self, int32_t row) noexcept nogil   # evicting it would free nothing
