"""Why a lookup missed; explained in misses.pxd."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvcache.core.idmap cimport IdMap, mix
from kvcache.prefix.index.slots cimport Slots

import numpy as np

__all__ = ["REASONS", "MissReasons"]

REASONS = ("no_shared_prefix", "shorter_than_block", "evicted", "namespace")


cdef class MissReasons:
    """The texts that are cached, and the last that were evicted, of at most `most_pages` pages."""

    def __init__(self, Slots slots, Py_ssize_t most_pages):
        cdef Py_ssize_t i
        self.slots, self.factors = slots, np.empty(slots.page_size, np.uint64)
        for i in range(slots.page_size):    # far from the hashes of short texts, which are `mix` of small numbers
            self.factors[i] = mix(<uint64_t>0x9E3779B97F4A7C15 * <uint64_t>(i + 1)) | 1
        self.counts, self.ghosts, self.ring = IdMap(), IdMap(), np.zeros(max(most_pages, 1), np.uint64)

    cdef uint64_t extended(self, uint64_t text, const uint32_t *tokens) noexcept nogil:
        cdef Py_ssize_t i
        cdef uint64_t page = 1
        for i in range(self.factors.shape[0]):
            page += self.factors[i] * tokens[i]
        return mix(text + page)

    cdef int why(self, uint64_t space, const uint32_t *tokens, const int32_t *pages, Py_ssize_t found,
                 bint inside) noexcept:
        cdef uint64_t before = self.slots.pages[pages[found - 1]].text if found else 0
        cdef uint64_t text = self.extended(before, tokens + found * self.slots.page_size)
        if self.ghosts.get(mix(space ^ text)) >= 0:
            return EVICTED
        if self.counts.get(text) > 0:
            return ELSEWHERE    # in this namespace it would have matched
        return SHORTER if inside else NONE_SHARED

    cdef int prepare(self, const uint32_t *tokens, const int32_t *pages, Py_ssize_t old, Py_ssize_t n) except -1:
        cdef Py_ssize_t i
        cdef uint64_t text = self.slots.pages[pages[old - 1]].text if old else 0
        self.counts.reserve(self.counts.used + n - old)
        for i in range(old, n):
            text = self.extended(text, tokens + i * self.slots.page_size)
            self.slots.pages[pages[i]].text = text
        return 0

    cdef void count(self, int32_t page) noexcept:
        cdef uint64_t text = self.slots.pages[page].text
        self.counts.put(text, max(self.counts.get(text), 0) + 1)

    cdef void uncount(self, int32_t page) noexcept:
        cdef uint64_t text = self.slots.pages[page].text
        cdef int32_t left = self.counts.get(text) - 1
        if left > 0:
            self.counts.put(text, left)
        else:
            self.counts.drop(text)

    cdef void remember(self, uint64_t space, int32_t page) noexcept:
        cdef uint64_t oldest = self.ring[self.place], ghost = mix(space ^ self.slots.pages[page].text)
        try:
            self.ghosts.reserve(self.ghosts.used + 1)
        except MemoryError:
            return
        if self.ghosts.get(oldest) == self.place:
            self.ghosts.drop(oldest)
        self.ring[self.place] = ghost
        self.ghosts.put(ghost, self.place)
        self.place = (self.place + 1) % <int32_t>self.ring.shape[0]

    @property
    def nbytes(self):
        """Bytes of memory that this holds."""
        return 8 * self.ring.shape[0] + self.counts.nbytes + self.ghosts.nbytes

    def check(self, pages):
        """Verify every invariant, given the records of the cached pages; AssertionError names the broken one."""
        self.counts.check()
        self.ghosts.check()
        texts, counts = np.unique(pages["text"], return_counts=True)
        assert self.counts.used == len(texts), f"misses: {self.counts.used} texts are counted, not {len(texts)}"
        for text, count in zip(texts.tolist(), counts.tolist()):
            assert self.counts.get(text) == count, f"misses: expected {count} pages, got {self.counts.get(text)}"
        for key in self.ghosts.keys_list():
            assert self.ring[<Py_ssize_t>self.ghosts[key]] == key, "misses: a ghost without a place"
