"""Paths through the trie: walked by the tokens of a prompt, lengthened at their end, cut back from it.

`NodeTable` (in trie/nodes.pxd, with the drawing) is the shape; this is what happens to it. A walk compares each
token once and touches each node of the path once, so it costs what comparing the tokens costs.
"""

from libc.stdint cimport int32_t, uint32_t

from kvcache.trie.nodes cimport NodeTable


cdef struct walk_t:
    int32_t node          # the deepest node reached; the root if nothing matched
    Py_ssize_t length     # tokens matched; inside or at the end of `node`


cdef class TokenPaths(NodeTable):
    # The longest cached prefix of (n,) tokens.
    cdef walk_t walk(self, int32_t root, const uint32_t* tokens, Py_ssize_t n) noexcept nogil
    # The values of the walk's full pages into out, (length // page_size,).
    cdef void gather(self, walk_t at, int32_t* out) noexcept nogil
    # The value of a page that holds the walk's last tokens when it ends inside a page; -1 if it does not.
    cdef int32_t partial(self, walk_t at) noexcept nogil
    # Cache (n,) tokens; existing pages keep their values. Returns the node that ends at n.
    cdef int32_t put(
        self, int32_t root, const uint32_t* tokens, Py_ssize_t n, const int32_t* values, Py_ssize_t* existing
    ) except -1 nogil
    # Free up to `count` pages, least recently used leaf first, each from its tail; returns how many.
    cdef Py_ssize_t free_pages(self, Py_ssize_t count, int32_t* out) noexcept nogil
    # Free what the leaf's sequence alone needs: up to the next fork, mark, pin or root; returns how many pages.
    cdef Py_ssize_t cut(self, int32_t leaf, int32_t* out) noexcept nogil
    # The node that ends exactly at `depth`, a full page's end on the way to `id`; cut out where there is none.
    cdef int32_t at_depth(self, int32_t id, Py_ssize_t depth) except -1 nogil
    # All values below `id` into out; returns how many.
    cdef Py_ssize_t collect(self, int32_t id, int32_t* out) noexcept nogil
    cdef void _empty(self, int32_t top) noexcept nogil               # a root, also of what is pinned
