"""Token ids and page values from callers as contiguous arrays, without a copy where they are that already."""

cimport numpy as cnp

# `tokens` as a one-dimensional C-contiguous uint32 array; TypeError or ValueError say what was expected.
cdef cnp.ndarray uint32_tokens(object tokens)
# `values` as a one-dimensional C-contiguous int32 array; raises likewise.
cdef cnp.ndarray int32_values(object values)
