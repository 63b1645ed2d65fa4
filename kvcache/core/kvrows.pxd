"""K and V of some tokens as a caller has them: what is stored is read from there, without a copy of the whole."""

cimport numpy as cnp
from libc.stdint cimport int64_t

from kvcache.kernels.kernels cimport kvc_float_rows, kvc_format, kvc_tensor


cdef class KvRows:
    cdef readonly int64_t count           # tokens
    cdef int num_heads
    cdef int dims[2]                      # head_dim of K and of V
    cdef cnp.ndarray keys, values         # (count, num_heads, dims[side]) each
    cdef bint plain                       # both are float32, with the heads of a token one behind another
    cdef kvc_tensor tensors[2]            # of K and of V
    cdef public KvRows given              # as the caller has them, where a `Format` has changed them; else None
    cdef float *staged                    # not plain: (STEP, num_heads, dims[0]) of K, then the same of V

    # Whether V is the first channels of K.
    cdef bint has_values_in_keys(self) except -1
    # K (side 0) or V of tokens [first, first + n) as float32 rows; n is at most STEP, unless `plain`.
    cdef kvc_float_rows rows(self, int side, int64_t first, int64_t n) noexcept nogil
    # How many of these, from any first one on, lie one behind another.
    cdef int64_t joined(self, int side) noexcept nogil
    # The first value, counted from the first of the first row, that the format cannot hold; -1: it can hold all.
    cdef int64_t first_bad(self, int side, kvc_format format) noexcept nogil
    # The first key beyond +-most, counted in the same way, or -1.
    cdef int64_t first_above(self, float most) noexcept nogil

# An array (tokens, heads, channels), or a copy: aligned, with the channels of a head one behind another.
cdef cnp.ndarray together(cnp.ndarray x)
# Such an array for the kernels; TypeError: neither floats nor words of bfloat16.
cdef kvc_tensor tensor_of(cnp.ndarray x) except *

cdef enum:
    STEP = 16    # tokens of a tile, which are packed together
