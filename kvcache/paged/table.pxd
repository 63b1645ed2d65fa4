"""The block tables of all sequences: the verbs over their rows."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.paged.victims cimport RankedRows


cdef class SequenceTable(RankedRows):
    cdef readonly int64_t forks    # made, ever

    cdef int32_t enter_fork_(self, int32_t from_row, uint64_t seq_id) except -1   # enter_ for a fork, still empty
    cdef void fork_(self, int32_t from_row, int32_t row) noexcept nogil       # fill a new row with another's tokens
