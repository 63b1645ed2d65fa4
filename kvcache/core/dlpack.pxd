"""Rows in tensors of other libraries: see core/dlpack.pyx."""

from libc.stdint cimport int64_t


cdef struct rows_t:
    void *data
    int64_t n, columns
    bint words          # of bfloat16; else float32


# The rows of a contiguous tensor `(..., columns)` of float32 or bfloat16, as long as the capsule holds it; ValueError for
# any other.
cdef rows_t rows_of(object capsule, str name) except *
