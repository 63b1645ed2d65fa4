"""Verbs along the path of a token sequence through the trie; see trie/paths.pxd."""

from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcmp, memcpy

from kvcache.trie.nodes cimport NodeTable, node_after, node_t

cdef uint32_t FILLER = 0xFFFFFFFF    # behind the end of a text in its last page; no vocabulary has it


cdef inline Py_ssize_t common_prefix(const uint32_t* a, const uint32_t* b, Py_ssize_t n) noexcept nogil:
    """Tokens before the first difference. memcmp compares equal stretches at the speed of memory."""
    cdef Py_ssize_t i = 0
    while i + 1024 <= n and memcmp(a + i, b + i, 1024 * sizeof(uint32_t)) == 0:
        i += 1024
    while i + 16 <= n and memcmp(a + i, b + i, 16 * sizeof(uint32_t)) == 0:
        i += 16
    while i < n and a[i] == b[i]:
        i += 1
    return i


cdef walk_t walk(NodeTable table, int32_t root, const uint32_t* tokens, Py_ssize_t n) noexcept nogil:
    cdef walk_t at = walk_t(node=root, length=0)
    cdef int32_t child
    cdef Py_ssize_t edge, same
    while at.length < n:
        child = table.children.find(at.node, tokens[at.length])
        if child < 0:
            break
        edge = table.nodes[child].end - table.nodes[child].begin
        same = common_prefix(table.tokens(child), tokens + at.length, min(edge, n - at.length))
        at.node = child
        at.length += same
        if same < edge:
            break
    return at


cdef void gather(NodeTable table, walk_t at, int32_t* out) noexcept nogil:
    cdef int32_t id = at.node
    cdef Py_ssize_t first, last = at.length // table.page_size
    while last > 0:
        first = table.nodes[id].begin // table.page_size
        memcpy(out + first, table.values(id), (last - first) * sizeof(int32_t))
        last = first
        id = table.nodes[id].parent


