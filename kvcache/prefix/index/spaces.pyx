"""Namespaces of a prefix index; see spaces.pxd."""

from libc.stdint cimport uint64_t

from kvcache.prefix.index.slots cimport Slots
from kvcache.trie.trie cimport TokenTrie

__all__ = ["Space", "Spaces"]


cdef class Space:
    """A namespace: its name, its slots and its root in the trie."""

    def __cinit__(self):
        self.root = -1


cdef class Spaces:
    """The namespaces of a trie by name and by root."""

    def __cinit__(self, TokenTrie trie not None):
        self.trie, self.by_name, self.of_root = trie, {}, {}

    def in_use(self):
        """`(Space, root)` of every namespace that has something cached."""
        cdef Space space
        return [(space, root) for root, space in self.of_root.items() if not self.is_vacant(space)]

    cdef bint is_vacant(self, Space space) noexcept:
        return space.root < 0 or self.trie.table.nodes[space.root].child < 0

    cdef Space find(self, object name):
        cdef Space space = self.by_name.get(name)
        return None if space is None or self.is_vacant(space) else space

    cdef Space open(self, object name, Slots slots):
        cdef uint64_t key = <uint64_t>hash(name)
        cdef Space space = self.by_name.get(name)
        if space is None:
            space = Space.__new__(Space)
            space.name, space.key = name, key
            self.close(space)
            self.by_name[name] = space
            space.root = self.trie.table.new_root()
            self.of_root[space.root] = space
        if self.is_vacant(space):
            space.slots = slots
        if space.slots is not slots:
            raise ValueError("slots: expected those of the namespace, got others")
        return space

    cdef void close(self, Space space) noexcept:
        if self.is_vacant(space) and not space.listed:
            space.listed, space.next, self.vacant = True, self.vacant, space

    cdef int forget_vacant(self) except -1:
        cdef Space space
        while self.vacant is not None:
            space = self.vacant
            if self.is_vacant(space):
                self.by_name.pop(space.name, None)
                self.of_root.pop(space.root, None)
                if space.root >= 0:
                    self.trie.table.give(space.root)
            space.listed, self.vacant, space.next = False, space.next, None
        return 0

    cdef int check(self) except -1:
        cdef Space space
        assert self.trie.roots() == sorted(self.of_root), "namespaces: roots differ"
        for root, space in self.of_root.items():
            assert space.root == root and self.by_name.get(space.name) is space, "namespaces: names differ"
            assert space.listed or not self.is_vacant(space), "namespaces: one without pages has a root"
        assert len(self.by_name) == len(self.of_root), "namespaces: a name without a root"
        return 0
