"""What is done on the path of a token sequence through the trie; see trie/paths.pxd. Nothing is checked here."""

from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcmp, memcpy

from kvcache.trie.nodes cimport NodeTable, node_after, node_t


cdef inline Py_ssize_t common_prefix(const uint32_t* a, const uint32_t* b, Py_ssize_t n) noexcept nogil:
    """Tokens before the first difference. memcmp passes over equal stretches at the speed of memory."""
    cdef Py_ssize_t i = 0
    while i + 1024 <= n and memcmp(a + i, b + i, 1024 * sizeof(uint32_t)) == 0:
        i += 1024
    while i + 16 <= n and memcmp(a + i, b + i, 16 * sizeof(uint32_t)) == 0:
        i += 16
    while i < n and a[i] == b[i]:
        i += 1
    return i


cdef class TokenPaths(NodeTable):
    cdef walk_t walk(self, int32_t root, const uint32_t* tokens, Py_ssize_t n) noexcept nogil:
        cdef walk_t at = walk_t(node=root, length=0)
        cdef int32_t child
        cdef Py_ssize_t edge, same
        while at.length < n:
            child = self.children.find(at.node, tokens[at.length])
            if child < 0:
                break
            edge = self.nodes[child].end - self.nodes[child].begin
            same = common_prefix(self.tokens(child), tokens + at.length, min(edge, n - at.length))
            at.node = child
            at.length += same
            if same < edge:
                break
        return at

    cdef void gather(self, walk_t at, int32_t* out) noexcept nogil:
        cdef int32_t id = at.node
        cdef Py_ssize_t first, last = at.length // self.page_size
        while last > 0:
            first = self.nodes[id].begin // self.page_size
            memcpy(out + first, self.values(id), (last - first) * sizeof(int32_t))
            last = first
            id = self.nodes[id].parent

    cdef int32_t partial(self, walk_t at) noexcept nogil:
        cdef int32_t id = at.node
        cdef Py_ssize_t page = at.length // self.page_size
        if at.length % self.page_size == 0:
            return -1
        while self.nodes[id].end < (page + 1) * self.page_size:
            id = self.nodes[id].child
        return self.values(id)[page - self.nodes[id].begin // self.page_size]

    cdef int32_t put(
        self, int32_t root, const uint32_t* tokens, Py_ssize_t n, const int32_t* values, Py_ssize_t* existing
    ) except -1 nogil:
        cdef walk_t at = self.walk(root, tokens, n)
        cdef int32_t id = at.node, upper, above
        cdef node_t* node
        existing[0] = at.length // self.page_size
        if at.length < self.nodes[id].end:
            id = self.split(id, at.length)
        if at.length < n:
            node = &self.nodes[id]
            tokens += at.length
            values += existing[0]
            if node.parent >= 0 and node.child < 0 and node.pins == 0 and not node.marked and node.uses == 0:
                self.extend(id, tokens, n, values)
            else:
                id = self.attach(id, tokens, n, values)
        self.stamp_path(id)
        # The path was walked token by token, so joining what is no fork any more costs no more than that.
        upper = self.nodes[id].parent
        while upper >= 0:
            above = self.nodes[upper].parent
            self.join(upper, n)
            upper = above
        return id

    cdef Py_ssize_t free_pages(self, Py_ssize_t count, int32_t* out) noexcept nogil:
        cdef Py_ssize_t freed = 0, pages
        cdef int32_t leaf = self.leaves.top(), waiting = -1
        cdef bint keep
        while freed < count and leaf >= 0:
            keep = self.guarded(leaf)
            pages = min(count - freed, self.pages(leaf) - keep)
            if pages > 0:
                self.shrink(leaf, pages, out + freed)
                freed += pages
            if keep and freed < count:
                # Nothing more to take here as long as the pin above lasts; it comes back after this call.
                self.leaves.drop(leaf)
                self.nodes[leaf].queue = waiting
                waiting = leaf
            leaf = self.leaves.top()
        while waiting >= 0:
            self.list_leaf(waiting)
            waiting = self.nodes[waiting].queue
        return freed

    cdef Py_ssize_t cut(self, int32_t leaf, int32_t* out) noexcept nogil:
        cdef Py_ssize_t freed = 0, pages
        cdef bint keep = False
        while leaf >= 0 and not keep and self.nodes[leaf].pins == 0 and not self.nodes[leaf].marked:
            keep = self.guarded(leaf)
            pages = self.pages(leaf) - keep
            if pages > 0:
                leaf = self.shrink(leaf, pages, out + freed)
                freed += pages
        return freed

    cdef int32_t at_depth(self, int32_t id, Py_ssize_t depth) except -1 nogil:
        while depth <= self.nodes[id].begin and self.nodes[id].parent >= 0:
            id = self.nodes[id].parent
        return self.split(id, depth) if depth < self.nodes[id].end else id

    cdef Py_ssize_t collect(self, int32_t top, int32_t* out) noexcept nogil:
        cdef int32_t id = top
        cdef Py_ssize_t count = 0
        while id >= 0:
            if self.pages(id) > 0:  # a root has no text, and memcpy takes no NULL, not even for nothing
                memcpy(out + count, self.values(id), self.pages(id) * sizeof(int32_t))
                count += self.pages(id)
            id = node_after(self.nodes, id, top)
        return count

    cdef void _empty(self, int32_t top) noexcept nogil:
        """Leave `top`, a root, empty; pins and marks do not count."""
        cdef int32_t id = top, parent
        while True:
            while self.nodes[id].child >= 0:
                id = self.nodes[id].child
            if id == top:
                break
            parent = self.nodes[id].parent
            self.num_entries -= self.nodes[id].marked
            self.num_pages -= self.pages(id)
            self.trim(id, self.nodes[id].begin)
            id = parent
        self.nodes[top].pins = 0
