"""Rows in tensors of other libraries: see support/dlpack.pyx."""

from libc.stdint cimport int64_t


cdef struct rows_t:
    char *data
    int64_t n, columns
    bint words          # of bfloat16; else float32


# The rows of a contiguous tensor `(..., columns)` of float32 or bfloat16, while the capsule lives; ValueError for any
# other.
cdef rows_t rows_of(object capsule, str name) except *


# Whether two tensors share memory.
cdef bint rows_overlap(rows_t a, rows_t b) noexcept
