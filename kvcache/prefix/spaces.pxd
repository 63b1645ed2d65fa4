"""Namespaces: name -> Space -> root of the trie, and back.

A namespace whose last page is evicted loses its root at once and its name at the next call: forgetting a name runs the
caller's `__hash__` and `__eq__`, which may raise.
"""

from libc.stdint cimport int32_t, uint64_t

from kvcache.prefix.slots cimport Slots
from kvcache.trie.trie cimport TokenTrie


cdef class Space:
    cdef readonly object name
    cdef readonly Slots slots
    cdef uint64_t key      # hash of the name
    cdef int32_t root      # -1: nothing of it is cached
    cdef Space next        # of those that may be vacant
    cdef bint listed       # among these


cdef class Spaces:
    cdef dict by_name      # name -> Space
    cdef dict of_root      # root -> Space
    cdef Space vacant      # first of a list

    cdef Space find(self, object name)                     # None: nothing of it is cached
    cdef Space open(self, object name, Slots slots)        # the same, or a new one, without a root
    cdef int close(self, Space space, TokenTrie trie) except -1    # if it has no pages
    cdef void list_vacant(self, Space space) noexcept
    cdef int forget_vacant(self) except -1
    cdef int check(self, TokenTrie trie) except -1
