"""Every invariant of the trie's nodes, in one place."""

from kvcache.trie.nodes cimport NodeTable

cdef int check_nodes(NodeTable table) except -1
