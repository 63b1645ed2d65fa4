"""The trie with entries: marks at node boundaries, evicted one whole entry at a time."""

from libc.stdint cimport int32_t

from kvcache.trie.trie cimport TokenTrie


cdef class EntryTrie(TokenTrie):
    """A token trie whose sequences are entries: stored, used, evicted and removed as a whole.

    An entry is a mark at the end of a node. Entries may be prefixes of each other and share their tokens and
    values. The least recently used entry that no other one extends leaves first, with the tokens that no other
    entry needs; so an entry never leaves before those that are built on it. Pages are single tokens, since a key
    ends anywhere.
    """

    def __cinit__(self, Py_ssize_t page_size=1, policy=None):
        if page_size != 1:
            raise ValueError(f"expected pages of one token, got a page size of {page_size}")

    cdef int32_t serving(self, int32_t id) noexcept nogil:
        while not self.nodes[id].marked and self.nodes[id].child >= 0:
            id = self.nodes[id].child
        return id

    def store(self, root, tokens, values):
        """`insert` and `mark`, in one call that no interrupt cuts short; True if the entry is new."""
        node, _ = self.insert(root, tokens, values)
        return self.mark(node)

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

    def evict_entry(self, keep=-1):
        """Evict the least recently used entry that no other extends.

        `(root, values)`: its namespace and the values that nobody needs now, last token first; None if no entry
        can go. The tokens on the way to node `keep` stay, also when an entry among them goes.
        """
        cdef int32_t kept = -1 if keep == -1 else self._node(keep)
        if kept < 0:
            return self._evict_entry(kept)
        self.pin(kept)
        try:
            return self._evict_entry(kept)
        finally:
            self.unpin(kept)

    cdef object _evict_entry(self, int32_t kept):
        cdef int32_t leaf = self.leaves.top(), root
        if leaf < 0:    # Only the kept path is left: its longest entry goes, its tokens stay.
            leaf = kept
            while leaf >= 0 and not self.nodes[leaf].marked:
                leaf = self.nodes[leaf].parent
        if leaf < 0:
            return None
        root = leaf
        while self.nodes[root].parent >= 0:
            root = self.nodes[root].parent
        cdef Py_ssize_t before = self.num_entries
        values = self.cut_leaf(leaf)
        self.evicted += before - self.num_entries
        return root, values
