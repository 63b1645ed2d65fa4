"""`EntryIndex`: the index of a `PrefixKvCache`.

Nothing is pinned: an entry that leaves the trie keeps its slots while a claim holds them.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t

from kvcache.prefix.index.prefixes cimport PrefixIndex
from kvcache.prefix.index.spaces cimport Space


cdef class EntryIndex(PrefixIndex):
    cdef int32_t entry(self, Space space, cnp.ndarray ids) noexcept    # the node of an entry of these tokens; -1: none
