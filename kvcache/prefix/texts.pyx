"""How many namespaces have a text cached: so a lookup that missed learns at a fixed cost that another one has it.

A text that ends with a full block is known by a 64-bit hash of its tokens. Two texts with one hash make a statistic
wrong, nothing else: K and V are never found this way.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvcache.core.idmap cimport IdMap, mix

import numpy as np

__all__ = ["TextCounts"]


cdef class TextCounts:
    """Counts the blocks of a cache by the text that each ends.

    Args:
        num_blocks: of the pool; a block is counted at most once.
        block_size: tokens of a block.
    """

    cdef uint64_t extended(self, uint64_t text, const uint32_t *tokens) noexcept nogil:
        """The hash of a text with one more block."""
        cdef int64_t i
        cdef uint64_t block = 1
        for i in range(self.block_size):
            block += self.factors[i] * tokens[i]
        return mix(text + block)

    cdef void count_one_more(self, uint64_t text) noexcept:
        cdef int64_t slot = self.counts.slot_of(text)
        if self.counts.values[slot] >= 0:
            self.counts.values[slot] += 1
        else:
            self.counts.put(text, 1)

    cdef void count_one_less(self, uint64_t text) noexcept:
        cdef int32_t left = self.counts.get(text) - 1
        if left > 0:
            self.counts.put(text, left)
        else:
            self.counts.drop(text)

    def __init__(self, num_blocks, block_size):
        self.texts = np.zeros(num_blocks, np.uint64)
        self.block_size = block_size
        self.factors = np.empty(block_size, np.uint64)
        cdef int64_t i
        for i in range(self.block_size):    # far from the hashes of short texts, which are `mix` of small numbers
            self.factors[i] = mix(<uint64_t>0x9E3779B97F4A7C15 * <uint64_t>(i + 1)) | 1
        self.counts = IdMap()

    def add(self, int32_t before, const int32_t[::1] blocks, const uint32_t[:, ::1] tokens):
        """Count blocks of one text, the first of them behind the counted block `before`; -1: it begins the text.

        Args:
            tokens: `(len(blocks), block_size)`.

        Raises:
            MemoryError: nothing has changed.
        """
        cdef int64_t i
        cdef uint64_t text = self.texts[before] if before >= 0 else 0
        self.counts.reserve(self.counts.used + blocks.shape[0])
        for i in range(blocks.shape[0]):
            text = self.extended(text, &tokens[i, 0])
            self.texts[blocks[i]] = text
            self.count_one_more(text)

    def drop(self, const int32_t[::1] blocks):
        """Count these no more; takes no memory."""
        cdef int64_t i
        for i in range(blocks.shape[0]):
            self.count_one_less(self.texts[blocks[i]])

    def recount(self, const int32_t[::1] blocks):
        """Count these and no others; each was counted before, or was about to be."""
        cdef int64_t i
        self.counts = IdMap()
        self.counts.reserve(blocks.shape[0])
        for i in range(blocks.shape[0]):
            self.count_one_more(self.texts[blocks[i]])

    def count(self, int32_t before, const uint32_t[::1] tokens):
        """How many blocks end the text of the counted block `before` (-1: none) with these `block_size` tokens."""
        cdef uint64_t text = self.texts[before] if before >= 0 else 0
        if tokens.shape[0] != self.block_size:
            raise ValueError(f"tokens: expected {self.block_size}, got {tokens.shape[0]}")
        return max(self.counts.get(self.extended(text, &tokens[0])), 0)

    @property
    def nbytes(self):
        """Bytes of this bookkeeping."""
        return 8 * self.texts.shape[0] + self.counts.nbytes

    def check(self, const int32_t[::1] blocks):
        """Verify that these blocks are counted, and no others; AssertionError otherwise."""
        self.counts.check()
        counted = np.asarray(self.texts)[np.asarray(blocks)]
        texts, counts = np.unique(counted, return_counts=True)
        assert self.counts.used == len(texts), f"texts: {self.counts.used} are counted, not {len(texts)}"
        for text, count in zip(texts.tolist(), counts.tolist()):
            assert self.counts.get(text) == count, f"texts: expected {count} blocks, got {self.counts.get(text)}"
