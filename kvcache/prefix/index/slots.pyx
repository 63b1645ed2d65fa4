"""Slots of pages and claims on them; drawn and explained in slots.pxd."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from kvcache.core.locks cimport CallLock
from kvcache.core.pool cimport BlockPool
from kvcache.core.tokens cimport int32s, uint32s
from kvcache.prefix.index.claims cimport (
    add_claim, claim_t, find_brief, keep_claim, remove_claim, take_dropped,
)

import numpy as np

from kvcache.errors import InvalidOperationError, OutOfMemoryError

__all__ = ["Claim", "Slots"]

cnp.import_array()


# `page_t` for NumPy. A memoryview would do, but NumPy parses its format in Python, where an interrupt can end a call.
RECORD = np.dtype([("born", "i8"), ("used", "i8"), ("text", "u8"), ("pins", "i4"), ("lookups", "i4"), ("parked", "i4"),
                   ("named", "u1"), ("waits", "u1")], align=True)
assert RECORD.itemsize == sizeof(page_t)


cdef class Slots:
    """Pages with their slots in one pool for each group of layers.

    Args:
        pools: of the slots of each group.
        page_size: tokens of a page.
        windows: for each group, how many of the newest pages of a text it needs; 0: all of them.
        lock: held in every call; None: claims end only where they are released or dropped.
    """

    def __init__(self, pools, int32_t page_size=1, windows=(0,), CallLock lock=None):
        cdef Py_ssize_t group
        self.lock = lock
        self.pools, self.windows, self.page_size = tuple(pools), tuple(windows), page_size
        if not 1 <= len(self.pools) == len(self.windows) <= MOST_GROUPS:
            raise ValueError(f"windows: expected {len(self.pools)}, one per group, got {len(self.windows)}")
        for group in range(len(self.windows)):
            self.window_of[group] = self.windows[group]
        self.pool = self.pools[0]
        table = None
        if len(self.pools) > 1:
            self.pool = BlockPool(max(pool.num_blocks for pool in self.pools))
            table = np.full((len(self.pools), self.pool.num_blocks), -1, np.int32)
            self.table = int32s(table)
        self.arrays = np.empty(0, RECORD), np.empty((0, page_size), np.uint32), table
        self.reserve(self.pool.num_blocks)

    def __dealloc__(self):
        cdef claim_t *claim
        while (claim := take_dropped(&self.claims)) != NULL:
            free(claim)

    def reserve(self, Py_ssize_t num_pages):
        """Records of so many pages, before the pool has them; MemoryError: nothing has changed."""
        cdef Py_ssize_t page, n = len(self.arrays[0])
        if num_pages <= n:
            return
        cdef cnp.ndarray records = np.zeros(num_pages, RECORD)
        cdef cnp.ndarray tokens = np.empty((num_pages, self.page_size), np.uint32)
        cdef page_t *pages = <page_t *>cnp.PyArray_DATA(records)
        if n:
            memcpy(pages, self.pages, n * sizeof(page_t))
            memcpy(uint32s(tokens), self.tokens, n * self.page_size * sizeof(uint32_t))
        for page in range(n, num_pages):
            pages[page].parked = -1
        self.arrays = records, tokens, self.arrays[2]
        self.pages, self.tokens = pages, uint32s(tokens)

    # -- references -----------------------------------------------------------------------------------------

    cdef Claim claim_of(self, Py_ssize_t n):
        cdef Claim claim = Claim.__new__(Claim)
        cdef claim_t *data = <claim_t *>calloc(1, sizeof(claim_t) + n * sizeof(int32_t))
        if data == NULL:
            raise MemoryError(f"no memory for a claim on {n} pages")
        data.pages, data.pinned, data.call = <int32_t *>(data + 1), -1, 0 if self.lock is None else self.lock.calls
        add_claim(&self.claims, data)
        claim.slots, claim.data = self, data
        return claim

    cdef void keep(self, claim_t *claim, Py_ssize_t pinned) noexcept:
        if claim.n:
            self.pool.retain_each(claim.pages, claim.n, 1)
        if pinned:    # leaves are evicted from their tails, so the last one's pin keeps those before it
            claim.pinned = claim.pages[pinned - 1]
            self.pages[claim.pinned].pins += 1

    cdef void release_pages(self, const int32_t *pages, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i, group
        cdef int32_t *slot
        if self.table == NULL:
            if n:
                self.pool.release_each(pages, n, 1)
            return
        for i in range(n):
            if not self.pool.release_(pages[i]):
                continue
            for group in range(len(self.pools)):
                slot = &self.table[group * self.pool.num_blocks + pages[i]]
                if slot[0] >= 0:
                    (<BlockPool>self.pools[group]).release_(slot[0])
                slot[0] = -1

    cdef void end_claim(self, claim_t *claim) noexcept:
        if claim.ended:
            return
        remove_claim(&self.claims, claim)
        if claim.pinned >= 0:
            self.unpin(claim.pinned)
        self.release_pages(claim.pages, claim.n)

    cdef void unpin(self, int32_t page) noexcept:
        cdef page_t *record = &self.pages[page]
        record.pins -= 1
        if record.parked >= 0 and record.pins == 0:
            self.trie.table.nodes[record.parked].pins -= 1
            self.trie.table.list_leaf(record.parked)
            record.parked = -1

    cdef void release_dropped_(self) noexcept:
        cdef claim_t *claim
        while (claim := take_dropped(&self.claims)) != NULL:
            self.end_claim(claim)
            free(claim)
        while self.lock is not None and (claim := find_brief(&self.claims, self.lock.calls)) != NULL:
            self.end_claim(claim)

    def release_dropped(self, bint kept=False):
        """Release the pages of claims that are over; `kept`: of all claims."""
        self.release_dropped_()
        while kept and self.claims.first != NULL:
            self.end_claim(self.claims.first)

    def room(self, Py_ssize_t n):
        """How many of `n` more pages there are slots for in every group."""
        n = min(n, self.pool.num_free)
        for pool, window in zip(self.pools, self.windows):
            if pool.num_free < (min(n, window) if window else n):
                n = pool.num_free
        return n

    def take(self, Py_ssize_t n):
        """A claim on `n` free pages; a group with a window gets slots for the newest of them alone.

        Raises:
            OutOfMemoryError: there are fewer; MemoryError: no memory for the claim. Nothing was taken.
        """
        if n < 0:
            raise ValueError(f"n: expected a count of pages >= 0, got {n}")
        cdef Py_ssize_t i, group, num_pages = self.pool.num_blocks, room = self.room(n)
        if room < n:
            raise OutOfMemoryError(n, room)
        cdef Claim claim = self.claim_of(n)
        claim.data.n = n
        if n:
            self.pool.take_each(claim.data.pages, n, 1)
        for group in range(len(self.pools) if self.table != NULL else 0):
            for i in range(n):
                self.table[group * num_pages + claim.data.pages[i]] = -1
                if not self.window_of[group] or i >= n - self.window_of[group]:
                    self.table[group * num_pages + claim.data.pages[i]] = (<BlockPool>self.pools[group]).take()
        return claim

    def share(self, pages):
        """A claim on pages that are in use (int32 `(n,)`, each once), as `BlockPool.retain`; raises as that."""
        cdef cnp.ndarray ids = self.pool.in_use(pages)
        cdef Claim claim = self.claim_of(ids.shape[0])
        memcpy(claim.data.pages, int32s(ids), ids.shape[0] * sizeof(int32_t))
        claim.data.n = ids.shape[0]
        self.keep(claim.data, 0)
        return claim

    # -- the trie's pages -----------------------------------------------------------------------------------

    cdef void name_(self, int32_t page, int64_t clock, bint waits) noexcept:
        cdef page_t *record = &self.pages[page]
        record.named, record.waits, record.born, record.used = True, waits, clock, clock
        self.num_waiting += waits

    cdef void unname(self, int32_t page) noexcept:
        self.pages[page].named, self.pages[page].parked = False, -1
        self.end_wait(page)

    cdef void end_wait(self, int32_t page) noexcept:
        self.num_waiting -= self.pages[page].waits
        self.pages[page].waits = False
        if self.num_waiting == 0:
            self.source = None

    cdef void fill(self, int32_t page, int32_t other) noexcept:
        cdef Py_ssize_t group
        cdef int32_t *slots
        for group in range(len(self.pools)):
            slots = self.table + group * self.pool.num_blocks
            if slots[page] < 0:
                slots[page], slots[other] = slots[other], -1

    cdef Py_ssize_t usable(self, const int32_t *pages, Py_ssize_t n) noexcept:
        cdef Py_ssize_t page, group, groups = len(self.pools), num_pages = self.pool.num_blocks, best = 0
        cdef Py_ssize_t present[MOST_GROUPS]    # pages without a gap, up to the one that is looked at
        cdef bint fits
        if self.table == NULL:
            return n
        for group in range(groups):
            present[group] = 0
        for page in range(n):
            fits = True
            for group in range(groups):
                present[group] = present[group] + 1 if self.table[group * num_pages + pages[page]] >= 0 else 0
                fits &= present[group] >= min(self.window_of[group] or page + 1, page + 1)
            best = page + 1 if fits else best
        return best

    def arrived(self, pages):
        """Note that these pages, int32 `(n,)`, have their content now; those that do not wait do not change."""
        cdef cnp.ndarray ids = np.ascontiguousarray(pages, np.int32)
        cdef Py_ssize_t i
        cdef int32_t page
        for i in range(ids.shape[0]):
            page = int32s(ids)[i]
            if not 0 <= page < self.pool.num_blocks:
                raise IndexError(f"pages: expected pages below {self.pool.num_blocks}, got {page}")
            self.end_wait(page)

    def release(self, Py_ssize_t page):
        """End one lookup's hold on a page; InvalidOperationError if no lookup holds it."""
        if not self.is_looked_up(page):
            raise InvalidOperationError(f"expected a block that a lookup holds, got {page}")
        self.release_each(np.array([page], np.int32))

    def release_each(self, int32_t[::1] pages):
        """`release` of every page that a lookup holds; each becomes -1 in `pages`, so a second call does nothing."""
        cdef Py_ssize_t i
        for i in range(pages.shape[0]):
            if self.is_looked_up(pages[i]):
                self.pages[pages[i]].lookups -= 1
                self.unpin(pages[i])
                self.release_pages(&pages[i], 1)
            pages[i] = -1

    def is_looked_up(self, Py_ssize_t page):
        """Whether a lookup holds a page."""
        return 0 <= page < self.pool.num_blocks and self.pages[page].lookups > 0

    # -- reports --------------------------------------------------------------------------------------------

    def records(self, pages=None):
        """The records of pages (int32 `(n,)`, in range), a copy with the fields of `page_t`; None: all, a view."""
        return self.arrays[0][:self.pool.num_blocks] if pages is None else self.arrays[0][pages]

    def of(self, pages):
        """The slots of pages (int32 `(n,)`, in range), int32 `(groups, n)`; -1 where a group has none."""
        ids = np.asarray(pages, np.int32)
        return ids[None].copy() if self.table == NULL else self.arrays[2][:, ids]

    def tokens_of(self, pages):
        """The tokens that pages (int32 `(n,)`, in range) cover, uint32 `(n, page_size)`."""
        return self.arrays[1][pages]

    def counts(self, *, bint references=False):
        """How many callers hold each page; with `references`, all references of this, int32 `(num_pages,)`."""
        cdef Py_ssize_t i
        records = self.records()
        out = records["lookups"] + records["named"] if references else records["lookups"].copy()
        cdef int32_t *count = int32s(out)
        cdef claim_t *claim = self.claims.first
        while claim != NULL:
            for i in range(claim.n if references else claim.held):
                count[claim.pages[i]] += 1
            claim = claim.next
        return out

    @property
    def nbytes(self):
        """Bytes of the records of all pages."""
        return sum(array.nbytes for array in self.arrays if array is not None)

    def check(self):
        """Verify every invariant but those of the trie; AssertionError names the broken one."""
        cdef Py_ssize_t page
        cdef page_t *record
        self.release_dropped()
        held, pins = self.counts(), np.zeros(self.pool.num_blocks, np.int32)
        cdef claim_t *claim = self.claims.first
        while claim != NULL:
            if claim.pinned >= 0:
                pins[claim.pinned] += 1
            claim = claim.next
        for page in range(self.pool.num_blocks):
            record = &self.pages[page]
            assert record.pins == pins[page] + record.lookups, f"page {page}: pins do not add up"
            assert record.lookups >= 0, f"page {page}: lookups do not add up"
            assert record.named or not record.waits, f"page {page}: waits without a name"
            assert not (record.waits and held[page]), f"page {page}: waits and is held"
            assert record.parked < 0 or record.pins, f"page {page}: its leaf is parked, and nothing pins it"
        assert np.count_nonzero(self.records()["waits"]) == self.num_waiting, "slots: pages that wait do not add up"
        assert self.num_waiting or self.source is None, "slots: nothing waits, and there is a source"
        assert (self.counts(references=True) <= self.pool.ref_counts()).all(), "slots: the pool counts fewer references"
        if self.table != NULL:
            self.check_table()

    def check_table(self):
        """Verify that every slot of every group belongs to one page in use."""
        slots = self.of(np.arange(self.pool.num_blocks, dtype=np.int32))
        for group, pool in enumerate(self.pools):
            used = slots[group][slots[group] >= 0]
            assert len(used) == len(set(used.tolist())) == pool.num_used, f"slots: group {group} has lost some"
            assert self.pool.ref_counts()[slots[group] >= 0].all(), f"slots: group {group} has some of free pages"


