"""Why lookups missed, at a cost that does not grow with the number of namespaces.

    evicted             the page was cached before: `evicted` and `before` have the pages evicted last
    namespace           another one has it: `cached` has all cached texts
    shorter_than_block  the prompt continues like a cached page, but not to its end; or it is shorter than a page
    no_shared_prefix    none of these

A text that ends with a full page is known by a 64-bit hash of its tokens, the same in every process. Two texts with one
hash make a statistic wrong, or an event (event_buffer.pxd), nothing else: K and V are never found this way.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvcache.core.idmap cimport IdMap
from kvcache.prefix.index.slots cimport Slots


cdef class MissReasons:
    cdef Slots slots             # of all pages; `page_t.text` is the hash of the text that each ends
    cdef IdMap cached            # hash of a text -> pages that end it
    cdef IdMap evicted, before   # hashes of a namespace's name and a text; `evicted` becomes `before` when it is full
    cdef Py_ssize_t most         # in `evicted`
    cdef int64_t[4] counts       # of `REASONS`
    cdef int64_t short           # lookups of fewer tokens than a page has, which are no misses

    # Count a lookup of (n,) tokens that could use `found` of the `cached` pages. `inside`: a page begins like the next.
    cdef void count(self, uint64_t space, const uint32_t *tokens, Py_ssize_t n, const int32_t *pages, Py_ssize_t found,
                    Py_ssize_t cached, bint inside) noexcept
    # A page of (page_size,) tokens is cached now, behind `previous`; -1: it is the first. `cached` has room for it.
    cdef void add(self, int32_t page, int32_t previous, const uint32_t *tokens) noexcept
    cdef void remove(self, int32_t page) noexcept    # it is not any more
    cdef void remember(self, uint64_t space, int32_t page) noexcept    # an evicted page, if there is memory
