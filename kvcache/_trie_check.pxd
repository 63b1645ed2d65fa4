"""Every invariant of the trie's nodes, in one place."""

from kvcache._nodes cimport NodeTable

cdef int check_nodes(NodeTable table) except -1
