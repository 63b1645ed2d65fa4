"""Sequence ids at the boundary: one contiguous uint64 array, without a copy where the caller has one."""

cimport numpy as cnp

# `ids` as a one-dimensional C-contiguous uint64 array; TypeError or ValueError say what was expected.
cdef cnp.ndarray uint64_ids(object ids, str name=*)
