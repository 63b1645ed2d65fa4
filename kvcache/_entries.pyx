"""The trie with entries: marks at node boundaries, evicted one whole entry at a time."""

cimport numpy as cnp
from libc.stdint cimport int32_t

from kvcache._trie cimport TokenTrie

import numpy as np

cnp.import_array()


cdef class EntryTrie(TokenTrie):
    """A token trie whose sequences are entries: stored, used, evicted and removed as a whole.

    An entry is a mark at the end of a node. Entries may be prefixes of each other and share their tokens and
    values. The least recently used entry that no other one extends leaves first, with the tokens that no other
    entry needs; so an entry never leaves before those that are built on it. Pages are single tokens, since a key
    ends anywhere.
    """

    def __cinit__(self, Py_ssize_t page_size=1):
        if page_size != 1:
            raise ValueError(f"expected pages of one token, got a page size of {page_size}")

    cdef int32_t serving(self, int32_t id) noexcept nogil:
        while not self.nodes[id].marked and self.nodes[id].child >= 0:
            id = self.nodes[id].child
        return id

    def mark(self, node):
        """An entry ends with `node`, as `insert` returns it. True if it is new."""
        cdef int32_t id = self._node(node)
        cdef bint new = not self.nodes[id].marked
        if self.nodes[id].parent < 0:
            raise ValueError(f"expected a node with tokens, got root {node}")
        self.nodes[id].marked = 1
        self.num_entries += new
        return new

    def is_marked(self, node):
        """Whether an entry ends with `node`."""
        return self.nodes[self._node(node)].marked == 1

    def entry_at(self, node, length):
        """`(node, length)` of the longest entry that is a prefix of a match `(node, length)`; `(-1, 0)` if none."""
        cdef int32_t id = self._node(node)
        cdef Py_ssize_t depth = length
        while id >= 0 and (not self.nodes[id].marked or self.nodes[id].end > depth):
            id = self.nodes[id].parent
        if id < 0:
            return -1, 0
        return id, self.nodes[id].end

    def touch_entry(self, node):
        """Use the entry that serves a match ending in `node`: its own, or the most recently used one below."""
        self.stamp_path(self.serving(self._node(node)))

    def evict_entry(self):
        """Evict the least recently used entry that no other extends; returns the values that nobody needs now.

        None if no entry can go.
        """
        cdef int32_t leaf
        cdef Py_ssize_t entries = self.num_entries
        parts = []
        while self.num_entries == entries:
            leaf = self.leaves.top()
            if leaf < 0:
                break
            self.num_entries -= self.nodes[leaf].marked
            self.nodes[leaf].marked = 0
            parts.append(self._cut(leaf))
        return np.concatenate(parts) if parts else None
