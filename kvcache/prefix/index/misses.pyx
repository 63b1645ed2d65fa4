"""Why lookups missed; explained in misses.pxd."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvcache.core.idmap cimport IdMap, mix
from kvcache.prefix.index.slots cimport Slots

import numpy as np

__all__ = ["REASONS", "MissReasons"]

REASONS = ("no_shared_prefix", "shorter_than_block", "evicted", "namespace")

cdef enum:
    NONE_SHARED, SHORTER, EVICTED, ELSEWHERE


cdef class MissReasons:
    """The texts that are cached, and the last that were evicted, of at most `most_pages` pages."""

    def __init__(self, Slots slots, Py_ssize_t most_pages):
        cdef Py_ssize_t i
        self.slots, self.factors = slots, np.empty(slots.page_size, np.uint64)
        for i in range(slots.page_size):    # far from the hashes of short texts, which are `mix` of small numbers
            self.factors[i] = mix(<uint64_t>0x9E3779B97F4A7C15 * <uint64_t>(i + 1)) | 1
        self.cached, self.evicted, self.ring = IdMap(), IdMap(), np.zeros(max(most_pages, 1), np.uint64)

    cdef uint64_t extended(self, uint64_t text, const uint32_t *tokens) noexcept nogil:
        cdef Py_ssize_t i
        cdef uint64_t page = 1
        for i in range(self.factors.shape[0]):
            page += self.factors[i] * tokens[i]
        return mix(text + page)

    cdef void count(self, uint64_t space, const uint32_t *tokens, Py_ssize_t n, const int32_t *pages, Py_ssize_t found,
                    Py_ssize_t cached, bint inside) noexcept:
        cdef uint64_t text = self.slots.pages[pages[found - 1]].text if found else 0
        cdef Py_ssize_t size = self.slots.page_size
        if (found + 1) * size <= n:
            text = self.extended(text, tokens + found * size)
            if found < cached or self.evicted.get(mix(space ^ text)) >= 0:
                self.counts[EVICTED] += 1
            elif self.cached.get(text) > 0:    # in this namespace it would have matched
                self.counts[ELSEWHERE] += 1
            else:
                self.counts[SHORTER if inside else NONE_SHARED] += 1
        elif 0 < n < size:
            self.counts[SHORTER] += 1

    cdef int prepare(self, const uint32_t *tokens, const int32_t *pages, Py_ssize_t old, Py_ssize_t n) except -1:
        cdef Py_ssize_t i
        cdef uint64_t text = self.slots.pages[pages[old - 1]].text if old else 0
        self.cached.reserve(self.cached.used + n - old)
        for i in range(old, n):
            text = self.extended(text, tokens + i * self.slots.page_size)
            self.slots.pages[pages[i]].text = text
        return 0

    cdef void add(self, int32_t page, int32_t change) noexcept:
        cdef uint64_t text = self.slots.pages[page].text
        cdef int32_t count = max(self.cached.get(text), 0) + change
        if count > 0:
            self.cached.put(text, count)
        else:
            self.cached.drop(text)

    cdef void remember(self, uint64_t space, int32_t page) noexcept:
        cdef uint64_t oldest = self.ring[self.place], text = mix(space ^ self.slots.pages[page].text)
        try:
            self.evicted.reserve(self.evicted.used + 1)
        except MemoryError:
            return
        if self.evicted.get(oldest) == self.place:
            self.evicted.drop(oldest)
        self.ring[self.place] = text
        self.evicted.put(text, self.place)
        self.place = (self.place + 1) % <int32_t>self.ring.shape[0]

    @property
    def nbytes(self):
        """Bytes of memory that this holds."""
        return 8 * self.ring.shape[0] + self.cached.nbytes + self.evicted.nbytes

    def check(self, pages):
        """Verify every invariant, given the records of the cached pages; AssertionError names the broken one."""
        self.cached.check()
        self.evicted.check()
        texts, counts = np.unique(pages["text"], return_counts=True)
        cached = [self.cached.get(text) for text in texts.tolist()]
        assert cached == counts.tolist(), "misses: the counts of cached texts differ"
        assert self.cached.used == len(texts), f"misses: {self.cached.used} texts are counted, not {len(texts)}"
        for text in self.evicted.keys_list():
            assert self.ring[<Py_ssize_t>self.evicted[text]] == text, "misses: an evicted page without a place"
