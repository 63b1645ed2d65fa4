"""Token ids at the boundary: one contiguous uint32 array, without a copy where the caller has one."""

cimport numpy as cnp

# `tokens` as a one-dimensional C-contiguous uint32 array; TypeError or ValueError say what was expected.
cdef cnp.ndarray uint32_tokens(object tokens)
# `values` as a one-dimensional C-contiguous int32 array; raises likewise.
cdef cnp.ndarray int32_values(object values)
