"""One call for many sequences: what a serving step does to the block tables."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.paged.records cimport Sequence
from kvcache.paged.table cimport SequenceTable


cdef class BatchTable(SequenceTable):
    cdef int64_t batch        # counts batch calls, for `mark`
    cdef int32_t *picked      # (num_picked,) rows of the call's ids, in their order
    cdef int64_t room         # rows that `picked` has room for

    cdef int pick_(self, const uint64_t *ids, int64_t n) except -1     # fills `picked`; refuses an id named twice
    cdef int make_room_(self, int64_t n) except -1
    cdef int refuse_new_(self, const uint64_t *ids, int64_t n) except -1      # ids that are taken
    cdef int refuse_twice_(self, uint64_t id) except -1
    cdef void leave_picked_(self, int64_t n) noexcept nogil            # the first n of `picked`
    cdef bint step_(self, Sequence *seq) noexcept nogil
    cdef int64_t need_one_each_(self, int64_t n) noexcept nogil        # blocks that a token more for each takes
