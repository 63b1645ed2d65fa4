"""Why a lookup missed, at a cost that does not grow with the number of namespaces.

    evicted             the page was cached before: `ghosts` has the tokens of the pages evicted last
    namespace           another one has it: `texts` counts all cached texts, by hash
    shorter_than_block  the prompt continues like a cached page, but not to its end; or it is shorter than a page
    no_shared_prefix    none of these
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvcache.core.idmap cimport IdMap
from kvcache.prefix.texts cimport TextCounts
from kvcache.trie.trie cimport TokenTrie


cdef enum:
    NONE_SHARED, SHORTER, EVICTED, ELSEWHERE, NUM_REASONS


cdef class MissReasons:
    cdef TextCounts texts
    cdef TokenTrie ghosts
    cdef IdMap roots             # hash of a namespace's name -> root of its ghosts
    cdef Py_ssize_t most_pages   # of ghosts
    cdef Py_ssize_t page_size

    # Why the page of `tokens` behind the first `found` pages is missing; `inside`: a cached page begins as it does.
    cdef int why(self, uint64_t space, const uint32_t *tokens, const int32_t *pages, Py_ssize_t found,
                 bint inside) noexcept
    # Note the texts of `pages` from the first `old` on, which no prompt finds yet; `count` cannot fail then.
    cdef int prepare(self, const uint32_t *tokens, const int32_t *pages, Py_ssize_t old, Py_ssize_t n) except -1
    cdef void count(self, int32_t page) noexcept
    cdef void uncount(self, int32_t page) noexcept
    cdef void remember(self, uint64_t space, const uint32_t *tokens, const int32_t *pages, Py_ssize_t n) noexcept
