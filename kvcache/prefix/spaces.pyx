"""Namespaces of a prefix index; see spaces.pxd."""

from libc.stdint cimport uint64_t

from kvcache.prefix.slots cimport Slots
from kvcache.trie.trie cimport TokenTrie

__all__ = ["Space", "Spaces"]


cdef class Space:
    """A namespace: its name, its slots and its root in the trie."""

    def __cinit__(self):
        self.root = -1


cdef class Spaces:
    """The namespaces of an index by name and by root."""

    def __cinit__(self):
        self.by_name, self.of_root = {}, {}

    def in_use(self):
        """`(Space, root)` of every namespace that has something cached."""
        return [(space, root) for root, space in self.of_root.items()]

    cdef Space find(self, object name):
        cdef Space space = self.by_name.get(name)
        return None if space is None or space.root < 0 else space

    cdef Space open(self, object name, Slots slots):
        cdef uint64_t key = <uint64_t>hash(name)
        cdef Space space = self.by_name.get(name)
        if space is None:
            space = Space.__new__(Space)
            space.name, space.key = name, key
            self.list_vacant(space)
            self.by_name[name] = space
        if space.root < 0:
            space.slots = slots
        if space.slots is not slots:
            raise ValueError("slots: expected those of the namespace, got others")
        return space

    cdef void list_vacant(self, Space space) noexcept:
        if not space.listed:
            space.listed, space.next, self.vacant = True, self.vacant, space

    cdef int close(self, Space space, TokenTrie trie) except -1:
        if trie.table.nodes[space.root].child < 0:
            self.of_root.pop(space.root, None)
            trie.table.give(space.root)
            space.root = -1
            self.list_vacant(space)
        return 0

    cdef int forget_vacant(self) except -1:
        while self.vacant is not None:
            if self.vacant.root < 0:
                self.by_name.pop(self.vacant.name, None)
            self.vacant.listed = False
            self.vacant = self.vacant.next
        return 0

    cdef int check(self, TokenTrie trie) except -1:
        cdef Space space
        assert trie.roots() == sorted(self.of_root), "namespaces: roots differ"
        for root, space in self.of_root.items():
            assert space.root == root and self.by_name.get(space.name) is space, "namespaces: names differ"
            assert trie.table.nodes[space.root].child >= 0, "namespaces: one without pages has a root"
        assert self.vacant is not None or len(self.by_name) == len(self.of_root), "namespaces: a name without pages"
        return 0
