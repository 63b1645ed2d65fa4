"""The calibration of the keys of each layer and head, as the kernels take it."""

from libc.stdint cimport int32_t

from kvcache.core.layouts cimport Layouts
from kvcache.kernels.kernels cimport kvc_head_keys


cdef class KnownKeys:
    cdef readonly object calibration   # a Calibration, or None
    cdef object centres, factors       # its arrays, to which `heads` points; None: it has none
    cdef kvc_head_keys *heads          # (num_layers, num_heads), or NULL without a calibration
    cdef float most_key                # the largest key whose distance to any centre fits the format; 0: no such limit

    cdef bint same(self, KnownKeys other) noexcept    # whether keys mean the same in both

# TypeError, ValueError: no calibration of the layers, heads and channels of `layouts`.
cdef KnownKeys known_keys(object calibration, Layouts layouts)
cdef bint is_centred(const kvc_head_keys *known, int num_heads) noexcept nogil    # whether any of them is
