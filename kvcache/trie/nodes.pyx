"""The nodes of the token trie: records, texts, links, changes of shape; drawn in trie/nodes.pxd."""

from libc.stdint cimport int32_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from kvcache.core.heap cimport IndexedHeap
from kvcache.trie.children cimport ChildTable, child_slot
from kvcache.trie.policy cimport Policy

cdef enum:
    MAX_NODES = 0x7FFFFFF0
    MAX_JOIN = 1024       # most tokens that an eviction copies to join the two nodes of a former fork


cdef class NodeTable:
    """The nodes of one trie, below `TokenTrie`: nothing is checked here but the page size."""

    def __cinit__(self, Py_ssize_t page_size=1, Policy policy=None):
        if not 1 <= page_size <= 256:
            raise ValueError(f"page_size: expected 1 to 256, got {page_size}")
        self.page_size = <int32_t>page_size
        self.free_node = -1
        self.policy = Policy() if policy is None else policy
        self.children = ChildTable()
        self.leaves = IndexedHeap()

    def __dealloc__(self):
        cdef Py_ssize_t id
        for id in range(self.used):
            if self.nodes[id].begin >= 0:
                free(self.nodes[id].text)
        free(self.nodes)

    cdef int reserve(self, Py_ssize_t extra) except -1 nogil:
        cdef Py_ssize_t room = self.capacity
        cdef node_t* grown
        if self.used - self.num_free + extra > self.capacity:
            room = max(self.capacity + self.capacity // 4, self.used - self.num_free + extra, 16)
            if room > MAX_NODES:
                raise MemoryError(f"expected at most {MAX_NODES} nodes, got {room}")
            grown = <node_t*>realloc(self.nodes, room * sizeof(node_t))
            if grown is NULL:
                raise MemoryError(f"no memory for {room} nodes")
            self.nodes = grown
            self.capacity = room
        self.leaves.reserve(self.capacity)
        self.children.reserve(extra)
        return 0

    cdef int32_t take(self) noexcept nogil:
        cdef int32_t id = self.free_node
        if id >= 0:
            self.free_node = self.nodes[id].parent
            self.num_free -= 1
        else:
            id = <int32_t>self.used
            self.used += 1
        self.nodes[id] = node_t(text=NULL, stamp=0, begin=0, end=0, head=0, capacity=0, parent=-1, child=-1, prev=-1,
                                next=-1, pins=0, marked=0, queue=-1, uses=0)
        return id

    cdef void give(self, int32_t id) noexcept nogil:
        cdef node_t* node = &self.nodes[id]
        self.text_bytes -= text_size(self.page_size, node.begin - node.head, node.capacity)
        free(node.text)
        node.text, node.begin, node.parent = NULL, -1, self.free_node
        self.free_node = id
        self.num_free += 1

    cdef bint is_root(self, Py_ssize_t id) noexcept nogil:
        return 0 <= id < self.used and self.nodes[id].begin >= 0 and self.nodes[id].parent < 0

    cdef Py_ssize_t nbytes(self) except -1:
        """Bytes of memory that the records, texts, children and candidates for eviction take."""
        cdef size_t records = self.capacity * sizeof(node_t), children = self.children.num_slots * sizeof(child_slot)
        return records + children + self.text_bytes + self.leaves.nbytes

    # ------------------------------------------------------------------ texts

    cdef uint32_t* tokens(self, int32_t id) noexcept nogil:
        return self.nodes[id].text + self.nodes[id].head

    cdef int32_t* values(self, int32_t id) noexcept nogil:
        cdef node_t* node = &self.nodes[id]
        cdef Py_ssize_t moved = 0    # values at the front that moved to upper halves
        if node.head > 0:
            moved = node.begin // self.page_size - (node.begin - node.head) // self.page_size
        return <int32_t*>(node.text + node.capacity) + moved

    cdef Py_ssize_t pages(self, int32_t id) noexcept nogil:
        return self.nodes[id].end // self.page_size - self.nodes[id].begin // self.page_size

    cdef int32_t new_node(self, Py_ssize_t begin, Py_ssize_t end) except -1 nogil:
        """A record with room for the tokens at depths [begin, end), linked to nothing."""
        self.reserve(1)
        cdef uint32_t* text = self.new_text(begin, end)
        if text is NULL:
            raise MemoryError(f"no memory for {end - begin} tokens")
        cdef int32_t id = self.take()
        cdef node_t* node = &self.nodes[id]
        node.text, node.begin, node.end, node.capacity = text, <int32_t>begin, <int32_t>end, <int32_t>(end - begin)
        return id

    cdef uint32_t* new_text(self, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
        cdef uint32_t* text = <uint32_t*>malloc(text_size(self.page_size, begin, end - begin))
        if text is not NULL:
            self.text_bytes += text_size(self.page_size, begin, end - begin)
        return text

    cdef bint retext(self, int32_t id, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
        """Move the node's text to one with room for exactly the depths [begin, end); False if there is no memory."""
        cdef uint32_t* text = self.new_text(begin, end)
        cdef node_t* node = &self.nodes[id]
        cdef Py_ssize_t page = node.begin // self.page_size - begin // self.page_size
        cdef int32_t* values
        if text is NULL:
            return False
        values = <int32_t*>(text + (end - begin)) + page
        memcpy(text + (node.begin - begin), self.tokens(id), (node.end - node.begin) * sizeof(uint32_t))
        memcpy(values, self.values(id), self.pages(id) * sizeof(int32_t))
        self.text_bytes -= text_size(self.page_size, node.begin - node.head, node.capacity)
        free(node.text)
        node.text, node.head, node.capacity = text, <int32_t>(node.begin - begin), <int32_t>(end - begin)
        return True

    cdef void compact(self, int32_t id) noexcept nogil:
        """Release memory once half of it is unused: on average, what is copied is no more than what was removed."""
        cdef node_t* node = &self.nodes[id]
        if 2 * (node.end - node.begin) < node.capacity:
            self.retext(id, node.begin, node.end)    # without memory the larger text stays

    cdef void enlist(self, int32_t id, int32_t parent) noexcept nogil:
        """Link `id` under `parent`, as its newest child."""
        cdef int32_t first = self.nodes[parent].child
        self.nodes[id].parent, self.nodes[id].prev, self.nodes[id].next = parent, -1, first
        if first >= 0:
            self.nodes[first].prev = id
        self.nodes[parent].child = id

    cdef void delist(self, int32_t id) noexcept nogil:
        cdef node_t* node = &self.nodes[id]
        if node.prev >= 0:
            self.nodes[node.prev].next = node.next
        else:
            self.nodes[node.parent].child = node.next
        if node.next >= 0:
            self.nodes[node.next].prev = node.prev

    cdef void replace(self, int32_t old, int32_t new) noexcept nogil:
        """`new` takes the place of `old` among its siblings; both edges begin with the same token."""
        cdef node_t* node = &self.nodes[new]
        node.parent, node.prev, node.next = self.nodes[old].parent, self.nodes[old].prev, self.nodes[old].next
        if node.prev >= 0:
            self.nodes[node.prev].next = new
        else:
            self.nodes[node.parent].child = new
        if node.next >= 0:
            self.nodes[node.next].prev = new
        self.children.put(node.parent, self.tokens(new)[0], new)

    cdef int32_t new_root(self) except -1 nogil:
        self.reserve(1)
        return self.take()

    cdef int32_t split(self, int32_t id, Py_ssize_t depth) except -1 nogil:
        """Cut `id` at `depth`, strictly inside it; the new upper half is returned, `id` is the lower one."""
        cdef int32_t upper = self.new_node(self.nodes[id].begin, depth)
        cdef node_t* node = &self.nodes[id]
        cdef node_t* above = &self.nodes[upper]
        above.stamp = node.stamp
        above.uses = node.uses
        memcpy(self.tokens(upper), self.tokens(id), above.capacity * sizeof(uint32_t))
        memcpy(self.values(upper), self.values(id), self.pages(upper) * sizeof(int32_t))
        self.replace(id, upper)
        node.head += above.capacity
        node.begin = above.end
        self.enlist(id, upper)
        self.children.put(upper, self.tokens(id)[0], id)
        self.compact(id)
        return upper

    cdef void join(self, int32_t upper, Py_ssize_t max_tokens) noexcept nogil:
        """Undo a split that nothing needs any more: the only child receives the text of `upper`."""
        cdef node_t* above = &self.nodes[upper]
        cdef int32_t id = above.child
        cdef node_t* node
        if above.parent < 0 or id < 0 or above.pins or above.marked:
            return
        node = &self.nodes[id]
        if node.next >= 0 or node.stamp != above.stamp or node.uses != above.uses:
            return
        if node.end - above.begin > max_tokens:
            return
        if not self.retext(id, above.begin, node.end):
            return    # without memory two nodes stay
        self.children.drop(upper, self.tokens(id)[0])
        node.head, node.begin = 0, above.begin
        memcpy(self.tokens(id), self.tokens(upper), (above.end - above.begin) * sizeof(uint32_t))
        memcpy(self.values(id), self.values(upper), self.pages(upper) * sizeof(int32_t))
        self.replace(upper, id)
        self.give(upper)

    cdef int32_t attach(self, int32_t parent, const uint32_t* tokens, Py_ssize_t end,
                        const int32_t* values) except -1 nogil:
        """A new leaf below `parent` up to depth `end`; `tokens` and `values` begin with the leaf's first."""
        cdef Py_ssize_t begin = self.nodes[parent].end
        cdef int32_t id = self.new_node(begin, end)
        memcpy(self.tokens(id), tokens, (end - begin) * sizeof(uint32_t))
        memcpy(self.values(id), values, self.pages(id) * sizeof(int32_t))
        self.leaves.drop(parent)
        self.enlist(id, parent)
        self.children.put(parent, tokens[0], id)
        self.num_tokens += end - begin
        self.num_pages += self.pages(id)
        return id

    cdef int extend(self, int32_t leaf, const uint32_t* tokens, Py_ssize_t end,
                    const int32_t* values) except -1 nogil:
        """Lengthen `leaf` up to depth `end`; `tokens` and `values` begin after its last."""
        cdef Py_ssize_t length = end - self.nodes[leaf].end
        cdef Py_ssize_t pages = self.pages(leaf)
        if not self.retext(leaf, self.nodes[leaf].begin, end):
            raise MemoryError(f"no memory for {end - self.nodes[leaf].begin} tokens")
        memcpy(self.tokens(leaf) + (self.nodes[leaf].end - self.nodes[leaf].begin), tokens, length * sizeof(uint32_t))
        self.nodes[leaf].end = <int32_t>end
        memcpy(self.values(leaf) + pages, values, (self.pages(leaf) - pages) * sizeof(int32_t))
        self.num_tokens += length
        self.num_pages += self.pages(leaf) - pages
        return 0

    cdef int32_t shrink(self, int32_t leaf, Py_ssize_t count, int32_t* out) noexcept nogil:
        """Move the values of the last `count` pages to `out`, last first; a leaf without pages vanishes.

        Returns the node that now is the leaf: itself, the one above that has become it, or -1 if none has.
        """
        cdef node_t* node = &self.nodes[leaf]
        cdef Py_ssize_t i, pages = self.pages(leaf)
        cdef const int32_t* values = self.values(leaf)
        cdef int32_t parent = node.parent
        cdef int32_t end = node.end - <int32_t>(count * self.page_size)
        for i in range(count):
            out[i] = values[pages - 1 - i]
        self.num_pages -= count
        self.num_entries -= node.marked
        node.marked = 0
        self.trim(leaf, end)
        return leaf if count < pages else self.trim_up(parent)

    cdef void trim(self, int32_t leaf, int32_t end) noexcept nogil:
        """Cut the leaf's tokens back to depth `end`; it vanishes if none remain."""
        cdef node_t* node = &self.nodes[leaf]
        if end > node.begin:
            self.num_tokens -= node.end - end
            node.end = end
            self.compact(leaf)
            return
        self.num_tokens -= node.end - node.begin
        self.leaves.drop(leaf)
        self.children.drop(node.parent, self.tokens(leaf)[0])
        self.delist(leaf)
        self.give(leaf)

    cdef int32_t trim_up(self, int32_t id) noexcept nogil:
        """After a child of `id` has vanished: a new leaf is trimmed to a page boundary, one without pages vanishes.

        Returns the new leaf, or -1 if there is none.
        """
        cdef int32_t parent, end
        while self.nodes[id].child < 0 and self.nodes[id].parent >= 0:
            parent = self.nodes[id].parent
            end = self.nodes[id].end - self.nodes[id].end % self.page_size
            if end > self.nodes[id].begin:
                self.trim(id, end)
                self.list_leaf(id)
                return id
            self.trim(id, end)
            id = parent
        self.join(id, MAX_JOIN)
        return -1

    cdef bint completes_pin(self, int32_t leaf) noexcept nogil:
        """Whether a pinned node ends inside the leaf's first page and no other node completes that page."""
        cdef int32_t id = leaf
        cdef int32_t boundary = self.nodes[leaf].begin - self.nodes[leaf].begin % self.page_size
        while self.nodes[id].begin > boundary and self.nodes[id].prev < 0 and self.nodes[id].next < 0:
            id = self.nodes[id].parent
            if self.nodes[id].pins > 0:
                return True
        return False

    # ------------------------------------------------------------------ pins, marks, order

    cdef void pin(self, int32_t id, int32_t change) noexcept nogil:
        self.nodes[id].pins += change
        self.list_leaf(id)

    cdef bint mark(self, int32_t id, bint marked) noexcept nogil:
        """Set or clear the mark; whether that changed it."""
        cdef int32_t change = marked - self.nodes[id].marked
        self.nodes[id].marked = marked
        self.num_entries += change
        return change != 0

    cdef double rank(self, int32_t id) noexcept nogil:
        return self.policy.rank(self.nodes[id].stamp, self.nodes[id].uses)

    cdef void list_leaf(self, int32_t id) noexcept nogil:
        """Make `id` a candidate for eviction if it is an unpinned leaf, else none."""
        if self.nodes[id].child < 0 and self.nodes[id].pins == 0 and self.nodes[id].parent >= 0:
            self.leaves.put(id, self.rank(id))
        else:
            self.leaves.drop(id)

    cdef void stamp_path(self, int32_t id) noexcept nogil:
        """Stamp `id` and all above it with a new time, each as the newest child of its parent."""
        cdef int32_t leaf = id
        self.clock += 1
        while id >= 0:
            self.nodes[id].stamp = self.clock
            self.nodes[id].uses += self.policy.counts and self.nodes[id].uses < 0x7FFFFFFF
            if self.nodes[id].prev >= 0:
                self.delist(id)
                self.enlist(id, self.nodes[id].parent)
            id = self.nodes[id].parent
        self.list_leaf(leaf)

    cdef void sink(self, int32_t top) noexcept nogil:
        """Stamp `top` and all below it as never used, `top` as the oldest child of its parent."""
        cdef int32_t id = top, last = top
        while id >= 0:
            self.nodes[id].stamp = self.nodes[id].uses = 0
            self.list_leaf(id)
            id = node_after(self.nodes, id, top)
        while self.nodes[last].next >= 0:
            last = self.nodes[last].next
        if last != top:
            self.delist(top)
            self.nodes[top].prev, self.nodes[top].next, self.nodes[last].next = last, -1, top


cdef inline Py_ssize_t text_size(Py_ssize_t page_size, Py_ssize_t begin, Py_ssize_t capacity) noexcept nogil:
    """Bytes of a text for `capacity` tokens from depth `begin` on, with the values of the pages that end there."""
    cdef Py_ssize_t pages = (begin + capacity) // page_size - begin // page_size
    return capacity * sizeof(uint32_t) + pages * sizeof(int32_t)
