"""`PrefixIndex`: the cached pages of each text in each namespace, the claims on them, and the order of eviction.

    name -> Space -> root of the trie -> pages -> slots of each group of layers       (slots.pxd draws the last two)

The index has integers only; the contents of slots belong to its owner. Each call checks and converts its arguments
first, which may run the caller's code. It allocates next; then it changes everything in compiled code that cannot fail.
So neither an interrupt nor a failed allocation divides a call, and the deallocation of a claim returns what it held.

A page that is claimed stays in the trie, with all pages before it (`page_t.pins`). An eviction that meets a pinned page
at the end of a leaf parks the leaf, as a pin on its node, until the page is unpinned; so the victim is found in
O(log n), and a claim costs one pin, however long it is.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.prefix.index.misses cimport MissReasons
from kvcache.prefix.index.slots cimport Claim, Slots
from kvcache.prefix.index.spaces cimport Space, Spaces
from kvcache.trie.paths cimport walk_t
from kvcache.trie.trie cimport TokenTrie


cdef class PrefixIndex:
    cdef readonly TokenTrie trie
    cdef readonly list kinds          # the `Slots` in use; with `slots`, that one
    cdef Slots slots                  # of all namespaces; None: each names its own
    cdef readonly Spaces spaces
    cdef bint entries                 # whether the trie marks whole keys
    cdef MissReasons miss_reasons     # why lookups missed; None: no reasons are counted
    cdef readonly int64_t clock       # counts uses
    cdef int64_t counts[4]            # of the reasons
    cdef readonly int64_t hits        # pages found; of entries: lookups that found something
    cdef readonly int64_t misses      # lookups that stopped before the last full page; that found nothing
    cdef readonly int64_t short       # prompts shorter than a page
    cdef readonly int64_t hit_tokens       # of matches, the first ones of a page that a claim ends inside of included
    cdef readonly int64_t lookup_tokens    # asked for
    cdef readonly int64_t evictions   # pages; entries

    # Release the pages of dropped claims, forget the names of empty namespaces and of slots without pages.
    cdef int clean_up(self) except -1
    # A claim with the pages of the longest match, none of them referenced yet, and with room for one more.
    cdef Claim matched(self, Space space, cnp.ndarray ids, walk_t *at)
    cdef int32_t victim(self, Py_ssize_t count, Py_ssize_t *pages) except -2
    # Note that the trie does not name the claim's pages any more, which it returned last first; `space` may be vacant.
    cdef void unname_claimed(self, Space space, Claim claim) noexcept
    # Unmark a node, and add the pages that only its sequence needs to a claim with room for its whole text.
    cdef void cut_entry(self, int32_t node, Claim claim) noexcept
    cdef PrefixIndex like(self)
    # Exchange all pages with an index made by `like`, and drop this one's. Takes no memory and does not fail.
    cdef int swap(self, PrefixIndex other) except -1
