"""Slots of pages and claims on them; drawn and explained in slots.pxd."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from kvcache.core.block_pool cimport BlockPool
from kvcache.core.locks cimport CallLock
from kvcache.support.token_ids cimport int32s, uint32s
from kvcache.trie.trie cimport TokenTrie

import numpy as np

from kvcache.errors import OutOfMemoryError

__all__ = ["Claim", "Slots"]

cnp.import_array()


# `page_t` for NumPy. A memoryview would do, but NumPy parses its format in Python, where an interrupt can end a call.
RECORD = np.dtype([("born", "i8"), ("used", "i8"), ("text", "u8"), ("pins", "i4"), ("lookups", "i4"), ("parked", "i4"),
                   ("named", "u1"), ("waits", "u1")], align=True)
assert RECORD.itemsize == sizeof(page_t)


cdef inline void unlink(claim_t *claim) noexcept:
    claim.next.before, claim.before.next = claim.before, claim.next
    claim.next = claim.before = claim


cdef inline void link(claim_t *claim, claim_t *before) noexcept:
    claim.next, claim.before = before.next, before
    claim.next.before = before.next = claim


cdef inline int32_t *slot_of(Slots slots, Py_ssize_t group, int32_t page) noexcept:
    return &slots.table[group * slots.pool.num_blocks + page]


cdef void end_claim(Slots slots, claim_t *claim) noexcept:
    """Return its references and its pin, unless that was done."""
    if claim.next != claim:
        unlink(claim)
        if claim.pinned >= 0:
            unpin(slots, claim.pinned)
        slots.release_pages(claim.pages, claim.n)


cdef void unpin(Slots slots, int32_t page) noexcept:
    cdef page_t *record = &slots.pages[page]
    record.pins -= 1
    if record.parked >= 0 and record.pins == 0:
        slots.trie.table.pin(record.parked, -1)
        record.parked = -1


cdef void end_wait(Slots slots, int32_t page) noexcept:
    slots.num_waiting -= slots.pages[page].waits
    slots.pages[page].waits = False
    if slots.num_waiting == 0:
        slots.source = None


cdef class Slots:
    """Pages with their slots in one pool for each group of layers.

    Args:
        pools: of the slots of each group.
        page_size: tokens of a page.
        windows: for each group, how many of the newest pages of a text it needs; 0: all of them.
        lock: held in every call; None: claims end only where they are released or dropped.
    """

    def __cinit__(self):
        cdef Py_ssize_t ring
        for ring in range(NUM_RINGS):
            self.rings[ring].next = self.rings[ring].before = &self.rings[ring]

    def __init__(self, pools, int32_t page_size=1, windows=(0,), CallLock lock=None):
        cdef Py_ssize_t group, window
        self.lock, self.pools, self.page_size = lock, tuple(pools), page_size
        if not 1 <= len(self.pools) == len(windows) <= MOST_GROUPS:
            raise ValueError(f"windows: expected {len(self.pools)}, one per group, got {len(windows)}")
        for group, window in enumerate(windows):
            self.windows[group] = window or <Py_ssize_t>1 << 31    # more pages than a pool has
        self.pool = self.pools[0]
        if len(self.pools) > 1:
            self.pool, self.groups = BlockPool(max(pool.num_blocks for pool in self.pools)), len(self.pools)
        table = np.full((self.groups, self.pool.num_blocks), -1, np.int32)
        self.table = int32s(table)
        self.arrays = np.empty(0, RECORD), np.empty((0, page_size), np.uint32), table
        self.reserve(self.pool.num_blocks)

    def __dealloc__(self):
        cdef claim_t *claim
        while (claim := self.rings[BRIEF].next) != &self.rings[BRIEF]:    # dropped: a `Claim` keeps its slots
            unlink(claim)
            free(claim)

    def reserve(self, Py_ssize_t num_pages):
        """Make records of `num_pages` pages, before the pool has them; MemoryError: nothing has changed."""
        old_records, old_tokens, table = self.arrays
        n = len(old_records)
        if num_pages <= n:
            return
        records = np.zeros(num_pages, RECORD)
        tokens = np.empty((num_pages, self.page_size), np.uint32)
        records["parked"] = -1
        records[:n], tokens[:n] = old_records, old_tokens
        self.arrays = records, tokens, table
        self.pages, self.tokens = <page_t *>cnp.PyArray_DATA(records), uint32s(tokens)

    # -- references -----------------------------------------------------------------------------------------

    cdef Claim claim_of(self, Py_ssize_t n):
        cdef Claim claim = Claim.__new__(Claim)
        cdef claim_t *data = <claim_t *>calloc(1, sizeof(claim_t) + n * sizeof(int32_t))
        if data == NULL:
            raise MemoryError(f"no memory for a claim on {n} pages")
        data.pages, data.pinned, data.call = <int32_t *>(data + 1), -1, 0 if self.lock is None else self.lock.calls
        data.next = data.before = data
        with cython.critical_section(self):
            link(data, &self.rings[BRIEF])
        claim.slots, claim.data, claim.tail = self, data, -1
        return claim

    cdef void keep(self, Claim claim, Py_ssize_t n) noexcept:
        cdef claim_t *data = claim.data
        self.pool.retain_each(data.pages, n, 1)
        data.n, data.pinned = n, data.pages[n - 1]    # leaves are evicted from their tails, so its pin keeps all before
        self.pages[data.pinned].pins += 1

    cdef void release_pages(self, const int32_t *pages, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i, group
        cdef int32_t *slot
        for group in range(self.groups):
            for i in range(n):
                slot = slot_of(self, group, pages[i])
                if slot[0] >= 0 and self.pool.refs[pages[i]] == 1:
                    (<BlockPool>self.pools[group]).release_(slot[0])
                    slot[0] = -1
        if n:
            self.pool.release_each(pages, n, 1)

    @cython.critical_section
    cpdef void release_dropped(self, bint kept=False) noexcept:
        """Return the references of claims that are over; `kept`: and of those that callers keep."""
        cdef int64_t call = 0 if self.lock is None else self.lock.calls
        cdef claim_t *claim
        while (claim := self.rings[BRIEF].before) != &self.rings[BRIEF] and claim.call != call:
            end_claim(self, claim)
            if claim.call < 0:
                free(claim)
        while kept and (claim := self.rings[KEPT].next) != &self.rings[KEPT]:
            end_claim(self, claim)

    def room(self, Py_ssize_t n):
        """How many of `n` more pages there are slots for in every group."""
        cdef Py_ssize_t group
        n = min(n, self.pool.num_free)
        for group, pool in enumerate(self.pools):
            if pool.num_free < min(n, self.windows[group]):
                n = pool.num_free
        return n

    def take(self, Py_ssize_t n):
        """A claim on `n` free pages; a group with a window gets slots for the newest of them alone.

        Raises:
            OutOfMemoryError: there are fewer; MemoryError: no memory for the claim. Nothing was taken.
        """
        if n < 0:
            raise ValueError(f"n: expected a count of pages >= 0, got {n}")
        cdef Py_ssize_t i, group, room = self.room(n)
        if room < n:
            raise OutOfMemoryError(n, room)
        cdef Claim claim = self.claim_of(n)
        claim.data.n = n
        if n:
            self.pool.take_each(claim.data.pages, n, 1)
        for group in range(self.groups):
            for i in range(max(0, n - self.windows[group]), n):
                slot_of(self, group, claim.data.pages[i])[0] = (<BlockPool>self.pools[group]).take()
        return claim

    def share(self, pages):
        """A claim on pages that are in use (int32 `(n,)`, each once), as `BlockPool.retain`; raises as that."""
        cdef cnp.ndarray ids = self.pool.in_use(pages)
        cdef Claim claim = self.claim_of(ids.shape[0])
        claim.data.n = ids.shape[0]
        if claim.data.n:
            memcpy(claim.data.pages, int32s(ids), claim.data.n * sizeof(int32_t))
            self.pool.retain_each(claim.data.pages, claim.data.n, 1)
        return claim

    # -- the trie's pages -----------------------------------------------------------------------------------

    cdef void name_(self, int32_t page, int64_t clock, bint waits) noexcept:
        cdef page_t *record = &self.pages[page]
        record.named, record.waits, record.used = True, waits, clock
        if record.lookups == 0:    # else it has the content that it had when it was looked up
            record.born = clock
        self.num_waiting += waits

    cdef void unname(self, int32_t page) noexcept:
        self.pages[page].named, self.pages[page].parked = False, -1
        end_wait(self, page)

    cdef bint park(self, TokenTrie trie, int32_t leaf) noexcept:
        cdef page_t *last = &self.pages[trie.table.values(leaf)[trie.table.pages(leaf) - 1]]
        if last.pins:
            self.trie, last.parked = trie, leaf
            trie.table.pin(leaf, 1)
        return last.pins > 0

    cdef void fill(self, int32_t page, int32_t other) noexcept:
        cdef Py_ssize_t group
        for group in range(self.groups):
            if slot_of(self, group, page)[0] < 0:
                slot_of(self, group, page)[0], slot_of(self, group, other)[0] = slot_of(self, group, other)[0], -1

    cdef Py_ssize_t usable(self, const int32_t *pages, Py_ssize_t n) noexcept:
        cdef Py_ssize_t page, group, best = 0
        cdef Py_ssize_t present[MOST_GROUPS]    # pages without a gap, up to the one that is looked at
        cdef bint fits
        if self.groups == 0:
            return n
        memset(present, 0, sizeof(present))
        for page in range(n):
            fits = True
            for group in range(self.groups):
                present[group] = present[group] + 1 if slot_of(self, group, pages[page])[0] >= 0 else 0
                fits &= present[group] >= min(self.windows[group], page + 1)
            best = page + 1 if fits else best
        return best

    def arrived(self, pages):
        """Note that these pages, int32 `(n,)`, have their content now; those that do not wait do not change."""
        cdef cnp.ndarray ids = self.pool.in_use(pages)
        cdef Py_ssize_t i
        for i in range(ids.shape[0]):
            end_wait(self, int32s(ids)[i])

    def release_each(self, int32_t[::1] pages):
        """End one lookup's hold on each page that one holds; pages become -1, so a second call does nothing."""
        cdef Py_ssize_t i
        for i in range(pages.shape[0]):
            if self.is_looked_up(pages[i]):
                self.pages[pages[i]].lookups -= 1
                unpin(self, pages[i])
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
        return self.arrays[2][:, ids] if self.groups else ids[None].copy()

    def tokens_of(self, pages):
        """The tokens that pages (int32 `(n,)`, in range) cover, uint32 `(n, page_size)`."""
        return self.arrays[1][pages]

    def counts(self, *, bint references=False, bint pins=False):
        """How many callers hold each page; with `references`, all references of this; with `pins`, all pins.

        int32 `(num_pages,)`.
        """
        records = self.records()
        out = records["lookups"] + records["named"] if references else records["lookups"].copy()
        self.count_claims(int32s(out), references, pins)
        return out

    @cython.critical_section
    cdef void count_claims(self, int32_t *count, bint references, bint pins) noexcept:
        cdef Py_ssize_t i, ring
        cdef claim_t *claim
        for ring in range(NUM_RINGS):
            claim = self.rings[ring].next
            while claim != &self.rings[ring]:
                for i in range(claim.n if references else 0 if pins else claim.held):
                    count[claim.pages[i]] += 1
                if pins and claim.pinned >= 0:
                    count[claim.pinned] += 1
                claim = claim.next

    @property
    def nbytes(self):
        """Bytes of the records of all pages."""
        return sum(array.nbytes for array in self.arrays)

    def check(self):
        """Verify every invariant; AssertionError names the broken one, and the page."""
        records, references = self.records(), self.pool.ref_counts()
        pins, waits = records["pins"], records["waits"] != 0
        for wrong, what in (
            (pins != self.counts(pins=True), "pins do not add up"),
            (records["lookups"] < 0, "lookups do not add up"),
            (waits & (records["named"] == 0), "waits without a name"),
            (waits & (self.counts() > 0), "waits and is held"),
            ((records["parked"] >= 0) & (pins == 0), "its leaf is parked, and nothing pins it"),
            (self.counts(references=True) > references, "the pool counts fewer references"),
        ):
            assert not wrong.any(), f"page {wrong.argmax()}: {what}"
        assert np.count_nonzero(waits) == self.num_waiting, "slots: pages that wait do not add up"
        assert self.num_waiting or self.source is None, "slots: nothing waits, and there is a source"
        table = self.of(np.arange(self.pool.num_blocks, dtype=np.int32))
        for pool, of_group in zip(self.pools, table if len(table) > 1 else [], strict=False):
            used = of_group[of_group >= 0]
            assert len(used) == len(np.unique(used)) == pool.num_used, "slots: a group has lost some"
            assert references[of_group >= 0].all(), "slots: a group has some of free pages"


