"""The token trie: checked arguments, arrays in and out. The nodes are drawn in trie/nodes.pxd."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy

from kvcache.support.token_ids cimport int32_values, int32s, uint32_tokens, uint32s
from kvcache.trie cimport paths
from kvcache.trie.nodes cimport NodeTable, node_t
from kvcache.trie.paths cimport walk_t
from kvcache.trie.policy cimport Policy

from kvcache.errors import InvalidOperationError
from kvcache.trie.check import check_nodes

cnp.import_array()


cdef inline cnp.ndarray new_values(Py_ssize_t n):
    cdef cnp.npy_intp size = n
    return cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT32, 0)


cdef class TokenTrie:
    """A radix tree from token sequences to the pages that cache them, exact to the token.

    Every `page_size` tokens (1 to 256) have one int32 value, for example a block id. Tokens are one-dimensional
    integers in [0, 2**32); uint32 arrays are read without a copy. Each root is a namespace of its own.

    A node id comes from `match`, `lookup` or `insert` and is valid until the next call that changes the trie; an id
    that is pinned or marked is valid until it is unpinned or unmarked.
    Calls take microseconds and hold the GIL, or are critical sections where there is none, so they are atomic. After
    the radix cache of SGLang (Zheng et al., 2024, arXiv:2312.07104), with exact matches inside pages and eviction in
    O(log n).
    """

    def __cinit__(self, Py_ssize_t page_size=1, Policy policy=None):
        self.table = NodeTable(page_size, policy)

    cdef int32_t _node(self, object node) except -1:
        cdef Py_ssize_t id = node
        if not 0 <= id < self.table.used or self.table.nodes[id].begin < 0:
            raise ValueError(f"node: expected the id of a node in the trie, got {node}")
        return <int32_t>id

    cdef int32_t as_root(self, object root) except -1:
        cdef Py_ssize_t id = root
        if not self.table.is_root(id):
            raise ValueError(f"root: expected the id of a root, got {root}")
        return <int32_t>id

    cdef Py_ssize_t _depth(self, int32_t id, object length) except -1:
        """`length`, rounded down to full pages; by default the depth of `id`, which is the most."""
        cdef Py_ssize_t end = self.table.nodes[id].end, depth = end if length is None else length
        if not 0 <= depth <= end:
            raise ValueError(f"length: expected 0 to {end}, got {length}")
        return depth if length is None else depth - depth % self.table.page_size

    cdef walk_t walk(self, int32_t root, const uint32_t* tokens, Py_ssize_t n) noexcept nogil:
        return paths.walk(self.table, root, tokens, n)

    cdef void gather(self, walk_t at, int32_t* out) noexcept nogil:
        paths.gather(self.table, at, out)

    cdef int32_t partial(self, walk_t at) noexcept nogil:
        return paths.partial(self.table, at)

    cdef int32_t put(self, int32_t root, const uint32_t* tokens, Py_ssize_t n, const int32_t* values,
                     Py_ssize_t* existing) except -1 nogil:
        return paths.put(self.table, root, tokens, n, values, existing)

    cdef Py_ssize_t free_pages(self, Py_ssize_t count, int32_t* out) noexcept nogil:
        return paths.free_pages(self.table, count, out)

    cdef Py_ssize_t cut(self, int32_t leaf, int32_t* out) noexcept nogil:
        return paths.cut(self.table, leaf, out)

    cdef int32_t at_depth(self, int32_t id, Py_ssize_t depth) except -1 nogil:
        return paths.at_depth(self.table, id, depth)

    @cython.critical_section
    def add_root(self):
        """A new, empty namespace; returns its root's id."""
        return self.table.new_root()

    @cython.critical_section
    def match(self, root, tokens):
        """`(node, length)`: the longest cached prefix of `tokens`, to the token, and the node it ends in."""
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef walk_t at = self.walk(self.as_root(root), uint32s(ids), ids.shape[0])
        return at.node, at.length

    @cython.critical_section
    def lookup(self, root, tokens):
        """`(node, length, values, partial)`: a match and its pages.

        `values` is int32, shape (length // page_size,), one for each full page. If the match ends inside a
        page, `partial` is the value of one page that begins with these tokens, else -1.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef walk_t at = self.walk(self.as_root(root), uint32s(ids), ids.shape[0])
        cdef cnp.ndarray values = new_values(at.length // self.table.page_size)
        self.gather(at, int32s(values))
        return at.node, at.length, values, self.partial(at)

    def insert(self, root, tokens, values):
        """`(node, num_existing_pages)`: cache `tokens`, a multiple of the page size, with a value per page.

        Pages that are cached already keep their value: the first `num_existing_pages` of `values` are not used.
        `node` ends exactly after the tokens. Counts as a use of the whole path. ValueError if the lengths do not fit.
        """
        cdef int32_t id
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef cnp.ndarray pages = int32_values(values)
        cdef Py_ssize_t n = ids.shape[0], size = self.table.page_size, existing = 0
        if n % size:
            raise ValueError(f"tokens: expected a multiple of {size}, got {n}")
        if pages.ndim != 1 or pages.shape[0] != n // size:
            raise ValueError(f"values: expected {n // size}, one per page, got shape {(<object>pages).shape}")
        with cython.critical_section(self):
            id = self.put(self.as_root(root), uint32s(ids), n, int32s(pages), &existing)
        return id, existing

    @cython.critical_section
    def boundary(self, node, length=None):
        """The node that ends with the last full page of the first `length` tokens on the way to `node`.

        The tokens after it have a node and a recency of their own, so a caller can pin the matched ones alone.
        """
        cdef int32_t id = self._node(node)
        return self.at_depth(id, self._depth(id, length))

    @cython.critical_section
    def touch(self, node, length=None):
        """Use `node` and all above it; with `length`, only as far as `boundary(node, length)`, which is returned."""
        cdef int32_t id = self._node(node)
        id = self.at_depth(id, self._depth(id, length))
        self.table.stamp_path(id)
        return id

    @cython.critical_section
    def pin(self, node):
        """Keep `node` and all above it, with their values, until `unpin(node)`. O(1).

        If the node ends inside a page, one page that completes it stays as well.
        """
        self.table.pin(self._node(node), 1)

    @cython.critical_section
    def unpin(self, node):
        """Undo one `pin(node)`. InvalidOperationError if the node is not pinned. O(1)."""
        cdef int32_t id = self._node(node)
        if self.table.nodes[id].pins == 0:
            raise InvalidOperationError(f"node: expected a pinned one, got {node} without pins")
        self.table.pin(id, -1)

    @cython.critical_section
    def evict(self, num_pages):
        """Free up to `num_pages` pages and return their values, int32, in the order in which they left.

        The least recently used leaf loses its pages first, from its tail; pinned nodes stay.
        """
        cdef Py_ssize_t count = num_pages
        if count < 0:
            raise ValueError(f"num_pages: expected 0 or more, got {num_pages}")
        cdef cnp.ndarray freed = new_values(min(count, self.table.num_pages))
        count = self.free_pages(freed.shape[0], int32s(freed))
        return freed if count == freed.shape[0] else freed[:count]

    @cython.critical_section
    def remove(self, root, tokens):
        """Forget `tokens` and free what no other cached sequence, mark or pin needs; returns the values.

        Only a sequence that ends here is forgotten: a mark at the last token, or a leaf.
        """
        cdef int32_t top = self.as_root(root)
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef walk_t at = self.walk(top, uint32s(ids), ids.shape[0])
        if at.length < ids.shape[0] or at.length < self.table.nodes[at.node].end or at.node == top:
            return new_values(0)
        return self.cut_of(at.node)

    @cython.critical_section
    def cut_leaf(self, node):
        """Unmark `node` and, if it is a leaf, free what only its sequence needs; the values, last first."""
        return self.cut_of(self._node(node))

    cdef object cut_of(self, int32_t id):
        cdef cnp.ndarray freed = new_values(self.table.nodes[id].end // self.table.page_size)
        return freed[: self.cut(id, int32s(freed))]

    @cython.critical_section
    def prune(self, root, tokens):
        """Forget every sequence that begins with `tokens`, a multiple of the page size and not empty.

        The values of the last page of `tokens` and of all that follows it, int32; none if they are not cached.
        The pages before stay. Ignores pins and marks.
        """
        cdef int32_t top = self.as_root(root)
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef Py_ssize_t n = ids.shape[0]
        if n == 0 or n % self.table.page_size:
            raise ValueError(f"tokens: expected a multiple of {self.table.page_size}, at least one, got {n}")
        cdef walk_t at = self.walk(top, uint32s(ids), n)
        if at.length < n:
            return new_values(0)
        cdef cnp.ndarray freed = new_values(self.table.num_pages)
        return freed[: paths.prune(self.table, self.at_depth(at.node, n), int32s(freed))]

    @cython.critical_section
    def roots(self):
        """The ids of all roots, ascending."""
        return [id for id in range(self.table.used) if self.table.is_root(id)]

    @cython.critical_section
    def leaf_ids(self):
        """The ids of all leaves, ascending; each is the end of one cached sequence."""
        cdef node_t* nodes = self.table.nodes
        cdef Py_ssize_t id
        return [id for id in range(self.table.used) if nodes[id].begin > -1 < nodes[id].parent and nodes[id].child < 0]

    @cython.critical_section
    def path(self, node):
        """`(root, tokens, values)`: the sequence that ends with `node`, uint32 and int32."""
        cdef int32_t id = self._node(node)
        cdef cnp.npy_intp n = self.table.nodes[id].end
        cdef cnp.ndarray tokens = cnp.PyArray_EMPTY(1, &n, cnp.NPY_UINT32, 0)
        cdef cnp.ndarray values = new_values(n // self.table.page_size)
        self.gather(walk_t(node=id, length=n), int32s(values))
        while self.table.nodes[id].parent >= 0:
            n = self.table.nodes[id].begin
            memcpy(uint32s(tokens) + n, self.table.tokens(id), (self.table.nodes[id].end - n) * sizeof(uint32_t))
            id = self.table.nodes[id].parent
        return id, tokens, values

    def all_values(self, root):
        """All values below `root`, int32, in no particular order."""
        cdef cnp.ndarray values
        cdef Py_ssize_t count
        with cython.critical_section(self):
            values = new_values(self.table.num_pages)
            count = paths.collect(self.table, self.as_root(root), int32s(values))
        return values[:count].copy()

    @cython.critical_section
    def num_pins(self, node):
        """Pins on `node` itself."""
        return self.table.nodes[self._node(node)].pins

    @property
    def total_pins(self):
        """Pins on all nodes."""
        cdef Py_ssize_t id, total = 0
        with cython.critical_section(self):
            for id in range(self.table.used):
                total += self.table.nodes[id].pins if self.table.nodes[id].begin >= 0 else 0
        return total

    @property
    def page_size(self):
        """Tokens per page."""
        return self.table.page_size

    @property
    def num_pages(self):
        """Pages cached."""
        return self.table.num_pages

    @property
    def num_tokens(self):
        """Tokens cached, those of a shared prefix once."""
        return self.table.num_tokens

    @property
    def num_entries(self):
        """Nodes marked."""
        return self.table.num_entries

    @property
    def num_nodes(self):
        """Nodes in use, roots included."""
        with cython.critical_section(self):
            return self.table.used - self.table.num_free

    @property
    def nbytes(self):
        """Bytes of memory that the trie takes: records, tokens, values, children and candidates for eviction."""
        with cython.critical_section(self):
            return self.table.nbytes()

    def __len__(self):
        return self.table.num_pages

    @cython.critical_section
    def check(self):
        """Verify every invariant; AssertionError names the broken one."""
        check_nodes(self.table)
