"""Why lookups missed; explained in misses.pxd."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvcache.core.idmap cimport IdMap, mix
from kvcache.prefix.index.slots cimport Slots

import numpy as np

__all__ = ["REASONS", "MissReasons"]

REASONS = ("no_shared_prefix", "shorter_than_block", "evicted", "namespace")

cdef enum:
    NONE_SHARED, SHORTER, EVICTED, ELSEWHERE


cdef inline uint64_t extended(uint64_t text, const uint32_t *page, Py_ssize_t size) noexcept:
    """The hash of a text and one more page: a step of splitmix64 for two tokens, so that no sums of tokens collide."""
    cdef Py_ssize_t i
    for i in range(0, size - 1, 2):
        text = mix(text + (page[i] | <uint64_t>page[i + 1] << 32) + <uint64_t>0x9E3779B97F4A7C15)
    return mix(text + page[size - 1] + <uint64_t>0x9E3779B97F4A7C15) if size % 2 else text


cdef class MissReasons:
    """The texts that are cached, and those evicted last, of at least `most` pages."""

    def __init__(self, Slots slots, Py_ssize_t most):
        self.slots, self.most = slots, most
        self.cached, self.evicted, self.before = IdMap(), IdMap(), IdMap()

    cdef void count(self, uint64_t space, const uint32_t *tokens, Py_ssize_t n, const int32_t *pages, Py_ssize_t found,
                    Py_ssize_t cached, bint inside) noexcept:
        cdef uint64_t text = self.slots.pages[pages[found - 1]].text if found else 0
        cdef Py_ssize_t size = self.slots.page_size
        if (found + 1) * size <= n:
            text = extended(text, tokens + found * size, size)
            if found < cached or max(self.evicted.get(mix(space ^ text)), self.before.get(mix(space ^ text))) >= 0:
                self.counts[EVICTED] += 1
            elif self.cached.get(text) > 0:    # in this namespace it would have matched
                self.counts[ELSEWHERE] += 1
            else:
                self.counts[SHORTER if inside else NONE_SHARED] += 1
        elif 0 < n < size:
            self.counts[SHORTER] += 1
            self.short += 1

    cdef void add(self, int32_t page, int32_t previous, const uint32_t *tokens) noexcept:
        cdef uint64_t text = self.slots.pages[previous].text if previous >= 0 else 0
        text = extended(text, tokens, self.slots.page_size)
        self.slots.pages[page].text = text
        self.cached.put(text, max(self.cached.get(text), 0) + 1)

    cdef void remove(self, int32_t page) noexcept:
        cdef uint64_t text = self.slots.pages[page].text
        cdef int32_t left = self.cached.get(text) - 1
        if left > 0:
            self.cached.put(text, left)
        else:
            self.cached.drop(text)

    cdef void remember(self, uint64_t space, int32_t page) noexcept:
        try:
            if self.evicted.used >= self.most:
                self.evicted, self.before = IdMap(), self.evicted
            self.evicted.reserve(self.evicted.used + 1)
        except MemoryError:
            return
        self.evicted.put(mix(space ^ self.slots.pages[page].text), 0)

    @property
    def nbytes(self):
        """Bytes of memory that this holds."""
        return self.cached.nbytes + self.evicted.nbytes + self.before.nbytes

    def check(self, Py_ssize_t misses):
        """Verify every invariant, given how many lookups missed; AssertionError names the broken one."""
        for texts in (self.cached, self.evicted, self.before):
            texts.check()
        records = self.slots.records()
        texts, counts = np.unique(records["text"][records["named"] != 0], return_counts=True)
        assert self.cached.keys_list() == texts.tolist(), "misses: the texts that are counted are not those cached"
        assert [self.cached.get(text) for text in texts] == counts.tolist(), "misses: the pages of a text do not add up"
        assert sum(self.counts) == misses + self.short, "misses: the reasons do not add up"
