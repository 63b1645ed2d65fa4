"""Verbs along the path of a token sequence: walk it, lengthen it at its end, cut it back from there.

`NodeTable` (drawn in trie/nodes.pxd) holds the nodes; these functions change it and check nothing. A walk compares each
token once and reads each node of the path once, so it costs what comparing the tokens costs.
"""

from libc.stdint cimport int32_t, uint32_t

from kvcache.trie.nodes cimport NodeTable


cdef struct walk_t:
    int32_t node          # the deepest node reached; the root if nothing matched
    Py_ssize_t length     # tokens matched; inside or at the end of `node`


# The longest cached prefix of (n,) tokens.
cdef walk_t walk(NodeTable table, int32_t root, const uint32_t* tokens, Py_ssize_t n) noexcept nogil
# The values of the walk's full pages into out, (length // page_size,).
cdef void gather(NodeTable table, walk_t at, int32_t* out) noexcept nogil
# The value of a page that holds the walk's last tokens when it ends inside a page; -1 if it does not.
cdef int32_t partial(NodeTable table, walk_t at) noexcept nogil
# Cache (n,) tokens; existing pages keep their values. Returns the node that ends at n.
cdef int32_t put(NodeTable table, int32_t root, const uint32_t* tokens, Py_ssize_t n, const int32_t* values,
                 Py_ssize_t* existing) except -1 nogil
# Free up to `count` pages, least recently used leaf first, each from its tail; returns how many.
cdef Py_ssize_t free_pages(NodeTable table, Py_ssize_t count, int32_t* out) noexcept nogil
# Unmark a node and, if it is a leaf, free what only its sequence needs: up to the next fork, mark, pin or root; returns
# how many pages.
cdef Py_ssize_t cut(NodeTable table, int32_t leaf, int32_t* out) noexcept nogil
# The node that ends exactly at `depth`, which is the end of a full page on the way to `id`; split off if there is none.
cdef int32_t at_depth(NodeTable table, int32_t id, Py_ssize_t depth) except -1 nogil
# Free the last page on the way to `id`, which ends behind it, and all below; returns how many. Ignores pins and marks.
cdef Py_ssize_t prune(NodeTable table, int32_t id, int32_t* out) noexcept nogil
# All values below `top` into out; returns how many.
cdef Py_ssize_t collect(NodeTable table, int32_t top, int32_t* out) noexcept nogil
# Of a walk along (n,) tokens: the highest node of which all below belongs to that text alone; -1: there is none. What alone
# continues the text counts as its own, and so do leaves of a page in which a text has ended. The first `keep` tokens, of
# full pages, do not count. `low` gets the last node of the text.
cdef int32_t own(NodeTable table, walk_t at, Py_ssize_t n, Py_ssize_t keep, int32_t* low) except -2
