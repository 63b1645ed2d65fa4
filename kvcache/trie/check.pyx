"""Every invariant of the trie's nodes: what `TokenTrie.check` verifies. O(nodes)."""

from libc.stdint cimport int32_t

from kvcache.trie.nodes cimport NodeTable, node_t


cdef int expect(bint holds, str invariant, object id) except -1:
    if not holds:
        raise AssertionError(f"trie: node {id}: {invariant}")
    return 0


cdef int check_node(NodeTable table, int32_t id) except -1:
    """A node by itself and against its parent."""
    cdef node_t* node = &table.nodes[id]
    cdef node_t* above = &table.nodes[node.parent]
    cdef bint leaf = node.child < 0
    expect(above.begin >= 0, "its parent is a free record", id)
    expect(node.begin == above.end and node.begin < node.end, "it does not begin where its parent ends", id)
    expect(node.head >= 0 and node.head + node.end - node.begin <= node.capacity, "its text is too short", id)
    expect(table.children.find(node.parent, table.tokens(id)[0]) == id, "the table of children does not find it", id)
    expect(not leaf or node.end % table.page_size == 0, "a leaf ends inside a page", id)
    expect(not node.marked or node.end % table.page_size == 0, "a mark lies inside a page", id)
    expect(node.stamp <= above.stamp, "it was used later than its parent", id)
    expect(table.leaves.has(id) == (leaf and node.pins == 0), "the candidates are not the unpinned leaves", id)
    if table.leaves.has(id):
        expect(table.leaves.items[table.leaves.place[id]].key == table.rank(id), "its rank is out of date", id)
    return 0


cdef int check_children(NodeTable table, int32_t id) except -1:
    """The list of children and its order."""
    cdef node_t* node = &table.nodes[id]
    cdef int32_t child = node.child, before = -1
    while child >= 0:
        expect(table.nodes[child].parent == id, "a child has another parent", id)
        expect(table.nodes[child].prev == before, "the list of children is broken", id)
        expect(before < 0 or table.nodes[before].stamp >= table.nodes[child].stamp, "a newer child comes later", id)
        before = child
        child = table.nodes[child].next
    expect(node.pins >= 0, "it was unpinned more often than pinned", id)
    return 0


cdef int check_totals(NodeTable table) except -1:
    """Free records, and the sums over all nodes."""
    cdef Py_ssize_t id, roots = 0, live = 0, pages = 0, tokens = 0, entries = 0, leaves = 0, num_free = 0
    cdef int32_t free_node = table.free_node
    while free_node >= 0:
        expect(table.nodes[free_node].begin < 0, "a free record is in use", free_node)
        num_free += 1
        free_node = table.nodes[free_node].parent
    for id in range(table.used):
        if table.nodes[id].begin < 0:
            continue
        live += 1
        roots += table.nodes[id].parent < 0
        pages += table.pages(<int32_t>id)
        tokens += table.nodes[id].end - table.nodes[id].begin
        entries += table.nodes[id].marked
        leaves += table.leaves.has(<int32_t>id)
    for name, held, counted in (
        ("free records", num_free, table.num_free),
        ("records", live + num_free, table.used),
        ("children", live - roots, table.children.count),
        ("pages", pages, table.num_pages),
        ("tokens", tokens, table.num_tokens),
        ("entries", entries, table.num_entries),
        ("candidates", leaves, table.leaves.size),
    ):
        if held != counted:
            raise AssertionError(f"trie: expected {held} {name}, counted {counted}")
    return 0


def check_nodes(NodeTable table not None):
    """AssertionError names the broken invariant, and the node where there is one."""
    cdef Py_ssize_t id
    check_totals(table)
    for id in range(table.used):
        if table.nodes[id].begin < 0:
            continue
        if table.nodes[id].parent >= 0:
            check_node(table, <int32_t>id)
        check_children(table, <int32_t>id)
    table.leaves.check()
