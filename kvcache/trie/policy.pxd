"""Eviction policies: the order in which the leaves of a trie are evicted."""

from libc.stdint cimport int32_t, int64_t


cdef class Policy:
    cdef readonly bint counts    # whether `rank` reads `uses`; if not, nodes do not count them

    # The leaf of lowest rank is evicted first. `stamp`: the trie's clock at the leaf's last use. A rank depends on its
    # arguments alone.
    cdef double rank(self, int64_t stamp, int32_t uses) noexcept nogil
