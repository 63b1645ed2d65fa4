"""How many blocks end each text, counted by hash; see texts.pyx."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvcache.core.idmap cimport IdMap


cdef class TextCounts:
    cdef IdMap counts           # hash of a text -> blocks that end it
    cdef uint64_t[::1] texts    # (num_blocks,) hash of the text that each counted block ends
    cdef uint64_t[::1] factors  # (block_size,) odd, of the tokens of a block: their sum of products is its hash
    cdef int64_t block_size

    cdef uint64_t extended(self, uint64_t text, const uint32_t *tokens) noexcept nogil    # by one block
    cdef void count_one_more(self, uint64_t text) noexcept    # `counts` has room for it
    cdef void count_one_less(self, uint64_t text) noexcept
