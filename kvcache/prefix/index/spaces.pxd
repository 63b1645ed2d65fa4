"""Namespaces: name -> Space -> root of the trie, and back.

A namespace keeps its name and its root when its last page is evicted. The next call forgets them: that runs `__hash__`
and `__eq__` of the caller's name, which may raise.
"""

from libc.stdint cimport int32_t, uint64_t

from kvcache.prefix.index.slots cimport Slots
from kvcache.trie.trie cimport TokenTrie


cdef class Space:
    cdef readonly object name
    cdef readonly Slots slots
    cdef uint64_t key      # hash of the name
    cdef int32_t root
    cdef Space next        # of those that may be vacant
    cdef bint listed       # among these


cdef class Spaces:
    cdef TokenTrie trie
    cdef dict by_name      # name -> Space
    cdef dict of_root      # root -> Space
    cdef Space vacant      # first of a list

    cdef bint is_vacant(self, Space space) noexcept        # whether nothing of it is cached
    cdef Space find(self, object name)                     # None: there is none, or it is vacant
    cdef Space open(self, object name, Slots slots)        # the same, or a new one
    cdef void close(self, Space space) noexcept            # note that it may be vacant
    cdef int forget_vacant(self) except -1
    cdef int check(self) except -1
