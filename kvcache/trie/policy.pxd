"""Eviction policies: which leaf of a trie leaves first."""

from libc.stdint cimport int32_t, int64_t


cdef class Policy:
    cdef readonly bint counts    # whether it asks how often a node was used; if not, nodes do not count

    # The leaf of lowest rank leaves first. `stamp`: the trie's clock when the leaf was last used. A rank depends on its
    # arguments alone.
    cdef double rank(self, int64_t stamp, int32_t uses) noexcept nogil