@cython.no_gc_clear
cdef class Claim:
    """References on pages. `release` gives them back; if this is dropped instead, the next call of the cache does."""

    def __dealloc__(self):
        if self.data == NULL:
            return
        with cython.critical_section(self.slots):
            if self.data.next == self.data:
                free(self.data)
            else:
                unlink(self.data)
                self.data.call = -1
                link(self.data, self.slots.rings[BRIEF].before)

    def release(self):
        """Give the references back; a second call does nothing. To be called with the cache's lock held."""
        with cython.critical_section(self.slots):
            end_claim(self.slots, self.data)

    @property
    def released(self):
        """Whether the references were given back."""
        with cython.critical_section(self.slots):    # the claims beside it come and go
            return self.data.next == self.data

    def keep(self):
        """Keep the references after the call that made this."""
        with cython.critical_section(self.slots):
            if self.data.next != self.data:
                unlink(self.data)
                link(self.data, &self.slots.rings[KEPT])

    def cut(self, Py_ssize_t n):
        """Release all pages but the first `n`, of a claim from `Slots.take`."""
        if 0 <= n < self.data.n:
            self.slots.release_pages(self.data.pages + n, self.data.n - n)
            self.data.n = n

    def hold_each(self):
        """Hold each full page of the match until `Slots.release_each` instead; the claim is empty then."""
        cdef Py_ssize_t i
        cdef claim_t *data = self.data
        cdef page_t *records = self.slots.pages
        self.cut(data.held)
        for i in range(data.n):
            records[data.pages[i]].lookups += 1
            records[data.pages[i]].pins += 1
        if data.pinned >= 0:
            unpin(self.slots, data.pinned)
        data.n, data.held, data.pinned = 0, 0, -1

    cdef cnp.ndarray first(self, cnp.npy_intp n):
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT32, 0)
        memcpy(int32s(out), self.data.pages, n * sizeof(int32_t))
        return out

    @property
    def pages(self):
        """The pages, in the order of the text, int32, a copy."""
        return self.first(self.data.n)

    @property
    def num_held(self):
        """Full pages of a match; after them may come the page that it ends inside of."""
        return self.data.held

    def __len__(self):
        return self.data.n
