"""`PrefixIndex`: the cached pages of each text in each namespace, the claims on them, and the order of eviction.

    name -> Namespace -> root of the trie -> pages -> slots of each group of layers       (slots.pxd draws the last two)

The index has integers only; the contents of slots belong to its owner. Each call checks and converts its arguments
first, which may run the caller's code. It allocates next; then it changes everything in compiled code that cannot fail.
So neither an interrupt nor a failed allocation divides a call, and the deallocation of a claim returns what it held.

Over an `EntryTrie` the index has entries: texts that are stored, used, evicted and removed as a whole, one token to a
page. An entry is evicted even if it is claimed; its pages keep their slots as long as the claim has them.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvcache.core.idmap cimport IdMap
from kvcache.prefix.index.event_buffer cimport CLEARED, FIRST, NEXT, EventBuffer, event_t, is_partial, page_hash
from kvcache.prefix.index.misses cimport MissReasons
from kvcache.prefix.index.slots cimport Claim, Slots
from kvcache.support.shared_numbers cimport shared_int64
from kvcache.support.token_ids cimport int32s, uint32_tokens, uint32s
from kvcache.trie.entries cimport EntryTrie
from kvcache.trie.nodes cimport NodeTable, node_after, node_t
from kvcache.trie.paths cimport own, prune, walk_t
from kvcache.trie.trie cimport TokenTrie

from collections import namedtuple

import numpy as np

from kvcache.errors import InvalidOperationError
from kvcache.prefix.index.event_buffer import EVENT, Noted
from kvcache.prefix.index.misses import REASONS
from kvcache.support.arguments import hash_of

__all__ = ["Match", "Namespace", "PrefixIndex", "load"]

cnp.import_array()

# length: tokens matched; pages: the full ones, int32; tail: a page that holds the tokens after these, -1: none;
# is_entry: whether there is an entry of exactly these tokens
Match = namedtuple("Match", ("length", "pages", "tail", "is_entry"))


cdef struct match_t:
    walk_t at             # the end of the match, whatever groups of layers have it
    walk_t entry          # of the longest entry that begins it
    Py_ssize_t cached     # its full pages
    Py_ssize_t usable     # how many of these, from the first on, every group has what it needs of
    int32_t tail          # a page that holds the tokens after all these; -1: none


cdef class Namespace:
    """A namespace: its name, its slots and its root in the trie."""

    cdef readonly object name
    cdef readonly Slots slots
    cdef readonly int32_t root
    cdef uint64_t key      # hash of the name
    cdef uint64_t salt     # of the hashes of its pages in events
    cdef readonly int64_t number    # in events


cdef uint64_t key_of(object name) except? 0:
    """The hash of a namespace's name; TypeError if it has none."""
    try:
        return <uint64_t>hash(name)
    except TypeError:
        return <uint64_t>hash_of(name, "namespace")    # which raises, in words


