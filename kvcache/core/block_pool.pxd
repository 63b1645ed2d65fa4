"""Reference counts of blocks.

A block is an integer id in [0, num_blocks). It is free (no reference) or has one reference per owner: sequences, the
prefix trie, a snapshot. Releasing the last reference frees it. A block with more than one reference is shared and must
be copied before it is written.
"""

from libc.stdint cimport int32_t, int64_t

from kvcache.support.shared_numbers cimport shared_int32, shared_int64


cdef class BlockPool:
    cdef readonly shared_int32 num_blocks
    cdef int32_t[::1] refs            # (num_blocks,) references held on each block; 0 is free
    cdef int32_t[::1] ring            # (num_blocks,) free ids, first freed first reused, from `head` on
    cdef unsigned char[::1] marks     # (num_blocks,) scratch of one call, zero between calls
    cdef int32_t head                 # index in `ring` of the next free id
    cdef readonly shared_int32 num_free
    cdef readonly shared_int64 total_allocations   # blocks handed out since the start
    cdef readonly shared_int64 total_frees         # blocks whose last reference was released
    cdef readonly shared_int32 peak_used

    cdef int32_t take(self) noexcept nogil                  # a free id with one reference; num_free must be > 0
    cdef void retain_(self, int32_t block) noexcept nogil   # one more reference on a block in use
    cdef bint release_(self, int32_t block) noexcept nogil  # one reference less; True when that freed it
    # The same for n ids, `stride` int32s apart as in an array of runs: equal neighbours count once.
    cdef void take_each(self, int32_t *blocks, int64_t n, int64_t stride) noexcept nogil
    cdef void retain_each(self, const int32_t *blocks, int64_t n, int64_t stride) noexcept nogil
    # True when one of them is left with a single reference.
    cdef bint release_each(self, const int32_t *blocks, int64_t n, int64_t stride) noexcept nogil
