"""The nodes of the token trie: records, texts, links, and the five changes of shape.

A cached sequence is a path of nodes; an edge is a string of tokens of any length, and a node may begin and end
at any depth, also inside a page. The node in which a page ends owns the page's value:

    page size 4                     cached   a b c d e f g h    pages 7, 8
                                             a b c d e f x y    pages 7, 9
    root [0, 0)
      +-- [0, 6)  a b c d e f       page [0, 4) ends here:   value 7
            +-- [6, 8)  g h         page [4, 8) ends here:   value 8
            +-- [6, 8)  x y         page [4, 8) ends here:   value 9

So a node at token depths [begin, end) owns floor(end / page) - floor(begin / page) values, the children of one
node differ in their first token, and every leaf ends on a page boundary: from a position inside a page, first
children lead to a value of that page.

Five verbs change the shape. `split` cuts a node in two; the old id stays with the LOWER half, so pins and marks by id
stay valid. `join` is its inverse. `attach` adds a leaf, `extend` lengthens one, `shrink` removes pages from a leaf's
tail; a leaf without pages vanishes, and a parent that becomes a leaf is trimmed to its last page boundary.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t

from kvcache.core.heap cimport IndexedHeap
from kvcache.support.shared_numbers cimport shared_int64
from kvcache.trie.children cimport ChildTable
from kvcache.trie.policy cimport Policy


# One node in 64 bytes, a cache line: a step of a walk reads one of them. Ids are indices; -1 is none.
cdef struct node_t:
    uint32_t* text      # one allocation: tokens from depth begin - head on, (capacity,), then their int32 values
    int64_t stamp       # recency: the tree's clock when the node was last used; never above the parent's
    int32_t begin       # token depth of the edge's first token; -1: the record is free
    int32_t end         # token depth after the edge's last token
    int32_t head        # tokens at the front of text that moved to upper halves
    int32_t capacity    # tokens that text has room for
    int32_t parent      # -1: a root (or, in a free record, the next free one)
    int32_t child       # first child, the most recently used; -1: a leaf
    int32_t prev        # siblings by recency, newest first
    int32_t next
    int32_t pins        # above 0 the node and all above it stay
    int32_t marked      # an entry ends here
    int32_t queue       # scratch link for temporary lists
    int32_t uses        # how often the node was used, if the policy counts; else 0


# The node after `id` when all below `top` is visited: a node before its children, children by recency; -1 at the end.
cdef inline int32_t node_after(const node_t* nodes, int32_t id, int32_t top) noexcept nogil:
    if nodes[id].child >= 0:
        return nodes[id].child
    while id != top:
        if nodes[id].next >= 0:
            return nodes[id].next
        id = nodes[id].parent
    return -1


cdef class NodeTable:
    cdef node_t* nodes             # (capacity,)
    cdef Py_ssize_t capacity       # records there is room for
    cdef Py_ssize_t used           # records ever used; the free ones among them are chained
    cdef int32_t free_node         # first free record
    cdef Py_ssize_t num_free       # free records in the chain
    cdef int32_t page_size         # tokens per page
    cdef shared_int64 num_pages    # values held
    cdef shared_int64 num_tokens   # tokens held
    cdef shared_int64 num_entries    # nodes marked
    cdef Py_ssize_t text_bytes     # bytes of all texts
    cdef int64_t clock             # counts uses; no wall clock anywhere
    cdef ChildTable children       # (node, first token) -> child
    cdef IndexedHeap leaves        # the unpinned leaves by rank: the order of eviction
    cdef readonly Policy policy

    # Records, texts and links
    cdef int reserve(self, Py_ssize_t extra) except -1 nogil   # room for `extra` nodes: taking them cannot fail
    cdef int32_t take(self) noexcept nogil
    cdef void give(self, int32_t id) noexcept nogil
    cdef Py_ssize_t nbytes(self) except -1
    cdef bint is_root(self, Py_ssize_t id) noexcept nogil      # of any number: whether it is the id of one
    cdef uint32_t* tokens(self, int32_t id) noexcept nogil     # (end - begin,) of the edge
    cdef int32_t* values(self, int32_t id) noexcept nogil      # (pages,) that the node owns
    cdef Py_ssize_t pages(self, int32_t id) noexcept nogil
    cdef int32_t new_node(self, Py_ssize_t begin, Py_ssize_t end) except -1 nogil
    cdef uint32_t* new_text(self, Py_ssize_t begin, Py_ssize_t end) noexcept nogil
    cdef bint retext(self, int32_t id, Py_ssize_t begin, Py_ssize_t end) noexcept nogil
    cdef void compact(self, int32_t id) noexcept nogil
    cdef void enlist(self, int32_t id, int32_t parent) noexcept nogil
    cdef void delist(self, int32_t id) noexcept nogil
    cdef void replace(self, int32_t old, int32_t new) noexcept nogil

    # Shape
    cdef int32_t new_root(self) except -1 nogil
    cdef int32_t split(self, int32_t id, Py_ssize_t depth) except -1 nogil
    cdef void join(self, int32_t upper, Py_ssize_t max_tokens) noexcept nogil
    cdef int32_t attach(self, int32_t parent, const uint32_t* tokens, Py_ssize_t end,
                        const int32_t* values) except -1 nogil
    cdef int extend(self, int32_t leaf, const uint32_t* tokens, Py_ssize_t end,
                    const int32_t* values) except -1 nogil
    cdef int32_t shrink(self, int32_t leaf, Py_ssize_t count, int32_t* out) noexcept nogil
    cdef void trim(self, int32_t leaf, int32_t end) noexcept nogil
    cdef int32_t trim_up(self, int32_t id) noexcept nogil
    cdef bint completes_pin(self, int32_t leaf) noexcept nogil

    # Pins, marks, order
    cdef void pin(self, int32_t id, int32_t change) noexcept nogil
    cdef bint mark(self, int32_t id, bint marked) noexcept nogil
    cdef double rank(self, int32_t id) noexcept nogil    # of `policy`
    cdef void stamp_path(self, int32_t id) noexcept nogil
    cdef void sink(self, int32_t top) noexcept nogil
    cdef void list_leaf(self, int32_t id) noexcept nogil
