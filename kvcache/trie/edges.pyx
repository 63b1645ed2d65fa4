"""The edges of a trie as flat arrays, each behind the one above it: what is saved of a trie."""

cimport numpy as cnp
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy

from kvcache.trie.nodes cimport NodeTable, node_after

from collections import namedtuple

import numpy as np

cnp.import_array()

Edges = namedtuple("Edges", ("parents", "ends", "marked", "stamps", "tokens", "values"))


def edges_of(NodeTable trie not None, Py_ssize_t root):
    """Every edge below `root`, parents first.

    `Edges` of n edges: `parents` int64 (n,), the index of the edge above, -1 below the root; `ends` int64 (n,), the
    token depth behind the edge; `marked` bool (n,), whether an entry ends there; `stamps` int64 (n,), when it was
    last used, never later than its parent; `tokens` uint32 and `values` int32, those of all edges, one after the
    other.
    """
    if not 0 <= root < trie.used or trie.nodes[root].begin < 0 or trie.nodes[root].parent >= 0:
        raise ValueError(f"expected the id of a root, got {root}")
    cdef Py_ssize_t n = 0, room = trie.used - trie.num_free, num_tokens = 0, num_values = 0, length
    parents, ends, stamps = (np.empty(room, np.int64) for _ in range(3))
    marked, place = np.empty(room, bool), np.empty(trie.used, np.int64)
    tokens, values = np.empty(trie.num_tokens, np.uint32), np.empty(trie.num_pages, np.int32)
    cdef cnp.int64_t[::1] parent_of = parents, end_of = ends, stamp_of = stamps, place_of = place
    cdef cnp.uint8_t[::1] mark_of = marked.view(np.uint8)
    cdef uint32_t *text = <uint32_t *>cnp.PyArray_DATA(<cnp.ndarray>tokens)
    cdef int32_t *pages = <int32_t *>cnp.PyArray_DATA(<cnp.ndarray>values)
    cdef int32_t top = <int32_t>root, id = node_after(trie.nodes, top, top)
    place_of[top] = -1
    while id >= 0:
        place_of[id] = n
        parent_of[n] = place_of[trie.nodes[id].parent]
        end_of[n], stamp_of[n], mark_of[n] = trie.nodes[id].end, trie.nodes[id].stamp, trie.nodes[id].marked
        length = trie.nodes[id].end - trie.nodes[id].begin
        memcpy(text + num_tokens, trie.tokens(id), length * sizeof(uint32_t))
        num_tokens += length
        length = trie.pages(id)
        if length:
            memcpy(pages + num_values, trie.values(id), length * sizeof(int32_t))
        num_values += length
        n += 1
        id = node_after(trie.nodes, id, top)
    return Edges(parents[:n], ends[:n], marked[:n], stamps[:n], tokens[:num_tokens], values[:num_values])
