"""The edges of a trie as flat arrays, parents first: the part of a trie that is saved."""

cimport numpy as cnp
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy

from kvcache.support.token_ids cimport int32s, uint32s
from kvcache.trie.nodes cimport NodeTable, node_after
from kvcache.trie.trie cimport TokenTrie

from collections import namedtuple

import numpy as np

cnp.import_array()

Edges = namedtuple("Edges", ("roots", "parents", "ends", "marked", "stamps", "tokens", "values"))


def edges_of(TokenTrie trie not None, roots):
    """Every edge below `roots`, one root after the other, parents first.

    `Edges` of n edges: `roots` int64 (n,), the index of the edge's root in `roots`; `parents` int64 (n,), the index of
    the edge above, -1 below the root; `ends` int64 (n,), the token depth after the edge; `marked` bool (n,), whether an
    entry ends there; `stamps` int64 (n,), when it was last used, never later than its parent; `tokens` uint32 and
    `values` int32, those of all edges, one after the other.
    """
    cdef NodeTable table = trie.table
    cdef int32_t id, top
    cdef Py_ssize_t n = 0, room = table.used - table.num_free, num_tokens = 0, num_values = 0, length, number
    root_numbers, parents, ends, stamps = (np.empty(room, np.int64) for _ in range(4))
    marked, place = np.empty(room, bool), np.empty(table.used, np.int64)
    tokens, values = np.empty(table.num_tokens, np.uint32), np.empty(table.num_pages, np.int32)
    cdef cnp.int64_t[::1] root_of = root_numbers, parent_of = parents, end_of = ends, stamp_of = stamps
    cdef cnp.int64_t[::1] place_of = place
    cdef cnp.uint8_t[::1] mark_of = marked.view(np.uint8)
    cdef uint32_t *text = uint32s(tokens)
    cdef int32_t *pages = int32s(values)
    cdef list tops = [trie.as_root(root) for root in roots]
    for number in range(len(tops)):
        top = tops[number]
        place_of[top] = -1
        id = node_after(table.nodes, top, top)
        while id >= 0:
            place_of[id] = n
            root_of[n], parent_of[n] = number, place_of[table.nodes[id].parent]
            end_of[n], stamp_of[n], mark_of[n] = table.nodes[id].end, table.nodes[id].stamp, table.nodes[id].marked
            length = table.nodes[id].end - table.nodes[id].begin
            memcpy(text + num_tokens, table.tokens(id), length * sizeof(uint32_t))
            num_tokens += length
            length = table.pages(id)
            if length:
                memcpy(pages + num_values, table.values(id), length * sizeof(int32_t))
            num_values += length
            n += 1
            id = node_after(table.nodes, id, top)
    return Edges(root_numbers[:n], parents[:n], ends[:n], marked[:n], stamps[:n], tokens[:num_tokens],
                 values[:num_values])
