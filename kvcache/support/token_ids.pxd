"""Token ids and page values from callers as contiguous arrays, without a copy where they are that already."""

cimport numpy as cnp
from libc.stdint cimport int32_t, uint32_t

# `tokens` as a one-dimensional C-contiguous uint32 array; TypeError or ValueError say what was expected.
cdef cnp.ndarray uint32_tokens(object tokens)
# `values` as a one-dimensional C-contiguous int32 array; raises likewise.
cdef cnp.ndarray int32_values(object values)


# The numbers of such an array, or of one made for a result.
cdef inline uint32_t *uint32s(cnp.ndarray array) noexcept:
    return <uint32_t *>cnp.PyArray_DATA(array)


cdef inline int32_t *int32s(cnp.ndarray array) noexcept:
    return <int32_t *>cnp.PyArray_DATA(array)
