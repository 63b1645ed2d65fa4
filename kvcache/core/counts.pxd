"""Sums and quotients of counts from callers, which may be any int64 >= 0, without overflow.

A saturated count is more than any pool has, so the call raises `OutOfMemoryError`.
"""

from libc.stdint cimport INT64_MAX, int64_t


# Blocks of `size` slots that hold `count` >= 0 tokens.
cdef inline int64_t blocks_of(int64_t count, int64_t size) noexcept nogil:
    return count // size + (count % size > 0)


# a + b for counts >= 0; the largest int64 where that is more.
cdef inline int64_t saturating_sum(int64_t a, int64_t b) noexcept nogil:
    return a + b if a <= INT64_MAX - b else INT64_MAX