@cython.auto_pickle(False)
cdef class PrefixIndex:
    """A trie per namespace over the pages of a `Slots`, or of several where namespaces differ in shape.

    Args:
        trie: empty. An `EntryTrie` keeps whole keys, with one token to a page.
        slots: of every namespace; None: the first pages that are inserted in one say which.
        most_ghosts: number of evicted pages to remember, for the reasons of misses; None: no reasons are counted.
    """

    cdef readonly TokenTrie trie
    cdef readonly list kinds          # the `Slots` in use; with `slots`, that one
    cdef Slots slots                  # of all namespaces; None: they differ
    cdef readonly dict by_name        # name -> Namespace
    cdef readonly dict by_root        # root -> Namespace
    cdef Namespace current            # the namespace of this call, or of the last one; None: there was none
    cdef bint entries                 # whether the trie marks whole keys
    cdef MissReasons miss_reasons     # why lookups missed; None: no reasons are counted
    cdef readonly EventBuffer events    # what was stored and removed; None: nobody reads that
    cdef readonly shared_int64 clock       # counts uses
    cdef readonly shared_int64 hits        # pages found; of entries: lookups that found something
    cdef readonly shared_int64 misses      # lookups that stopped before the last full page; that found nothing
    cdef readonly shared_int64 hit_tokens    # of matches, the first ones of a page that a claim ends inside of included
    cdef readonly shared_int64 lookup_tokens    # asked for
    cdef readonly shared_int64 evictions   # pages; entries

    def __init__(self, TokenTrie trie not None, Slots slots=None, most_ghosts=None):
        self.trie, self.slots, self.entries = trie, slots, isinstance(trie, EntryTrie)
        self.kinds, self.by_name, self.by_root = [] if slots is None else [slots], {}, {}
        if most_ghosts is not None:
            self.miss_reasons = MissReasons(slots, most_ghosts)

    def __len__(self):
        """Pages, or entries, that are cached; asked for without the lock too."""
        with cython.critical_section(self):    # of `empty`
            return self.trie.table.num_entries if self.entries else self.trie.table.num_pages

    # -- namespaces -----------------------------------------------------------------------------------------

    cdef int clean_up(self) except -1:
        """End the claims that are over; forget the last call's namespace and the slots that have no pages any more.

        A name is forgotten in the call after the one that took its last page, since that runs `__hash__` and `__eq__`
        of the caller's name, which may raise.
        """
        cdef Slots slots
        for slots in self.kinds:
            slots.release_dropped()
        if self.current is not None and self.is_vacant(self.current):
            self.by_name.pop(self.current.name, None)
            self.by_root.pop(self.current.root, None)
            self.trie.table.give(self.current.root)
            if self.events is not None:
                self.events.left(self.current.number)
        self.current = None
        if self.slots is None and self.kinds:
            self.kinds = [slots for slots in self.kinds if slots.pool.num_used]

    cdef bint is_vacant(self, Namespace space) noexcept:
        return self.trie.table.nodes[space.root].child < 0

    cpdef Namespace namespace(self, object name):
        """The namespace of a name; None: nothing is cached in it."""
        key_of(name)
        cdef Namespace space = self.by_name.get(name)
        return None if space is None or self.is_vacant(space) else space

    def namespaces(self):
        """The namespaces that have something cached."""
        return [space for space in self.by_root.values() if not self.is_vacant(space)]

    # -- match ----------------------------------------------------------------------------------------------

    cdef Claim matched(self, cnp.ndarray ids, object name, match_t *found):
        """A claim that has the pages of the longest match, room for one more, and no references; None: no slots yet."""
        self.clean_up()
        cdef Namespace space = self.namespace(name)
        cdef Slots slots = self.slots if space is None else space.slots
        self.current = space
        found.at = found.entry = walk_t(node=-1, length=0)
        if space is not None:
            found.at = self.trie.walk(space.root, uint32s(ids), ids.shape[0])
        if self.entries:
            found.entry = (<EntryTrie>self.trie).entry_before(found.at)
        found.cached, found.usable = found.at.length // self.trie.table.page_size, 0
        found.tail = -1 if slots is None or slots.groups else self.trie.partial(found.at)
        cdef Claim claim = None if slots is None else slots.claim_of(found.cached + 1)
        if claim is not None:
            self.trie.gather(found.at, claim.data.pages)
            found.usable = slots.usable(claim.data.pages, found.cached)
        return claim

    def find(self, tokens, name=None):
        """The cached part of `tokens`, a `Match`; counts as no use."""
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef match_t found
        cdef Claim claim = self.matched(ids, name, &found)
        pages = np.empty(0, np.int32) if claim is None else claim.first(found.usable)
        length = found.at.length if found.tail >= 0 else found.usable * self.trie.table.page_size
        return Match(length, pages, found.tail, found.entry.length == ids.shape[0] > 0)

    def claim(self, tokens, name=None, bint whole=False):
        """Look up `tokens` and hold the match: a `Claim` on its full pages and on the page that it ends inside of.

        Counts as a use of the pages, and in the statistics. With `whole`, the match has full pages alone.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef uint64_t key = key_of(name)
        cdef match_t found
        cdef Claim claim = self.matched(ids, name, &found)
        cdef int32_t *pages = claim.data.pages
        cdef Py_ssize_t size = self.trie.table.page_size, n = ids.shape[0], held = found.usable, i
        if held:
            self.trie.table.stamp_path(self.trie.at_depth(found.at.node, held * size))
            claim.slots.keep(claim, held)
        # Nothing fails from here on.
        self.clock += 1
        for i in range(held):
            claim.slots.pages[pages[i]].used = self.clock
        if self.miss_reasons is not None:
            self.miss_reasons.count(key, uint32s(ids), n, pages, held, found.cached, found.tail >= 0)
        claim.data.held = held
        if found.tail >= 0 and not whole:
            pages[held] = claim.tail = found.tail
            claim.data.n, claim.tail_tokens = held + 1, found.at.length - held * size
            claim.slots.pool.retain_(found.tail)
        self.hits += held
        self.hit_tokens += held * size + claim.tail_tokens
        self.lookup_tokens += n
        self.misses += (held + 1) * size <= n    # a prompt shorter than a page is neither a hit nor a miss
        return claim

    def head(self, tokens, name=None):
        """A `Claim` on all cached pages of `tokens`, whatever groups have them; counts as a use. None: no page."""
        cdef match_t found
        cdef Claim claim = self.matched(uint32_tokens(tokens), name, &found)
        if found.cached == 0:
            return None
        self.trie.table.stamp_path(self.trie.at_depth(found.at.node, found.cached * self.trie.table.page_size))
        claim.slots.keep(claim, found.cached)
        return claim

    # -- entries --------------------------------------------------------------------------------------------

    def lease(self, tokens, name=None, Py_ssize_t least=1, bint whole=False):
        """Look up `tokens` and hold the match: a `Claim` on its tokens; None if fewer than `least` match.

        The entry that serves the match counts as used. With `whole`, only entries that begin `tokens` match.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef match_t found
        cdef Claim claim = self.matched(ids, name, &found)
        cdef walk_t at = found.entry if whole else found.at
        self.lookup_tokens += ids.shape[0]
        if at.length < max(1, least):
            self.misses += 1
            return None
        claim.data.held = at.length
        claim.slots.keep(claim, at.length)
        self.trie.table.stamp_path((<EntryTrie>self.trie).serving(at.node))
        self.hits += 1
        self.hit_tokens += at.length
        return claim

    def remove(self, tokens, name=None):
        """Forget the entry of exactly these tokens; a `Claim` on the slots that it alone needed, or None."""
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef match_t found
        cdef Claim claim = self.matched(ids, name, &found)
        if found.entry.length < max(1, ids.shape[0]):
            return None
        claim.data.n = self.trie.cut(found.entry.node, claim.data.pages)
        self.unname_claimed(claim)
        return claim

    # -- insert, evict and forget ---------------------------------------------------------------------------

    def insert(self, tokens, Claim fresh not None, name=None, Claim head=None, source=None):
        """Name the pages of `fresh`, which cover exactly what `tokens` have after those of `head`.

        A page that is cached already stays; it takes the slots of those groups that it has none in.

        Args:
            head: from `head` of the same tokens, or of the first of them; None: there is none.
            source: what the content of the pages is fetched from; None: they have it.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef uint64_t key = key_of(name)
        cdef Slots slots = fresh.slots
        cdef Py_ssize_t old = 0 if head is None else head.data.n, n = old + fresh.data.n, existing = 0, i
        cdef Py_ssize_t size = self.trie.table.page_size
        if ids.shape[0] != n * size or n == 0:
            raise ValueError(f"tokens: expected {n * size}, those of {n} pages, got {ids.shape[0]}")
        self.clean_up()
        cdef Namespace space = self.namespace(name)
        if space is None:
            space = Namespace.__new__(Namespace)
            space.name, space.slots, space.key = name, slots, key
            if self.events is not None:
                space.number = self.events.begin_space(name, &space.salt)
            space.root = self.trie.table.new_root()
            self.current = space    # if this call fails, the next one forgets it
            self.by_root[space.root] = self.by_name[name] = space
        if space.slots is not slots or slots is not (self.slots or slots) or (old and head.slots is not slots):
            raise ValueError("fresh: expected pages of the namespace's slots, got others")
        if slots not in self.kinds:
            self.kinds.append(slots)
        cdef cnp.ndarray path = np.empty(n, np.int32)
        cdef int32_t *values = int32s(path)
        if old:
            memcpy(values, head.data.pages, old * sizeof(int32_t))
        memcpy(values + old, fresh.data.pages, (n - old) * sizeof(int32_t))
        for i in range(old, n):    # no prompt finds these pages yet
            memcpy(slots.tokens + values[i] * size, uint32s(ids) + i * size, size * sizeof(uint32_t))
        if self.miss_reasons is not None:
            self.miss_reasons.cached.reserve(self.miss_reasons.cached.used + n - old)
        cdef int32_t node = self.trie.put(space.root, uint32s(ids), n * size, values, &existing)
        # Nothing fails from here on.
        if existing > old:
            self.trie.gather(walk_t(node=node, length=n * size), values)
            for i in range(old, existing):
                slots.fill(values[i], fresh.data.pages[i - old])
        self.clock += 1
        for i in range(existing, n):
            slots.name_(values[i], self.clock, source is not None)
            if self.miss_reasons is not None:
                self.miss_reasons.add(values[i], values[i - 1] if i else -1, uint32s(ids) + i * size)
            if self.events is not None:
                self.events.stored(
                    NEXT if i else FIRST, page_hash(space.salt, slots.pages[values[i]].text),
                    page_hash(space.salt, slots.pages[values[i - 1]].text) if i else 0, space.number,
                    uint32s(ids) + i * size,
                )
            if i < old:    # it had left the trie, and the claim has kept it
                slots.pool.retain_(values[i])
        if source is not None and slots.num_waiting:
            slots.source = source
        fresh.data.n = max(0, existing - old)
        if self.entries:
            self.trie.table.mark(node, True)

    def evict(self, Py_ssize_t count=1):
        """Evict up to `count` pages, or one entry: a `Claim` on them with `name` and `tokens`; None: nothing to evict.

        `tokens` is the text that ends with these pages. They are free once the claim is released, and readable before.
        """
        self.clean_up()
        cdef int32_t leaf = self.trie.table.leaves.top()
        while leaf >= 0 and not self.entries and self.slots.park(self.trie, leaf):
            leaf = self.trie.table.leaves.top()
        if leaf < 0 or count <= 0:
            return None
        root, tokens, values = self.trie.path(leaf)
        self.current = self.by_root[root]
        cdef Claim claim = self.current.slots.claim_of(len(values))
        cdef const int32_t *last = int32s(values) + len(values) - 1
        cdef Py_ssize_t n = 0, i
        claim.name, claim.tokens = self.current.name, tokens
        if self.entries:
            n = self.trie.cut(leaf, claim.data.pages)
        else:
            while n < min(count, self.trie.table.pages(leaf)) and self.slots.pages[(last - n)[0]].pins == 0:
                n += 1
            self.trie.table.shrink(leaf, n, claim.data.pages)
        claim.data.n = n
        self.evictions += 1 if self.entries else n
        for i in range(n if self.miss_reasons is not None else 0):
            self.miss_reasons.remember(self.current.key, claim.data.pages[i])
        self.unname_claimed(claim)
        return claim

    cdef int32_t own_node(self, tokens, name, Py_ssize_t after, int32_t *low) except -2:
        """The node of which all below belongs to one text behind its first `after` tokens, see trie/paths.pxd."""
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef match_t found
        cdef Py_ssize_t size = self.trie.table.page_size
        if self.matched(ids, name, &found) is None or found.cached == 0:
            return -1
        return own(self.trie.table, found.at, ids.shape[0], (after + size - 1) // size * size, low)

    def demote(self, tokens, name=None, Py_ssize_t after=0):
        """Let the pages that only the text of `tokens` has be evicted before all others, unless it is used again.

        Pages of its first `after` tokens stay as they are. Pages behind the text are its own if no other text has them.

        Returns:
            The text to the end of these pages, and the number of its tokens before them; None: there are none.
        """
        cdef int32_t low = -1, top = self.own_node(tokens, name, after, &low)
        if top < 0:
            return None
        _, text, _ = self.trie.path(low)
        cdef Py_ssize_t size = self.trie.table.page_size, begin = self.trie.table.nodes[top].begin
        self.trie.table.sink(top)
        return text, begin // size * size

    def discard(self, tokens, name=None, Py_ssize_t after=0):
        """Forget the pages that `demote` of the same arguments is about, but for those that are held and those before.

        Returns:
            As `demote`, and a `Claim` on the pages that were forgotten.
        """
        cdef int32_t low = -1, top = self.own_node(tokens, name, after, &low), id
        if top < 0:
            return None
        _, text, _ = self.trie.path(low)
        cdef NodeTable table = self.trie.table
        cdef Py_ssize_t size = table.page_size, begin = table.nodes[top].begin // size * size, n, count
        cdef Claim claim = self.current.slots.claim_of(table.num_pages)
        cdef int32_t *pages = claim.data.pages
        cdef const int32_t *last
        found, id = [], top
        while id >= 0:
            found.append(id)
            id = node_after(table.nodes, id, top)
        for id in reversed(found):    # an end of a text, or what it hung on, may be gone
            if table.nodes[id].begin < 0 or table.nodes[id].child >= 0 or table.nodes[id].pins:
                continue
            count = table.pages(id)
            last, n = table.values(id) + count - 1, 0
            while n < count and claim.slots.pages[(last - n)[0]].pins == 0:
                n += 1
            if n:
                table.shrink(id, n, pages + claim.data.n)
            claim.data.n += n
        for n in range(claim.data.n if self.miss_reasons is not None else 0):
            self.miss_reasons.remember(self.current.key, pages[n])
        self.unname_claimed(claim)
        return text, begin, claim

    cdef void unname_claimed(self, Claim claim) noexcept:
        """Note that the trie does not name the claim's pages any more, which it returned last first."""
        cdef Py_ssize_t i, n = claim.data.n
        cdef int32_t *pages = claim.data.pages
        for i in range(n // 2):
            pages[i], pages[n - 1 - i] = pages[n - 1 - i], pages[i]
        for i in range(n):
            claim.slots.unname(pages[i])
            if self.miss_reasons is not None:
                self.miss_reasons.remove(pages[i])
            if self.events is not None:
                self.events.removed(
                    page_hash(self.current.salt, claim.slots.pages[pages[i]].text), self.current.number,
                    claim.slots.tokens + pages[i] * claim.slots.page_size,
                )

    def clear(self):
        """Forget every page; counters stay, and so does what callers hold. MemoryError: nothing has changed."""
        self.clean_up()
        trie, cached = self.new_trie(), IdMap()
        if self.miss_reasons is not None:
            self.miss_reasons.evicted, self.miss_reasons.before = IdMap(), IdMap()
        self.empty(trie, cached)

    cdef TokenTrie new_trie(self):
        return type(self.trie)(self.trie.table.page_size, self.trie.table.policy)

    cdef void empty(self, TokenTrie trie, IdMap cached) noexcept:
        """Forget every page; an empty trie and an empty map of cached texts take the place of the old ones."""
        cdef Slots slots
        cdef int32_t page
        for slots in self.kinds:
            for page in range(slots.pool.num_blocks):
                if slots.pages[page].named:
                    slots.unname(page)
                    slots.release_pages(&page, 1)
        if self.miss_reasons is not None:
            self.miss_reasons.cached = cached
        if self.events is not None:
            self.events.cleared()
        with cython.critical_section(self):
            self.trie = trie
        self.current = None
        self.by_name.clear()
        self.by_root.clear()    # last, since this runs the finalisers of names

    def forget(self, tokens, name, int32_t page, Py_ssize_t least=-1):
        """Forget a page of a match of `tokens`, and all that continues it.

        The tokens before it become an entry if they are at least `least` and in no other entry; -1: they are dropped.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        found = self.find(ids, name)
        cdef Py_ssize_t length = [*found.pages.tolist(), found.tail].index(page) * self.trie.table.page_size
        cdef Claim claim = self.current.slots.claim_of(self.trie.table.num_pages)
        cdef cnp.ndarray bad = np.concatenate([ids[:length], claim.slots.tokens_of([page])[0]])
        cdef walk_t at = self.trie.walk(self.current.root, uint32s(bad), bad.shape[0])
        claim.data.n = prune(self.trie.table, self.trie.at_depth(at.node, at.length), claim.data.pages)
        at = self.trie.walk(self.current.root, uint32s(bad), length)
        cdef const node_t *last = &self.trie.table.nodes[at.node]
        if self.entries and length and last.end == length and last.child < 0 and not last.marked:
            if 0 <= least <= length:
                self.trie.table.mark(at.node, True)
            else:
                claim.data.n += self.trie.cut(at.node, claim.data.pages + claim.data.n)
        self.unname_claimed(claim)
        claim.release()  # so that a caller that makes room this way finds it

    # -- pages that wait for their content ------------------------------------------------------------------

    def fetch_waiting(self, tokens, name=None, Py_ssize_t least=-1):
        """Read the pages of a match of `tokens` that wait; forget damaged ones and all that continues them.

        Args:
            least: as in `forget`.
        """
        cdef Namespace space
        while (space := self.namespace(name)) is not None and space.slots.num_waiting:
            found, slots = self.find(tokens, name), space.slots
            pages = found.pages if found.tail < 0 else np.append(found.pages, np.int32(found.tail))
            waiting = pages[slots.records(pages)["waits"] != 0]
            if len(waiting) == 0:
                return
            if slots.source is not None:
                slots.arrived(slots.source.fetch(waiting))
            damaged = waiting[slots.records(waiting)["waits"] != 0]
            if len(damaged):
                self.forget(tokens, name, damaged[0], least)

    def fetch_all(self, Py_ssize_t least=-1):
        """Read the content of every page that waits, and forget what is damaged; `least` as in `forget`."""
        if any(slots.num_waiting for slots in self.kinds):
            names = {space.root: space.name for space in self.namespaces()}
            for root, tokens, _ in [self.trie.path(leaf) for leaf in self.trie.leaf_ids()]:
                self.fetch_waiting(tokens, names[root], least)

    # -- events ---------------------------------------------------------------------------------------------

    def record(self, salt_of, Py_ssize_t capacity):
        """Record what is stored, removed and cleared from now on: an `EventBuffer`, see there for the arguments.

        Raises:
            InvalidOperationError: something is cached, or was recorded before.
        """
        if len(self) or self.events is not None:
            raise InvalidOperationError("expected an index that is empty and has no events, got another one")
        if self.entries or self.slots is None or self.miss_reasons is None:
            raise ValueError("index: expected one of pages in one kind of slots, with miss reasons, got another one")
        self.clean_up()
        self.events = EventBuffer(self.trie.table.page_size, salt_of, capacity)
        return self.events

    def snapshot(self):
        """All that is cached as `Noted`, behind a record of a clear, in place of the records of the ring.

        Pages come behind those before them. MemoryError: nothing has changed.
        """
        self.clean_up()
        spaces = self.namespaces()
        cdef Py_ssize_t n = self.trie.table.num_pages + 1, size = self.trie.table.page_size
        events, tokens = np.empty(n, EVENT), np.empty((n, size), np.uint32)
        cdef event_t *records = <event_t *>cnp.PyArray_DATA(events)
        salts = {space.number: self.events.salts[space.number] for space in spaces}
        records[0] = event_t(page=0, parent=0, space=0, kind=CLEARED)
        n = 1
        for space in spaces:
            n = self.copy_pages(space, records, uint32s(tokens), n)
        self.events.restart(set(salts))
        return Noted(events[:n], tokens[:n], salts)

    cdef Py_ssize_t copy_pages(self, Namespace space, event_t *records, uint32_t *tokens, Py_ssize_t n) noexcept:
        """Write the records of a namespace's pages from record `n` on; returns where the next one follows."""
        cdef NodeTable table = self.trie.table
        cdef Slots slots = space.slots
        cdef Py_ssize_t size = table.page_size, i
        cdef int32_t id = node_after(table.nodes, space.root, space.root), above
        cdef int32_t *values
        cdef uint64_t before
        while id >= 0:
            values, above = table.values(id), table.nodes[id].parent
            while above != space.root and table.pages(above) == 0:
                above = table.nodes[above].parent
            before = 0
            if above != space.root:
                before = page_hash(space.salt, slots.pages[table.values(above)[table.pages(above) - 1]].text)
            for i in range(table.pages(id)):
                if is_partial(slots.tokens + values[i] * size, size):
                    continue
                records[n].kind = NEXT if i or above != space.root else FIRST
                records[n].page = page_hash(space.salt, slots.pages[values[i]].text)
                records[n].parent, records[n].space, before = before, space.number, records[n].page
                memcpy(tokens + n * size, slots.tokens + values[i] * size, size * sizeof(uint32_t))
                n += 1
            id = node_after(table.nodes, id, space.root)
        return n

    # -- reports --------------------------------------------------------------------------------------------

    @property
    def reasons(self):
        """How many lookups stopped for each of `REASONS`, if that is counted."""
        return {} if self.miss_reasons is None else dict(zip(REASONS, self.miss_reasons.counts))

    @property
    def nbytes(self):
        """Bytes of the index: records of all pages, the trie, hashes of pages evicted last, and the ring of events."""
        size = self.trie.nbytes + sum(slots.nbytes for slots in self.kinds)
        size += 0 if self.events is None else self.events.nbytes
        return size if self.miss_reasons is None else size + self.miss_reasons.nbytes

    def check(self):
        """Verify every invariant; AssertionError names the broken one."""
        self.clean_up()
        self.trie.check()
        spaces = self.namespaces()
        assert self.by_root == {space.root: space for space in spaces}, "prefix index: a namespace without pages"
        assert self.by_name == {space.name: space for space in spaces}, "prefix index: names differ"
        assert self.trie.roots() == sorted(self.by_root), "prefix index: roots differ"
        parked = 0
        for slots in self.kinds:
            slots.check()
            records = slots.records()
            named = [page for space in spaces if space.slots is slots for page in self.trie.all_values(space.root)]
            assert sorted(named) == records["named"].nonzero()[0].tolist(), "prefix index: the trie names other pages"
            leaves = records["parked"][records["parked"] >= 0].tolist()
            pins = [self.trie.num_pins(node) for node in leaves]
            assert pins == [1] * len(leaves), "prefix index: a parked leaf is not pinned"
            parked += len(leaves)
        assert parked == self.trie.total_pins, "prefix index: a parked leaf is in no page's record"
        assert self.hit_tokens <= self.lookup_tokens, "prefix index: more tokens found than looked up"
        if self.miss_reasons is not None:
            self.miss_reasons.check(self.misses)
        if self.events is not None:
            self.events.check()
            numbers = {space.number for space in spaces}
            assert numbers <= set(self.events.salts), "prefix index: a namespace that readers do not know"


def load(parts):
    """Name the pages that a file has in indices that are empty. If anything fails, nothing has changed.

    Args:
        parts: of each index, `(index, texts)`; `texts` are `(name, tokens, slots, pages, source)`, the text used last
            at the end. The pages are claimed by the caller, and wait for their content.
    """
    cdef PrefixIndex index
    empty = [(part[0], (<PrefixIndex?>part[0]).new_trie(), IdMap()) for part in parts]
    try:
        for index, texts in parts:
            for name, tokens, slots, pages, source in texts:
                index.insert(tokens, slots.share(pages), name, None, source)
    except BaseException:
        for index, trie, cached in empty:
            index.empty(trie, cached)
        raise
