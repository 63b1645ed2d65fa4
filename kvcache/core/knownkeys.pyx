"""The calibration of keys, as the kernels take it; see core/knownkeys.pxd."""

from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free

from kvcache.core.layouts cimport Layouts
from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport kvc_head_keys, kvc_layout

import numpy as np

from kvcache.core.calibration import Calibration
from kvcache.support.arguments import as_instance

__all__ = ["KnownKeys"]


cdef class KnownKeys:
    """A calibration beside a store; made by `known_keys`."""

    def __dealloc__(self):
        free(self.heads)

    cdef bint same(self, KnownKeys other) noexcept:
        if self.calibration is None or other.calibration is None:
            return self.calibration is other.calibration
        return self.calibration.fingerprint == other.calibration.fingerprint


# Channels of each rotated part of a key, as `kvc_rows_of` (ckernels/kvc_quant.h) has them; 0: none is.
cdef int rotated_part(const kvc_layout *layout) noexcept nogil:
    cdef int dims = layout.head_dim
    if layout.latent:
        dims |= layout.value_head_dim
    return dims & -dims if layout.rotate_keys else 0


cdef KnownKeys known_keys(object calibration, Layouts layouts):
    cdef KnownKeys known = KnownKeys()
    cdef const float[:, :, ::1] centres
    cdef const float[:, :, :, ::1] factors
    cdef int32_t layer, head, num_heads = layouts.first.num_heads, num_layers = layouts.num_named
    if calibration is None:
        return known
    as_instance(calibration, Calibration, "calibration")
    if layouts.index is not None:
        raise ValueError("calibration: expected None with index_layers, got one")
    shape = (num_layers, num_heads, layouts.first.head_dim)
    if calibration.shape != shape:
        raise ValueError(f"calibration: expected one of {shape} layers, heads and channels, got {calibration.shape}")
    known.calibration, known.centres = calibration, calibration.centres
    cdef bint quantised = False, narrow = False
    cdef int rotated = 0
    for layer in range(layouts.num_layers):    # quantised layers are rotated alike
        if kernels.kvc_format_of(layouts.of[layer].key_format).quantised:
            quantised, rotated = True, rotated_part(&layouts.of[layer])
        narrow = narrow or kernels.kvc_format_of(layouts.of[layer].key_format).bits != 32
    if quantised:
        known.factors = calibration.factors(rotated)
    known.heads = <kvc_head_keys *>calloc(<size_t>num_layers * <size_t>num_heads + 1, sizeof(kvc_head_keys))
    if known.heads == NULL:
        raise MemoryError(f"no memory for {num_layers * num_heads} heads of a calibration")
    centres = known.centres
    if known.factors is not None:
        factors = known.factors
    used = known.centres.any(axis=2)
    for layer in range(num_layers):
        for head in range(num_heads):
            if used[layer, head]:
                known.heads[layer * num_heads + head].centre = &centres[layer, head, 0]
            if known.factors is not None and kernels.kvc_format_of(layouts.of_(layer).key_format).quantised:
                known.heads[layer * num_heads + head].factor = &factors[layer, head, 0, 0]
    if narrow:    # f32 has room for any centre
        known.most_key = <float>(65504.0 - float(np.abs(known.centres).max(initial=0.0)))
    return known


cdef bint is_centred(const kvc_head_keys *known, int num_heads) noexcept nogil:
    cdef int head
    if known != NULL:
        for head in range(num_heads):
            if known[head].centre != NULL:
                return True
    return False