cdef int32_t partial(NodeTable table, walk_t at) noexcept nogil:
    cdef int32_t id = at.node
    cdef Py_ssize_t page = at.length // table.page_size
    if at.length % table.page_size == 0:
        return -1
    while table.nodes[id].end < (page + 1) * table.page_size:
        id = table.nodes[id].child
    return table.values(id)[page - table.nodes[id].begin // table.page_size]


cdef int32_t put(NodeTable table, int32_t root, const uint32_t* tokens, Py_ssize_t n, const int32_t* values,
                 Py_ssize_t* existing) except -1 nogil:
    cdef walk_t at = walk(table, root, tokens, n)
    cdef int32_t id = at.node, upper, above
    cdef node_t* node
    existing[0] = at.length // table.page_size
    if at.length < table.nodes[id].end:
        id = table.split(id, at.length)
    if at.length < n:
        node = &table.nodes[id]
        tokens += at.length
        values += existing[0]
        if node.parent >= 0 and node.child < 0 and node.pins == 0 and not node.marked and node.uses == 0:
            table.extend(id, tokens, n, values)
        else:
            id = table.attach(id, tokens, n, values)
    table.stamp_path(id)
    # Joining forks that are none any more copies tokens of this path, which the walk has compared: no higher cost.
    upper = table.nodes[id].parent
    while upper >= 0:
        above = table.nodes[upper].parent
        table.join(upper, n)
        upper = above
    return id


cdef Py_ssize_t free_pages(NodeTable table, Py_ssize_t count, int32_t* out) noexcept nogil:
    cdef Py_ssize_t freed = 0, pages
    cdef int32_t leaf = table.leaves.top(), skipped = -1
    cdef bint keep
    while freed < count and leaf >= 0:
        keep = table.completes_pin(leaf)
        pages = min(count - freed, table.pages(leaf) - keep)
        if pages > 0:
            table.shrink(leaf, pages, out + freed)
            freed += pages
        if keep and freed < count:
            # The leaf's first page completes a pinned node. The leaf is no candidate until the end of this call.
            table.leaves.drop(leaf)
            table.nodes[leaf].queue = skipped
            skipped = leaf
        leaf = table.leaves.top()
    while skipped >= 0:
        table.list_leaf(skipped)
        skipped = table.nodes[skipped].queue
    return freed


cdef Py_ssize_t cut(NodeTable table, int32_t leaf, int32_t* out) noexcept nogil:
    cdef Py_ssize_t freed = 0, pages
    cdef bint keep = table.nodes[leaf].child >= 0
    table.mark(leaf, False)
    while leaf >= 0 and not keep and table.nodes[leaf].pins == 0 and not table.nodes[leaf].marked:
        keep = table.completes_pin(leaf)
        pages = table.pages(leaf) - keep
        if pages > 0:
            leaf = table.shrink(leaf, pages, out + freed)
            freed += pages
    return freed


cdef int32_t at_depth(NodeTable table, int32_t id, Py_ssize_t depth) except -1 nogil:
    while depth <= table.nodes[id].begin and table.nodes[id].parent >= 0:
        id = table.nodes[id].parent
    return table.split(id, depth) if depth < table.nodes[id].end else id


cdef Py_ssize_t prune(NodeTable table, int32_t id, int32_t* out) noexcept nogil:
    cdef Py_ssize_t freed = 0, pages
    cdef int32_t leaf
    table.nodes[id].pins += 1    # so that nothing is joined with it meanwhile
    while table.nodes[id].child >= 0:
        leaf = id
        while table.nodes[leaf].child >= 0:
            leaf = table.nodes[leaf].child
        pages = table.pages(leaf)
        table.shrink(leaf, pages, out + freed)
        freed += pages
    table.nodes[id].pins -= 1
    table.list_leaf(id)
    table.shrink(id, 1, out + freed)
    return freed + 1


cdef inline bint ends_text(NodeTable table, int32_t id) noexcept nogil:
    """Whether a node is the page in which a text ends with fewer tokens, behind which there are fillers."""
    cdef const node_t* node = &table.nodes[id]
    cdef int32_t size = node.end - node.begin
    return node.child < 0 and size <= table.page_size and table.tokens(id)[size - 1] == FILLER


cdef int32_t only_child(NodeTable table, int32_t id) noexcept nogil:
    """The child of a node beside the ends of texts; -1: there is none, -2: there are several."""
    cdef int32_t child = table.nodes[id].child, found = -1
    while child >= 0:
        if not ends_text(table, child):
            if found >= 0:
                return -2
            found = child
        child = table.nodes[child].next
    return found


cdef int32_t own(NodeTable table, walk_t at, Py_ssize_t n, Py_ssize_t keep, int32_t* low) except -2:
    cdef int32_t id = at.node, child, top, upper
    cdef const node_t* node = &table.nodes[id]
    if node.parent < 0:
        return -1
    if at.length < n and at.length < node.end and table.tokens(id)[at.length - node.begin] != FILLER:
        return -1    # it is another text that goes on here
    child = only_child(table, id)
    while child != -1:
        if child == -2 or at.length < n:
            return -1
        id, child = child, only_child(table, child)
    low[0] = top = id
    upper = table.nodes[top].parent
    while table.nodes[upper].parent >= 0:
        child = only_child(table, upper)
        if child != top and child != -1:
            break
        top, upper = upper, table.nodes[upper].parent
    if keep > table.nodes[top].begin:
        if keep >= table.nodes[id].end:
            return -1
        upper = at_depth(table, id, keep)
        top = id
        while table.nodes[top].parent != upper:
            top = table.nodes[top].parent
    return top


cdef Py_ssize_t collect(NodeTable table, int32_t top, int32_t* out) noexcept nogil:
    cdef int32_t id = top
    cdef Py_ssize_t count = 0
    while id >= 0:
        if table.pages(id) > 0:  # a root has no text, and memcpy accepts no NULL, not even for 0 bytes
            memcpy(out + count, table.values(id), table.pages(id) * sizeof(int32_t))
            count += table.pages(id)
        id = node_after(table.nodes, id, top)
    return count
