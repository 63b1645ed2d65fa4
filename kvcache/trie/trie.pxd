"""The token trie: which pages of a prompt are cached, and the order of eviction."""

from libc.stdint cimport int32_t, uint32_t

from kvcache.trie.nodes cimport NodeTable
from kvcache.trie.paths cimport walk_t


cdef class TokenTrie:
    cdef readonly NodeTable table     # the nodes

    # Ids and depths from callers, checked
    cdef int32_t as_root(self, object root) except -1
    cdef int32_t _node(self, object node) except -1
    cdef Py_ssize_t _depth(self, int32_t id, object length) except -1

    cdef object cut_of(self, int32_t id)    # `cut`, and what it freed, last first

    # The verbs of trie/paths.pxd on `table`, explained there
    cdef walk_t walk(self, int32_t root, const uint32_t* tokens, Py_ssize_t n) noexcept nogil
    cdef void gather(self, walk_t at, int32_t* out) noexcept nogil
    cdef int32_t partial(self, walk_t at) noexcept nogil
    cdef int32_t put(self, int32_t root, const uint32_t* tokens, Py_ssize_t n, const int32_t* values,
                     Py_ssize_t* existing) except -1 nogil
    cdef Py_ssize_t free_pages(self, Py_ssize_t count, int32_t* out) noexcept nogil
    cdef Py_ssize_t cut(self, int32_t leaf, int32_t* out) noexcept nogil
    cdef int32_t at_depth(self, int32_t id, Py_ssize_t depth) except -1 nogil
