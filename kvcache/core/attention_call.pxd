"""How the queries of a call of attention attend: what stays the same from call to call, converted once."""

cimport numpy as cnp
from libc.stdint cimport int64_t


cdef enum:
    BY_HEAD = 2                          # of return_scores: 0 no, 1 their sum


cdef class AttentionCall:
    # As they were given, converted; None: the default.
    cdef readonly object scale, window, softcap, sinks
    cdef readonly bint chunked, causal, return_lse
    cdef readonly int64_t skip_tokens
    cdef readonly int64_t top_tokens     # 0: queries attend to all that they see
    cdef readonly int return_scores      # 0, 1 or BY_HEAD
    cdef int64_t width                   # the window; 0: none
    cdef float factor, cap               # the scale, 0 where it is the default; the softcap, 0: none
    cdef bint has_factor, is_kept

    # ValueError for a window, causal, skip_tokens or return_scores other than by default, beside this argument.
    cdef int check_plain_(self, str name) except -1
    cdef float factor_(self, int head_dim) noexcept
    # Sinks for these queries, float32 per head or per (query, head), or None; runs any code unless the call is kept.
    cdef cnp.ndarray sinks_(self, cnp.ndarray queries)
