"""Why a lookup missed, at a cost that does not grow with the number of namespaces.

    evicted             the page was cached before: `ghosts` has the pages evicted last
    namespace           another one has it: `counts` has all cached texts
    shorter_than_block  the prompt continues like a cached page, but not to its end; or it is shorter than a page
    no_shared_prefix    none of these

A text that ends with a full page is known by a 64-bit hash of its tokens. Two texts with one hash make a statistic
wrong, nothing else: K and V are never found this way.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvcache.core.idmap cimport IdMap
from kvcache.prefix.index.slots cimport Slots


cdef enum:
    NONE_SHARED, SHORTER, EVICTED, ELSEWHERE, NUM_REASONS


cdef class MissReasons:
    cdef Slots slots             # of all pages; `page_t.text` is the hash of the text that each ends
    cdef IdMap counts            # hash of a text -> pages that end it
    cdef uint64_t[::1] factors   # (page_size,) odd, of the tokens of a page: their sum of products is its hash
    cdef IdMap ghosts            # hash of a namespace's name and a text -> its place in `ring`
    cdef uint64_t[::1] ring      # (most_pages,) these hashes
    cdef int32_t place           # of the oldest, where the next one goes

    cdef uint64_t extended(self, uint64_t text, const uint32_t *tokens) noexcept nogil    # by one page
    # Why the page of `tokens` after the first `found` pages is missing; `inside`: a cached page begins like it.
    cdef int why(self, uint64_t space, const uint32_t *tokens, const int32_t *pages, Py_ssize_t found,
                 bint inside) noexcept
    # Note the texts of `pages[old:]`, which the trie does not name yet; afterwards `count` cannot fail.
    cdef int prepare(self, const uint32_t *tokens, const int32_t *pages, Py_ssize_t old, Py_ssize_t n) except -1
    cdef void count(self, int32_t page) noexcept
    cdef void uncount(self, int32_t page) noexcept
    # Remember an evicted page; without memory nothing is remembered.
    cdef void remember(self, uint64_t space, int32_t page) noexcept
