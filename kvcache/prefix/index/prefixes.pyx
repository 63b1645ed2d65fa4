"""The index of cached prefixes; explained in prefixes.pxd."""

cimport numpy as cnp
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kvcache.core.tokens cimport int32s, uint32_tokens, uint32s
from kvcache.prefix.index.misses cimport EVICTED, SHORTER, MissReasons
from kvcache.prefix.index.slots cimport Claim, Slots
from kvcache.prefix.index.spaces cimport Space, Spaces
from kvcache.trie.entries cimport EntryTrie
from kvcache.trie.nodes cimport node_t
from kvcache.trie.paths cimport walk_t
from kvcache.trie.trie cimport TokenTrie

from collections import namedtuple

import numpy as np

from kvcache.prefix.index.misses import REASONS

__all__ = ["Match", "PrefixIndex", "load"]

cnp.import_array()

# length: tokens matched; pages: the full ones, int32; tail: a page that holds the tokens after these, -1: none
Match = namedtuple("Match", ("length", "pages", "tail"))


cdef class PrefixIndex:
    """A trie per namespace over the pages of a `Slots`, or of several where namespaces differ in shape.

    Args:
        trie: empty. An `EntryTrie` keeps whole keys, with one token to a page.
        slots: of every namespace; None: `insert` says which.
        most_ghosts: number of evicted pages to remember, for the reasons of misses; None: no reasons are counted.
    """

    def __init__(self, TokenTrie trie not None, Slots slots=None, most_ghosts=None):
        self.trie, self.slots, self.entries = trie, slots, isinstance(trie, EntryTrie)
        self.kinds = [] if slots is None else [slots]
        self.spaces = Spaces(trie)
        if most_ghosts is not None:
            self.miss_reasons = MissReasons(slots, most_ghosts)

    cdef PrefixIndex like(self):
        """An empty index with the same settings."""
        trie = type(self.trie)(self.trie.table.page_size, self.trie.table.policy)
        most_ghosts = None if self.miss_reasons is None else self.miss_reasons.ring.shape[0]
        cdef PrefixIndex other = type(self)(trie, self.slots, most_ghosts)
        other.kinds = list(self.kinds)
        return other

    def __len__(self):
        """Pages, or entries, that are cached."""
        return self.trie.table.num_entries if self.entries else self.trie.table.num_pages

    # -- namespaces -----------------------------------------------------------------------------------------

    cdef int clean_up(self) except -1:
        cdef Slots slots
        for slots in self.kinds:
            slots.release_dropped_()
        self.spaces.forget_vacant()
        if self.slots is None and self.kinds:
            self.kinds = [slots for slots in self.kinds if slots.pool.num_used]
        return 0

    def slots_of(self, name):
        """The `Slots` of a namespace; None if nothing of it is cached."""
        cdef Space space = self.spaces.find(name)
        return None if space is None else space.slots

    # -- match ----------------------------------------------------------------------------------------------

    def find(self, tokens, name=None):
        """What is cached of `tokens`, a `Match`; changes nothing."""
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef Space space = self.spaces.find(name)
        if space is None:
            return Match(0, np.empty(0, np.int32), -1)
        cdef walk_t at = self.trie.walk(space.root, uint32s(ids), ids.shape[0])
        cdef cnp.npy_intp n = at.length // self.trie.table.page_size
        cdef cnp.ndarray pages = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT32, 0)
        self.trie.gather(at, int32s(pages))
        cdef Py_ssize_t usable = space.slots.usable(int32s(pages), n)
        if usable < n or space.slots.table != NULL:
            return Match(usable * self.trie.table.page_size, pages[:usable], -1)
        return Match(at.length, pages, self.trie.partial(at))

    cdef Claim matched(self, Space space, cnp.ndarray ids, walk_t *at):
        at[0] = self.trie.walk(space.root, uint32s(ids), ids.shape[0])
        cdef Claim claim = space.slots.claim_of(at.length // self.trie.table.page_size + 1)
        self.trie.gather(at[0], claim.data.pages)
        return claim

    def claim(self, tokens, name=None, bint whole=False):
        """Look up `tokens` and hold the match: a `Claim` on its full pages and on the page that it ends inside of.

        Counts as a use of the pages, and in the statistics. With `whole`, the match has full pages alone.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef uint64_t key = <uint64_t>hash(name)
        self.clean_up()
        cdef Space space = self.spaces.find(name)
        cdef Slots slots = self.slots
        cdef walk_t at = walk_t(node=-1, length=0)
        cdef Claim claim = slots.claim_of(1) if space is None else self.matched(space, ids, &at)
        cdef int32_t *pages = claim.data.pages
        cdef Py_ssize_t size = self.trie.table.page_size, n = ids.shape[0], walked = at.length // size, i
        cdef Py_ssize_t held = slots.usable(pages, walked)
        cdef int32_t tail = self.trie.partial(at) if held == walked and slots.table == NULL else -1, node = -1
        cdef int reason = -1
        if self.miss_reasons is not None and 0 < n < size:
            reason = SHORTER
        elif self.miss_reasons is not None and (held + 1) * size <= n:
            reason = EVICTED if held < walked else self.miss_reasons.why(key, uint32s(ids), pages, held, tail >= 0)
        if held:
            node = self.trie.at_depth(at.node, held * size)
        # Nothing fails from here on.
        self.clock += 1
        if held:
            self.trie.table.stamp_path(node)
        for i in range(held):
            slots.pages[pages[i]].used = self.clock
        claim.data.held = claim.data.n = held
        if tail >= 0 and not whole:
            pages[held] = tail
            claim.data.n, claim.tail_tokens = held + 1, at.length - held * size
        slots.keep(claim.data, held)
        self.hits += held
        self.hit_tokens += held * size + claim.tail_tokens
        self.lookup_tokens += n
        if (held + 1) * size <= n:
            self.misses += 1
        elif 0 < n < size:    # neither a hit nor a miss, and yet nothing can be reused
            self.short += 1
        if reason >= 0:
            self.counts[reason] += 1
        return claim

    def head(self, tokens, name=None):
        """A `Claim` on all cached pages of `tokens`, whatever groups have them; counts as a use. None: no page."""
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        self.clean_up()
        cdef Space space = self.spaces.find(name)
        if space is None:
            return None
        cdef walk_t at
        cdef Claim claim = self.matched(space, ids, &at)
        cdef Py_ssize_t n = at.length // self.trie.table.page_size
        if n == 0:
            return None
        cdef int32_t node = self.trie.at_depth(at.node, n * self.trie.table.page_size)
        claim.data.n = n
        self.trie.table.stamp_path(node)
        space.slots.keep(claim.data, 0 if self.entries else n)
        return claim

    # -- insert ---------------------------------------------------------------------------------------------

    def insert(self, tokens, Claim fresh not None, name=None, Claim head=None, Slots slots=None, bint waits=False):
        """Name the pages of `fresh`, which cover exactly what `tokens` have after those of `head`.

        A page that is cached already stays; it takes the slots of those groups that it has none in.

        Args:
            head: from `head` of the same tokens, or of the first of them; None: there is none.
            slots: of a new namespace; by default those of all.
            waits: the pages wait for their content.

        Returns:
            The trie's node that ends with the last page.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef Py_ssize_t old = 0 if head is None else head.data.n, n = old + fresh.data.n, existing = 0, i
        cdef Py_ssize_t size = self.trie.table.page_size
        slots = self.slots if slots is None else slots
        if fresh.slots is not slots or (head is not None and head.slots is not slots):
            raise ValueError("fresh: expected pages of the namespace's slots, got others")
        self.clean_up()
        cdef Space space = self.spaces.open(name, slots)
        if slots not in self.kinds:
            self.kinds.append(slots)
        if ids.shape[0] != n * size or n == 0:
            raise ValueError(f"tokens: expected {n * size}, those of {n} pages, got {ids.shape[0]}")
        cdef int32_t node
        cdef int32_t *values = <int32_t *>malloc(n * sizeof(int32_t))
        if values == NULL:
            raise MemoryError(f"no memory for {n} pages")
        try:
            if old:
                memcpy(values, head.data.pages, old * sizeof(int32_t))
            memcpy(values + old, fresh.data.pages, (n - old) * sizeof(int32_t))
            for i in range(old, n):    # no prompt finds these pages yet
                memcpy(slots.tokens + values[i] * size, uint32s(ids) + i * size, size * sizeof(uint32_t))
            if self.miss_reasons is not None:
                self.miss_reasons.prepare(uint32s(ids), values, old, n)
            node = self.trie.put(space.root, uint32s(ids), n * size, values, &existing)
            # Nothing fails from here on.
            if slots.table != NULL and existing > old:
                self.trie.gather(walk_t(node=node, length=ids.shape[0]), values)
                for i in range(old, existing):
                    slots.fill(values[i], fresh.data.pages[i - old])
            self.clock += 1
            for i in range(existing, n):
                slots.name_(values[i], self.clock, waits)
                if self.miss_reasons is not None:
                    self.miss_reasons.count(values[i])
                if i < old:    # it had left the trie, and the claim has kept it
                    slots.pool.retain_(values[i])
            fresh.data.n = max(0, existing - old)
        finally:
            free(values)
        if self.entries:
            self.trie.table.mark(node, True)
        return node

    # -- evict and forget -----------------------------------------------------------------------------------

    def evict(self, Py_ssize_t count=1):
        """Evict up to `count` pages, or one entry: a `Claim` on them with `name` and `tokens`; None: nothing to evict.

        `tokens` is the text that ends with these pages. They are free once the claim is released, and readable before.
        """
        self.clean_up()
        cdef Py_ssize_t pages = 0, i
        cdef int32_t leaf = self.victim(count, &pages)
        if leaf < 0:
            return None
        root, tokens, values = self.trie.path(leaf)
        cdef Space space = self.spaces.of_root[root]
        cdef Claim claim = space.slots.claim_of(len(values) if self.entries else pages)
        claim.name, claim.tokens = space.name, tokens
        if self.entries:
            self.evictions += 1
            self.cut_entry(leaf, claim)
        else:
            self.evictions += pages
            claim.data.n = pages
            self.trie.table.shrink(leaf, pages, claim.data.pages)
            for i in range(pages if self.miss_reasons is not None else 0):
                self.miss_reasons.remember(space.key, claim.data.pages[i])
        self.unname_claimed(space, claim)
        return claim

    cdef int32_t victim(self, Py_ssize_t count, Py_ssize_t *pages) except -2:
        """The leaf to take pages from, and how many its tail has of `count` that are not pinned; -1: none."""
        cdef int32_t leaf = self.trie.table.leaves.top()
        cdef Py_ssize_t n
        cdef const int32_t *values
        if self.entries or count <= 0:
            return leaf if self.entries else -1
        while leaf >= 0:
            n, values = self.trie.table.pages(leaf), self.trie.table.values(leaf)
            pages[0] = 0
            while pages[0] < min(n, count) and self.slots.pages[values[n - 1 - pages[0]]].pins == 0:
                pages[0] += 1
            if pages[0]:
                return leaf
            self.slots.trie, self.slots.pages[values[n - 1]].parked = self.trie, leaf
            self.trie.table.pin(leaf, 1)
            leaf = self.trie.table.leaves.top()
        return -1

    cdef void cut_entry(self, int32_t node, Claim claim) noexcept:
        self.trie.table.mark(node, False)
        if self.trie.table.nodes[node].child < 0:
            claim.data.n += self.trie.cut(node, claim.data.pages + claim.data.n)

    cdef void unname_claimed(self, Space space, Claim claim) noexcept:
        cdef Py_ssize_t i, n = claim.data.n
        cdef int32_t *pages = claim.data.pages
        for i in range(n // 2):    # the trie returns the last page first; a claim has the order of the text
            pages[i], pages[n - 1 - i] = pages[n - 1 - i], pages[i]
        for i in range(n):
            space.slots.unname(pages[i])
            if self.miss_reasons is not None:
                self.miss_reasons.uncount(pages[i])
        self.spaces.close(space)

    def clear(self):
        """Forget every page; counters stay, and so does what callers hold. MemoryError: nothing has changed."""
        self.clean_up()
        cdef PrefixIndex other = self.like()
        self.swap(other)    # `other` now has the old names, whose finalisers run when it is dropped

    cdef int swap(self, PrefixIndex other) except -1:
        cdef Slots slots
        cdef int32_t page
        for slots in self.kinds:
            for page in range(<int32_t>slots.pool.num_blocks):
                if slots.pages[page].named:
                    slots.unname(page)
                    slots.release_pages(&page, 1)
        self.trie, other.trie = other.trie, self.trie
        self.miss_reasons, other.miss_reasons = other.miss_reasons, self.miss_reasons
        self.kinds, other.kinds = other.kinds, self.kinds
        self.spaces, other.spaces = other.spaces, self.spaces
        return 0

    # -- pages that wait for their content ------------------------------------------------------------------

    def waiting(self, tokens, name=None):
        """The pages of a match, the one that it ends inside of included, that wait for their content, int32."""
        cdef Space space = self.spaces.find(name)
        if space is None or space.slots.num_waiting == 0:
            return np.empty(0, np.int32)
        found = self.find(tokens, name)
        pages = found.pages if found.tail < 0 else np.append(found.pages, np.int32(found.tail))
        return pages[space.slots.records(pages)["waits"] != 0]

    def forget(self, tokens, name, int32_t page, Py_ssize_t least=-1):
        """Forget a page of a match of `tokens`, and all that continues it.

        The tokens before it become an entry if they are at least `least` and in no other entry; -1: they are dropped.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens), bad, values
        self.clean_up()
        cdef Space space = self.spaces.find(name)
        found = self.find(ids, name)
        cdef Py_ssize_t length = [*found.pages.tolist(), found.tail].index(page) * self.trie.table.page_size
        cdef Claim claim = space.slots.claim_of(self.trie.table.num_pages)
        bad = np.concatenate([ids[:length], space.slots.tokens_of(np.array([page]))[0]])
        values = self.trie.prune(space.root, bad)
        claim.data.n = values.shape[0]
        memcpy(claim.data.pages, int32s(values), values.shape[0] * sizeof(int32_t))
        cdef walk_t at = self.trie.walk(space.root, uint32s(ids), length)
        cdef const node_t *last = &self.trie.table.nodes[at.node]
        if self.entries and length and last.end == length and last.child < 0 and not last.marked:
            if 0 <= least <= length:
                self.trie.table.mark(at.node, True)
            else:
                self.cut_entry(at.node, claim)
        self.unname_claimed(space, claim)

    # -- reports --------------------------------------------------------------------------------------------

    @property
    def reasons(self):
        """How many lookups stopped for each of `REASONS`."""
        return {name: self.counts[i] for i, name in enumerate(REASONS)}

    @property
    def nbytes(self):
        """Bytes of the index: records of all pages, the trie, and hashes of pages evicted last."""
        size = self.trie.nbytes + sum(slots.nbytes for slots in self.kinds)
        return size if self.miss_reasons is None else size + self.miss_reasons.nbytes

    def check(self):
        """Verify every invariant; AssertionError names the broken one."""
        cdef Slots slots
        cdef Space space
        cdef Py_ssize_t id, parked = 0, pins = 0
        self.clean_up()
        self.trie.check()
        self.spaces.check()
        for slots in self.kinds:
            slots.check()
            named = [self.trie.all_values(root) for root, space in self.spaces.of_root.items() if space.slots is slots]
            named = np.sort(np.concatenate([np.empty(0, np.int32), *named]))
            records = slots.records()
            assert named.tolist() == records["named"].nonzero()[0].tolist(), "prefix index: the trie names other pages"
            if self.miss_reasons is not None:
                self.miss_reasons.check(records[named])
            parked += np.count_nonzero(records["parked"] >= 0)
        for id in range(self.trie.table.used):
            pins += self.trie.table.nodes[id].pins if self.trie.table.nodes[id].begin >= 0 else 0
        assert parked == pins, "prefix index: a parked leaf is in no page's record"
        if self.miss_reasons is not None:
            assert sum(self.counts) == self.misses + self.short, "prefix index: reasons do not add up"
            assert self.hits * self.trie.table.page_size <= self.hit_tokens, "prefix index: hits do not add up"
        assert self.hit_tokens <= self.lookup_tokens, "prefix index: more tokens found than looked up"


def load(parts):
    """Name the pages that a file has in indices that are empty, all or none; the pages wait for their content.

    Args:
        parts: of each index, `(index, texts, claims, sources)`. `texts` are `(name, slots, tokens, pages)`, the text
            used last at the end; the `claims` are on all their pages, each on those of one `Slots`, and released
            then; the `sources` are what to fetch the content of each from.

    Raises:
        MemoryError: nothing has changed.
    """
    cdef PrefixIndex index, empty
    cdef MissReasons before, after
    empties = [(<PrefixIndex?>index).like() for index, *_ in parts]
    try:
        for index, texts, _, _ in parts:
            for name, slots, tokens, pages in texts:
                index.insert(tokens, slots.share(pages), name, None, slots, True)
    except BaseException:
        for (index, *_), empty in zip(parts, empties):
            before, after = index.miss_reasons, empty.miss_reasons
            if before is not None:    # what was evicted earlier stays known
                after.ghosts, after.ring, after.place = before.ghosts, before.ring, before.place
            index.swap(empty)
        raise
    for *_, claims, sources in parts:
        for claim, source in zip(claims, sources):
            if claim.slots.num_waiting:
                claim.slots.source = source
            claim.release()
