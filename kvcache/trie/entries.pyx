"""The trie with entries: marks at the ends of nodes, evicted one whole entry at a time."""

cimport cython
from libc.stdint cimport int32_t

from kvcache.trie.nodes cimport node_t
from kvcache.trie.paths cimport walk_t
from kvcache.trie.trie cimport TokenTrie


cdef class EntryTrie(TokenTrie):
    """A token trie whose sequences are entries: stored, used, evicted and removed as a whole.

    An entry is a mark at the end of a node. An entry may be a prefix of another; both share tokens and values. The
    least recently used entry that no other one extends is evicted first, with the tokens that no other entry needs. So
    an entry is evicted after those that extend it. A page is one token, since a key may have any length.
    """

    def __cinit__(self, Py_ssize_t page_size=1, policy=None):
        if page_size != 1:
            raise ValueError(f"page_size: expected 1, got {page_size}")

    cdef int32_t serving(self, int32_t id) noexcept nogil:
        cdef const node_t* nodes = self.table.nodes
        while not nodes[id].marked and nodes[id].child >= 0:
            id = nodes[id].child
        return id

    cdef walk_t entry_before(self, walk_t at) noexcept nogil:
        cdef const node_t* nodes = self.table.nodes
        while at.node >= 0 and (not nodes[at.node].marked or nodes[at.node].end > at.length):
            at.length = min(at.length, nodes[at.node].begin)
            at.node = nodes[at.node].parent
        return at

    @cython.critical_section
    def mark(self, node):
        """An entry ends with `node`, as `insert` returns it. True if it is new."""
        cdef int32_t id = self._node(node)
        if self.table.nodes[id].parent < 0:
            raise ValueError(f"node: expected one with tokens, got root {node}")
        return self.table.mark(id, True)

    @cython.critical_section
    def is_marked(self, node):
        """Whether an entry ends with `node`."""
        return self.table.nodes[self._node(node)].marked == 1

    @cython.critical_section
    def entry_at(self, node, length):
        """`(node, length)` of the longest entry that is a prefix of a match `(node, length)`; `(-1, 0)` if none."""
        cdef walk_t at = self.entry_before(walk_t(node=self._node(node), length=length))
        return at.node, at.length

    @cython.critical_section
    def touch_entry(self, node):
        """Use the entry that serves a match ending in `node`: its own, or the most recently used one below."""
        self.table.stamp_path(self.serving(self._node(node)))

    @cython.critical_section
    def evict_entry(self):
        """Evict the least recently used entry that no other extends.

        `(root, values)`: its namespace and the values that are free now, last token first; None if there is no entry.
        """
        cdef int32_t leaf = self.table.leaves.top(), root = leaf
        if leaf < 0:
            return None
        while self.table.nodes[root].parent >= 0:
            root = self.table.nodes[root].parent
        return root, self.cut_of(leaf)
