"""Summaries of keys for sparse attention; see core/page_summaries.pxd."""

from libc.stdint cimport int32_t, int64_t, uint16_t
from libc.string cimport memcmp, memset

from kvcache.core.layouts cimport Layouts
from kvcache.core.spill cimport Spill
from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport kvc_run
from kvcache.kernels.sparse cimport KVC_PAGE, kvc_summaries
from kvcache.kernels.spill_units cimport KVC_TO_READ
from kvcache.support.mapped cimport MappedMemory

__all__ = ["PageSummaries"]

cdef int SLACK = 64    # bytes behind the last row that kernels may read


cdef class PageSummaries:
    """Room for the summaries of `num_blocks` blocks in all layers, mapped now and touched when first made.

    Args:
        layouts: of the blocks, whose size is a multiple of 16; without `latent`.
        num_blocks: how many.

    Raises:
        OutOfMemoryError: the system refuses the memory (in bytes).
    """

    def __cinit__(self, Layouts layouts not None, num_blocks):
        self.layouts, self.num_blocks, self.pages = layouts, num_blocks, layouts.first.block_size // KVC_PAGE
        self.memory = MappedMemory(int(num_blocks) * self.block_bytes + SLACK)

    @property
    def block_bytes(self):
        """Bytes of the summaries of a block in all layers."""
        cdef int64_t heads = self.layouts.first.num_heads, dim = self.layouts.first.head_dim
        return int(self.layouts.num_layers) * int(self.pages) * int(1 + heads * (dim + 2))

    @property
    def nbytes(self):
        """Bytes of all summaries."""
        return int(self.num_blocks) * self.block_bytes

    def check(self, PageSummaries other not None, size_t arena, Spill spill=None):
        """Verify that all summaries are those of the keys at this address.

        Args:
            other: room for the same blocks, in which the summaries are made anew.
            spill: where the blocks lie that are not in memory; None: all are.

        Raises:
            AssertionError: naming which are not.
        """
        cdef int64_t layer, heads = self.layouts.first.num_heads, dim = self.layouts.first.head_dim, at
        cdef kvc_summaries own, new
        cdef int32_t block, page
        cdef size_t start
        cdef kvc_run run
        cdef int64_t missing
        for layer in range(self.layouts.num_layers):
            own, new, start = self.of_(layer), other.of_(layer), self.layouts.starts[layer] * <size_t>self.num_blocks
            for block in range(self.num_blocks):
                if spill is not None and spill.pool.refs[block] == 0:
                    continue    # its keys may be gone; they are summarised when it has new ones
                for page in range(self.pages):
                    at = block * self.pages + page
                    if own.made[at]:
                        run, missing = kvc_run(block, 0, 0), 0
                        if spill is not None:
                            missing = spill.hold_(layer, &run, 1, KVC_TO_READ)
                        kernels.summarise_page(&self.layouts.of[layer], <const unsigned char *>arena + start, block,
                                               page, &new)
                        if spill is not None:
                            spill.release_(layer, &run, 1, KVC_TO_READ)
                            spill.forget_faults_()
                        same = (memcmp(own.codes + at * heads * dim, new.codes + at * heads * dim, heads * dim) == 0
                                and memcmp(own.scales + at * heads, new.scales + at * heads, heads * 2) == 0)
                        assert same or missing, f"layer {layer}, block {block}, page {page}: summaries of other keys"

    cdef kvc_summaries of_(self, int64_t layer) noexcept nogil:
        cdef kvc_summaries summaries
        cdef size_t rows = <size_t>(self.num_blocks * self.pages) * self.layouts.first.num_heads
        cdef size_t layers = self.layouts.num_layers, marks = <size_t>(self.num_blocks * self.pages)
        # Codes are first: those of 64 channels fill a cache line.
        cdef size_t codes = layers * rows * self.layouts.first.head_dim
        summaries.codes = self.memory.bytes + <size_t>layer * rows * self.layouts.first.head_dim
        summaries.scales = <uint16_t *>(self.memory.bytes + codes) + <size_t>layer * rows
        summaries.made = self.memory.bytes + codes + layers * rows * 2 + <size_t>layer * marks
        return summaries

    cdef void forget_(self, int64_t layer, int32_t block, int first, int stop) noexcept nogil:
        cdef int page = first // KVC_PAGE
        if first >= stop:
            return
        if layer < 0:
            for layer in range(self.layouts.num_layers):
                self.forget_(layer, block, first, stop)
            return
        memset(self.of_(layer).made + block * self.pages + page, 0, (stop - 1) // KVC_PAGE + 1 - page)
