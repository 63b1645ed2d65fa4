"""The shell of the token trie: checks, arrays in and out; see trie/trie.pxd and, for the drawing, trie/nodes.pxd."""

cimport numpy as cnp
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy

from kvcache.trie.nodes cimport node_t
from kvcache.trie.paths cimport TokenPaths, walk_t
from kvcache.core.tokens cimport uint32_tokens
from kvcache.trie.check cimport check_nodes

import numpy as np

from kvcache.errors import InvalidOperationError

cnp.import_array()


cdef inline cnp.ndarray new_values(Py_ssize_t n):
    cdef cnp.npy_intp size = n
    return cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT32, 0)


cdef inline int32_t* int32s(cnp.ndarray array) noexcept:
    return <int32_t*>cnp.PyArray_DATA(array)


cdef cnp.ndarray int32_values(object values):
    """Values as a C-contiguous int32 array; without a copy where they are one."""
    cdef cnp.ndarray array
    if (
        isinstance(values, cnp.ndarray)
        and cnp.PyArray_TYPE(<cnp.ndarray>values) == cnp.NPY_INT32
        and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>values)
    ):
        return values
    array = np.asarray(values)
    if array.size == 0:
        return new_values(0)
    if array.dtype.kind not in "iu":
        raise TypeError(f"expected integers as values, got dtype {array.dtype}")
    if array.dtype != np.int32 and not (array.min() >= -(2**31) and array.max() < 2**31):
        raise ValueError(f"expected values in [-2**31, 2**31), got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int32)


cdef class TokenTrie(TokenPaths):
    """A radix tree from token sequences to the pages that cache them, exact to the token.

    Every `page_size` tokens (1 to 256) carry one int32 value, say a block id. Tokens are any one-dimensional
    integers in [0, 2**32); uint32 arrays are read without a copy. Several roots keep namespaces apart.

    A node id comes from `match`, `lookup` or `insert` and is good until the next call that changes the trie;
    while it is pinned or marked, until it is unpinned or unmarked (`drop_root` and `clear` void all). Calls take
    microseconds and hold the GIL, which makes them atomic. After the radix cache of SGLang (Zheng et
    al., 2024, arXiv:2312.07104), with exact matches inside pages and eviction in O(log n).
    """

    cdef int32_t _node(self, object node) except -1:
        cdef Py_ssize_t id = node
        if not 0 <= id < self.used or self.nodes[id].begin < 0:
            raise ValueError(f"expected the id of a node in the trie, got {node}")
        return <int32_t>id

    cdef int32_t _root(self, object root) except -1:
        cdef int32_t id = self._node(root)
        if self.nodes[id].parent >= 0:
            raise ValueError(f"expected the id of a root, got {root}")
        return id

    def add_root(self):
        """A new, empty namespace; returns its root's id."""
        return self.new_root()

    def match(self, root, tokens):
        """`(node, length)`: the longest cached prefix of `tokens`, to the token, and the node it ends in."""
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef walk_t at = self.walk(self._root(root), <uint32_t*>cnp.PyArray_DATA(ids), ids.shape[0])
        return at.node, at.length

    def lookup(self, root, tokens):
        """`(node, length, values, partial)`: a match and the pages behind it.

        `values` is int32, shape (length // page_size,), one for each full page. If the match ends inside a
        page, `partial` is the value of one page that begins with these tokens, else -1.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef walk_t at = self.walk(self._root(root), <uint32_t*>cnp.PyArray_DATA(ids), ids.shape[0])
        cdef cnp.ndarray values = new_values(at.length // self.page_size)
        self.gather(at, int32s(values))
        return at.node, at.length, values, self.partial(at)

    def insert(self, root, tokens, values):
        """`(node, num_existing_pages)`: cache `tokens`, a multiple of the page size, with a value per page.

        Pages that are there keep their value: the first `num_existing_pages` of `values` are the caller's to
        release. `node` ends exactly behind the tokens. Counts as a use of the whole path. ValueError if the
        lengths do not fit.
        """
        cdef int32_t top = self._root(root), id
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef cnp.ndarray pages = int32_values(values)
        cdef Py_ssize_t n = ids.shape[0], existing = 0
        if n % self.page_size:
            raise ValueError(f"expected a multiple of {self.page_size} tokens, got {n}")
        if pages.ndim != 1 or pages.shape[0] != n // self.page_size:
            raise ValueError(f"expected {n // self.page_size} values, one per page, got shape {(<object>pages).shape}")
        id = self.put(top, <uint32_t*>cnp.PyArray_DATA(ids), n, int32s(pages), &existing)
        return id, existing

    cdef Py_ssize_t _depth(self, int32_t id, object length) except -1:
        """A length on the way to `id`, rounded down to full pages; by default all of it."""
        cdef Py_ssize_t depth = self.nodes[id].end if length is None else length
        if not 0 <= depth <= self.nodes[id].end:
            raise ValueError(f"expected a length in [0, {self.nodes[id].end}], got {length}")
        return depth if length is None else depth - depth % self.page_size

    def boundary(self, node, length=None):
        """The node that ends with the last full page of the first `length` tokens on the way to `node`.

        What comes after keeps an id and a recency of its own. This is how to pin no more than what was matched.
        """
        cdef int32_t id = self._node(node)
        return self.at_depth(id, self._depth(id, length))

    def touch(self, node, length=None):
        """Use `node` and all above it; with `length`, only as far as `boundary(node, length)`, which is returned."""
        cdef int32_t id = self._node(node)
        id = self.at_depth(id, self._depth(id, length))
        self.stamp_path(id)
        return id

    def pin(self, node):
        """Keep `node` and all above it, with their values, until `unpin(node)`. O(1).

        If the node ends inside a page, one page that completes it stays as well.
        """
        cdef int32_t id = self._node(node)
        self.nodes[id].pins += 1
        self.list_leaf(id)

    def unpin(self, node):
        """Undo one `pin(node)`. InvalidOperationError if there is none. O(1)."""
        cdef int32_t id = self._node(node)
        if self.nodes[id].pins == 0:
            raise InvalidOperationError(f"expected a pinned node, got node {node} without pins")
        self.nodes[id].pins -= 1
        self.list_leaf(id)

    def repin(self, nodes):
        """`nodes` are pinned, each as often as it is named, and no others, whatever was pinned before. O(all nodes)."""
        cdef list ids = [self._node(node) for node in nodes]
        cdef int32_t id
        for id in range(<int32_t>self.used):
            if self.nodes[id].begin >= 0 and self.nodes[id].pins:
                self.nodes[id].pins = 0
                self.list_leaf(id)
        for id in ids:
            self.nodes[id].pins += 1
            self.list_leaf(id)

    def evict(self, num_pages):
        """Free up to `num_pages` pages and return their values, int32, in the order in which they left.

        The least recently used leaf goes first, from its tail page by page; pinned nodes stay.
        """
        cdef Py_ssize_t count = num_pages
        if count < 0:
            raise ValueError(f"expected a number of pages, got {num_pages}")
        cdef cnp.ndarray freed = new_values(min(count, self.num_pages))
        count = self.free_pages(freed.shape[0], int32s(freed))
        self.evicted += count
        return freed if count == freed.shape[0] else freed[:count]

    def remove(self, root, tokens):
        """Forget `tokens` and free what no other cached sequence, mark or pin needs; returns the values.

        Only a sequence that ends here is forgotten: a mark at the last token, or a leaf.
        """
        cdef int32_t top = self._root(root)
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef walk_t at = self.walk(top, <uint32_t*>cnp.PyArray_DATA(ids), ids.shape[0])
        if at.length < ids.shape[0] or at.length < self.nodes[at.node].end or at.node == top:
            return new_values(0)
        return self.cut_leaf(at.node)

    def cut_leaf(self, node):
        """Unmark `node` and, if it is a leaf, free what its sequence alone needs; the values, last first."""
        cdef int32_t id = self._node(node)
        cdef bint leaf = self.nodes[id].child < 0
        cdef cnp.ndarray freed = new_values(self.nodes[id].end // self.page_size if leaf else 0)
        self.num_entries -= self.nodes[id].marked
        self.nodes[id].marked = 0
        return freed[: self.cut(id, int32s(freed))] if leaf else freed

    def drop_root(self, root):
        """Drop a namespace with all it caches, also what is pinned; returns the values."""
        cdef int32_t top = self._root(root)
        freed = self.all_values(root)
        self._empty(top)
        self.give(top)
        return freed

    def drop_empty(self, root):
        """`drop_root` of a namespace that caches nothing; takes no memory.

        Raises:
            InvalidOperationError: it does cache something.
        """
        cdef int32_t top = self._root(root)
        if self.nodes[top].child >= 0:
            raise InvalidOperationError(f"expected a root without children, got {root}")
        self.give(top)

    def prune(self, root, tokens):
        """Forget every sequence that begins with `tokens`, a multiple of the page size and not empty.

        The values of the last page of `tokens` and of all that follows it, int32; none where they are not cached.
        The pages before stay. Neither pins nor marks count.
        """
        cdef int32_t top = self._root(root), id
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef Py_ssize_t n = ids.shape[0], freed = 0, pages
        if n == 0 or n % self.page_size:
            raise ValueError(f"expected a multiple of {self.page_size} tokens, at least one, got {n}")
        cdef walk_t at = self.walk(top, <uint32_t*>cnp.PyArray_DATA(ids), n)
        if at.length < n:
            return new_values(0)
        cdef int32_t kept = self.at_depth(at.node, n)
        cdef cnp.ndarray values = new_values(self.num_pages)
        self.nodes[kept].pins += 1    # Nothing joins it while what is below goes.
        while self.nodes[kept].child >= 0:
            id = kept
            while self.nodes[id].child >= 0:
                id = self.nodes[id].child
            pages = self.pages(id)
            self.shrink(id, pages, int32s(values) + freed)
            freed += pages
        self.nodes[kept].pins -= 1
        self.list_leaf(kept)
        self.shrink(kept, 1, int32s(values) + freed)
        return values[: freed + 1]

    def clear(self):
        """Empty every namespace, also what is pinned; the roots stay. Returns the values."""
        cdef Py_ssize_t root, at = 0
        cdef cnp.ndarray freed = new_values(self.num_pages)
        for root in self.roots():
            at += self.collect(<int32_t>root, int32s(freed) + at)
        self.empty()
        return freed

    def empty(self):
        """`clear` that returns nothing and takes no memory."""
        cdef Py_ssize_t id
        for id in range(self.used):
            if self.nodes[id].begin >= 0 and self.nodes[id].parent < 0:
                self._empty(<int32_t>id)

    # ------------------------------------------------------------------ what is inside

    def roots(self):
        """The ids of all roots, ascending."""
        cdef Py_ssize_t id
        return [id for id in range(self.used) if self.nodes[id].begin >= 0 and self.nodes[id].parent < 0]

    def leaf_ids(self):
        """The ids of all leaves, ascending; each is the end of one cached sequence."""
        cdef Py_ssize_t id
        return [
            id
            for id in range(self.used)
            if self.nodes[id].begin >= 0 and self.nodes[id].parent >= 0 and self.nodes[id].child < 0
        ]

    def path(self, node):
        """`(root, tokens, values)`: the sequence that ends with `node`, uint32 and int32."""
        cdef int32_t id = self._node(node)
        cdef cnp.npy_intp n = self.nodes[id].end
        cdef cnp.ndarray tokens = cnp.PyArray_EMPTY(1, &n, cnp.NPY_UINT32, 0)
        cdef cnp.ndarray values = new_values(n // self.page_size)
        self.gather(walk_t(node=id, length=n), int32s(values))
        while self.nodes[id].parent >= 0:
            n = self.nodes[id].begin
            memcpy(
                <uint32_t*>cnp.PyArray_DATA(tokens) + n,
                self.tokens(id),
                (self.nodes[id].end - n) * sizeof(uint32_t),
            )
            id = self.nodes[id].parent
        return id, tokens, values

    def all_values(self, root):
        """All values below `root`, int32, in no particular order."""
        cdef int32_t id = self._root(root)
        cdef cnp.ndarray values = new_values(self.num_pages)
        return values[: self.collect(id, int32s(values))].copy()

    def victim(self):
        """The leaf that `evict` would take pages from next; -1 if there is none."""
        return self.leaves.top()

    def num_pages_of(self, node):
        """Pages that end in `node` itself."""
        return self.pages(self._node(node))

    def is_leaf(self, node):
        """Whether nothing is cached beyond `node`; true of a root without content."""
        return self.nodes[self._node(node)].child < 0

    def num_pins(self, node):
        """Pins on `node` itself."""
        return self.nodes[self._node(node)].pins

    @property
    def num_nodes(self):
        """Nodes in use, roots included."""
        return self.used - self.num_free

    @property
    def nbytes(self):
        """Bytes of memory that the trie holds: records, tokens, values, children and candidates."""
        return self.capacity * sizeof(node_t) + self.text_bytes + self.children.nbytes + self.leaves.nbytes

    def __len__(self):
        """Pages held."""
        return self.num_pages

    def check(self):
        """Verify every invariant; AssertionError names the broken one."""
        check_nodes(self)
