"""Why a lookup missed; explained in misses.pxd."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvcache.core.idmap cimport IdMap
from kvcache.prefix.texts cimport TextCounts
from kvcache.trie.trie cimport TokenTrie

__all__ = ["REASONS", "MissReasons"]

REASONS = ("no_shared_prefix", "shorter_than_block", "evicted", "namespace")


cdef class MissReasons:
    """The texts that are cached, and the last that were evicted, of at most `most_pages` pages."""

    def __init__(self, Py_ssize_t num_pages, Py_ssize_t page_size, Py_ssize_t most_pages):
        self.page_size, self.most_pages = page_size, most_pages
        self.texts = TextCounts(num_pages, page_size)
        self.ghosts, self.roots = TokenTrie(page_size), IdMap()

    cdef int why(self, uint64_t space, const uint32_t *tokens, const int32_t *pages, Py_ssize_t found,
                 bint inside) noexcept:
        cdef Py_ssize_t end = (found + 1) * self.page_size
        cdef int32_t root = self.roots.get(space)
        if root >= 0 and self.ghosts.walk(root, tokens, end).length == end:
            return EVICTED
        cdef uint64_t text = self.texts.texts[pages[found - 1]] if found else 0
        if self.texts.counts.get(self.texts.extended(text, tokens + end - self.page_size)) > 0:
            return ELSEWHERE    # it is not here, or it would have matched
        return SHORTER if inside else NONE_SHARED

    cdef int prepare(self, const uint32_t *tokens, const int32_t *pages, Py_ssize_t old, Py_ssize_t n) except -1:
        cdef Py_ssize_t i
        cdef uint64_t text = self.texts.texts[pages[old - 1]] if old else 0
        self.texts.counts.reserve(self.texts.counts.used + n - old)
        for i in range(old, n):
            text = self.texts.extended(text, tokens + i * self.page_size)
            self.texts.texts[pages[i]] = text
        return 0

    cdef void count(self, int32_t page) noexcept:
        self.texts.count_one_more(self.texts.texts[page])

    cdef void uncount(self, int32_t page) noexcept:
        self.texts.count_one_less(self.texts.texts[page])

    cdef void remember(self, uint64_t space, const uint32_t *tokens, const int32_t *pages, Py_ssize_t n) noexcept:
        """Remember evicted pages, the last ones of this text of `n` tokens; without memory nothing is remembered."""
        cdef int32_t out[64]
        cdef int32_t root = self.roots.get(space)
        cdef Py_ssize_t slot, existing
        try:
            if root < 0:
                self.roots.reserve(self.roots.used + 1)
                root = self.ghosts.table.new_root()
                self.roots.put(space, root)
            self.ghosts.put(root, tokens, n, pages, &existing)
        except MemoryError:
            return
        while self.ghosts.table.num_pages > self.most_pages:
            self.ghosts.free_pages(min(64, self.ghosts.table.num_pages - self.most_pages), out)
        if self.roots.used > self.most_pages + 64:
            for slot in range(self.roots.capacity):
                root = self.roots.values[slot]
                if root >= 0 and self.ghosts.table.nodes[root].child < 0:
                    self.roots.drop(self.roots.keys[slot])
                    self.ghosts.table.give(root)

    @property
    def nbytes(self):
        """Bytes of memory that this holds."""
        return self.texts.nbytes + self.ghosts.nbytes + self.roots.nbytes

    def check(self, pages):
        """Verify every invariant, given the pages that are cached, int32; AssertionError names the broken one."""
        self.texts.check(pages)
        self.ghosts.check()
        self.roots.check()
        assert self.ghosts.table.num_pages <= self.most_pages, "misses: more ghosts than allowed"