@cython.no_gc_clear
cdef class Claim:
    """References on pages. `release` gives them back; if this is dropped instead, the next call of the cache does."""

    def __dealloc__(self):
        if self.data == NULL:
            return
        if self.data.ended:
            free(self.data)
        else:
            self.data.next_dropped, self.slots.claims.dropped = self.slots.claims.dropped, self.data

    def release(self):
        """Give the references back; a second call does nothing. To be called with the cache's lock held."""
        self.slots.end_claim(self.data)

    @property
    def released(self):
        """Whether the references were given back."""
        return self.data.ended

    def keep(self):
        """Keep the references after the call that made this."""
        keep_claim(&self.slots.claims, self.data)

    def cut(self, Py_ssize_t n):
        """Release all pages but the first `n`, of a claim from `Slots.take`."""
        if 0 <= n < self.data.n:
            self.slots.release_pages(self.data.pages + n, self.data.n - n)
            self.data.n = n

    def hold_each(self):
        """Hold each full page of the match until `Slots.release(page)` instead; the claim is empty then."""
        cdef Py_ssize_t i
        cdef claim_t *data = self.data
        for i in range(data.held):
            self.slots.pages[data.pages[i]].lookups += 1
            self.slots.pages[data.pages[i]].pins += 1
        if data.pinned >= 0:
            self.slots.unpin(data.pinned)
        self.slots.release_pages(data.pages + data.held, data.n - data.held)
        data.n, data.held, data.pinned = 0, 0, -1

    @property
    def pages(self):
        """The pages, in the order of the text, int32, a copy."""
        cdef cnp.npy_intp n = self.data.n
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT32, 0)
        memcpy(int32s(out), self.data.pages, n * sizeof(int32_t))
        return out

    @property
    def tail(self):
        """The page that a match ends inside of; -1: none."""
        return self.data.pages[self.data.held] if self.tail_tokens else -1

    @property
    def num_held(self):
        """Full pages of a match; after them may come the page that it ends inside of."""
        return self.data.held

    def __len__(self):
        return self.data.n
