"""The token trie: which pages a prompt already has, and which leave first."""

from libc.stdint cimport int32_t

from kvcache.trie.paths cimport TokenPaths


cdef class TokenTrie(TokenPaths):
    cdef public Py_ssize_t evicted    # pages that `evict` took, ever; of a trie with entries, those `evict_entry` took
    cdef int32_t _root(self, object root) except -1
    cdef int32_t _node(self, object node) except -1
    cdef Py_ssize_t _depth(self, int32_t id, object length) except -1
