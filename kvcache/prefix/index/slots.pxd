"""The slots of cached pages, and what callers hold of them.

    page     0    1    2    3    4    5      a page: the K and V of `page_size` tokens
    named    x    x    x    .    x    .      whether the trie names it
    claims   1    2    .    1    .    .      claims of callers: sessions, lookups, states, pages about to be named
    slots    0    1    2    3    4    5      with one group of layers a page is its slot

A page is free when the trie does not name it and nobody claims it; `BlockPool` counts the references. With several
groups of layers (full attention, windows of one width) a page has a slot in the pool of each group, or -1 where the
group has none.

A `Claim` owns references, and returns them however a call ends. They are in one of two rings:

    brief    until the call that made the claim has ended. Its frame may live long after it, in the traceback of an
             error, and keep the claim: so the number of the call decides, not the frame.
    kept     until the claim is dropped: a caller holds it longer, a session or a state.

Deallocation may happen inside of another call (garbage collection), so it only moves the references to the end of the
brief ring, which takes no memory. The next call returns all that is over, from that end on. It needs no lock of the
cache, so the rings are walked and changed in critical sections of the `Slots`: nothing without the GIL comes between.

A page that is looked up stays in the trie, with all pages before it (`page_t.pins`). An eviction that meets a pinned
page at the end of a leaf parks the leaf, as a pin on its node, until the page is unpinned; so the victim is found in
O(log n), and a claim costs one pin, however long it is.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvcache.core.block_pool cimport BlockPool
from kvcache.core.locks cimport CallLock
from kvcache.trie.trie cimport TokenTrie


cdef enum:
    BRIEF, KEPT, NUM_RINGS
    MOST_GROUPS = 16    # of layers


cdef struct page_t:
    int64_t born          # the index's clock when the page was last named while no lookup held it
    int64_t used          # and when it was last found
    uint64_t text         # hash of the text that ends with it, where reasons of misses are counted (misses.pxd)
    int32_t pins          # claims and lookups that keep it, and so all before it, in the trie
    int32_t lookups       # lookups that hold it, each until `release_each`
    int32_t parked        # the leaf that ends with this page, if an eviction has found the page pinned; -1: none
    uint8_t named
    uint8_t waits         # named, and its content is still in a file


cdef struct claim_t:
    claim_t *next         # in the ring, the newest first; alone: the references were returned
    claim_t *before
    int64_t call          # that made it, by `CallLock.calls`; -1: the `Claim` was dropped
    int32_t *pages        # (n,) referenced, in the order of the text
    int64_t n
    int64_t held          # how many of them, from the first on, count as held by a caller
    int32_t pinned        # the page that this claim pins; -1: none


cdef class Slots:
    cdef object __weakref__
    cdef readonly BlockPool pool       # of pages
    cdef readonly tuple pools          # of the slots of each group; (pool,) with one group
    cdef readonly int32_t page_size    # tokens
    cdef readonly Py_ssize_t num_waiting
    cdef public object source          # what pages that wait are fetched from; None: none waits
    cdef tuple arrays                  # the arrays of NumPy behind the next three
    cdef page_t *pages                 # (num_records,), at least the pages of the pool
    cdef uint32_t *tokens              # (num_records, page_size) what each page covers
    cdef int32_t *table                # (groups, pool.num_blocks) slots, -1 is none
    cdef Py_ssize_t groups             # rows of the table; 0 with one group of layers
    cdef Py_ssize_t[MOST_GROUPS] windows    # newest pages of a text that each group needs
    cdef claim_t[NUM_RINGS] rings      # the heads of the rings
    cdef CallLock lock                 # of the cache; None: claims last until they are released or dropped
    cdef TokenTrie trie                # the trie of the parked leaves

    cdef Claim claim_of(self, Py_ssize_t n)                     # an empty claim with room for n pages
    cdef void count_claims(self, int32_t *count, bint references, bint pins) noexcept    # add to the count of each page
    cdef void keep(self, Claim claim, Py_ssize_t n) noexcept    # reference its first n pages, and keep them in the trie
    cdef void release_pages(self, const int32_t *pages, Py_ssize_t n) noexcept    # one reference on each
    cdef void name_(self, int32_t page, int64_t clock, bint waits) noexcept
    cdef void unname(self, int32_t page) noexcept
    cdef bint park(self, TokenTrie trie, int32_t leaf) noexcept    # if the leaf's last page is pinned; whether it is
    cdef void fill(self, int32_t page, int32_t other) noexcept    # move the slots that `page` lacks there from `other`
    cpdef void release_dropped(self, bint kept=*) noexcept
    # How many pages, from the first on, every group has what it needs of.
    cdef Py_ssize_t usable(self, const int32_t *pages, Py_ssize_t n) noexcept


cdef class Claim:
    cdef readonly Slots slots
    cdef claim_t *data
    cdef readonly object name, tokens      # of evicted pages: the namespace, and the text that ends with them
    cdef readonly Py_ssize_t tail_tokens   # first tokens of the last page that are part of the match, 0: all of it
    cdef readonly int32_t tail             # that page; -1: there is none

    cdef cnp.ndarray first(self, cnp.npy_intp n)    # its first n pages, of those it has room for; int32, a copy
