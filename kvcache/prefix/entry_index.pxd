"""`EntryIndex`: what `PrefixKvCache` asks of an index.

Nothing is pinned: what leaves the trie stays in its slots as long as it is claimed.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t

from kvcache.prefix.index cimport PrefixIndex
from kvcache.prefix.spaces cimport Space


cdef class EntryIndex(PrefixIndex):
    cdef int32_t entry(self, Space space, cnp.ndarray ids) noexcept    # the node of an entry of these tokens; -1: none
