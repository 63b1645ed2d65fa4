"""Entries: a token trie whose keys are stored, used, evicted and removed as a whole."""

from libc.stdint cimport int32_t

from kvcache.trie.paths cimport walk_t
from kvcache.trie.trie cimport TokenTrie


cdef class EntryTrie(TokenTrie):
    # The first entry at or below the node, by recency; the node's leaf if none is marked.
    cdef int32_t serving(self, int32_t id) noexcept nogil
    # The longest entry that is a prefix of a walk; node -1 and length 0 if there is none.
    cdef walk_t entry_before(self, walk_t at) noexcept nogil
