"""Summaries of the keys of each page of a store, by which sparse attention ranks pages (ckernels/kvc_sparse.h).

They are made of the stored keys by the first call that needs them. What writes to a block forgets those of its pages,
so they are saved, copied and moved by nobody.
"""

from libc.stdint cimport int32_t, int64_t

from kvcache.core.layouts cimport Layouts
from kvcache.kernels.sparse cimport kvc_summaries
from kvcache.support.mapped cimport MappedMemory


cdef class PageSummaries:
    cdef MappedMemory memory
    cdef Layouts layouts
    cdef int64_t num_blocks, pages    # of a block

    cdef kvc_summaries of_(self, int64_t layer) noexcept nogil              # of a layer of the bytes
    # Slots [first, stop) of a block change, in one layer of the bytes or, of -1, in all.
    cdef void forget_(self, int64_t layer, int32_t block, int first, int stop) noexcept nogil
