"""The layout of one block in each layer: layers have the same sizes but for index layers, and formats of their own."""

from libc.stdint cimport int32_t, int64_t

from kvcache.kernels.kernels cimport kvc_layout


cdef class Layouts:
    cdef kvc_layout first              # of the first layer, or of a store without layers
    cdef kvc_layout *of                # (num_layers,)
    cdef size_t *starts                # (num_layers + 1,) bytes of a block in the layers before each one, and in all
    cdef readonly int32_t num_layers
    cdef readonly int32_t num_named    # layers that calls may name: num_layers, or any number with one layout
    cdef readonly object key_dtype     # a name in kernels.FORMATS; a tuple of one for each layer where they differ
    cdef readonly object value_dtype
    cdef readonly object index         # (layers, channels, format) of the last layers, the keys of indexers; None

    cdef const kvc_layout *of_(self, int64_t layer) noexcept nogil    # of a layer that a call names, in range
