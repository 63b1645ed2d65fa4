"""The K and V of sequences: a table that says where tokens lie, a store that has their bytes, and what keeps them true.

Every change of a table that means something for the bytes goes through here.
"""

from libc.stdint cimport int64_t, uint64_t

from kvcache.paged.batch cimport BatchTable
from kvcache.core.store cimport BlockStore


cdef class SequenceStore:
    cdef BlockStore store
    cdef BatchTable table

    # What the table has changed, for the bytes. Takes no memory: the tables name copies and new tokens already.
    cdef int hand_out_(self, uint64_t seq_id, int64_t count) except -1        # the last `count` tokens are new
    # And of all sequences of the table's last batch call, `counts[i]` tokens each; None is one.
    cdef void hand_out_each_(self, int64_t n, const int64_t[::1] counts) noexcept
    cdef void copy_on_write_(self) noexcept
