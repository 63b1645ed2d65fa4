"""Entries: a token trie in which whole stored keys have a life of their own."""

from libc.stdint cimport int32_t

from kvcache.trie.trie cimport TokenTrie


cdef class EntryTrie(TokenTrie):
    # The first entry at or below the node, by recency; the node's leaf where none is marked.
    cdef int32_t serving(self, int32_t id) noexcept nogil
    cdef object _evict_entry(self, int32_t kept)
