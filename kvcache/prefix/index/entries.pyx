"""`EntryIndex`: a prefix index of whole keys; see entries.pxd."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcache.core.tokens cimport uint32_tokens, uint32s
from kvcache.prefix.index.prefixes cimport PrefixIndex
from kvcache.prefix.index.slots cimport Claim, Slots
from kvcache.prefix.index.spaces cimport Space
from kvcache.trie.entries cimport EntryTrie
from kvcache.trie.nodes cimport NodeTable, node_t
from kvcache.trie.paths cimport walk_t

__all__ = ["EntryIndex"]

cnp.import_array()


cdef class EntryIndex(PrefixIndex):
    """An index over an `EntryTrie`: entries are stored, used, evicted and removed as a whole."""

    def has_entry(self, tokens, name=None):
        """Whether there is an entry of exactly these tokens."""
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        cdef Space space = self.spaces.find(name)
        return space is not None and self.entry(space, ids) >= 0

    cdef int32_t entry(self, Space space, cnp.ndarray ids) noexcept:
        cdef walk_t at = self.trie.walk(space.root, uint32s(ids), ids.shape[0])
        cdef const node_t *node = &self.trie.table.nodes[at.node]
        return at.node if at.length == ids.shape[0] == node.end and node.marked else -1

    def lease(self, tokens, name=None, Py_ssize_t least=1, bint whole=False):
        """Look up `tokens` and hold the match: a `Claim` on its tokens; None if fewer than `least` match.

        The entry that serves the match counts as used. With `whole`, only entries that begin `tokens` match.
        """
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        self.clean_up()
        cdef Space space = self.spaces.find(name)
        cdef walk_t at = walk_t(node=-1, length=0)
        cdef Claim claim = None
        if space is not None:
            claim = self.matched(space, ids, &at)
            if whole:
                at = (<EntryTrie>self.trie).entry_before(at)
        if at.length >= max(1, least):
            claim.data.held = claim.data.n = at.length
            space.slots.keep(claim.data, 0)
            self.trie.table.stamp_path((<EntryTrie>self.trie).serving(at.node))
            self.hits += 1
            self.hit_tokens += at.length
        else:
            self.misses += 1
            claim = None
        self.lookup_tokens += ids.shape[0]
        return claim

    def insert(self, tokens, Claim fresh not None, name=None, Claim head=None, Slots slots=None,
               bint waits=False, int64_t most_entries=-1):
        """As of `PrefixIndex`, as an entry.

        Args:
            most_entries: while there are more, unmark entries that this one extends, the longest first; -1: no limit.
        """
        cdef NodeTable table = self.trie.table
        cdef int32_t node = PrefixIndex.insert(self, tokens, fresh, name, head, slots, waits), last = node
        while most_entries >= 0 and table.num_entries > most_entries and table.nodes[node].parent >= 0:
            node = table.nodes[node].parent
            self.evictions += table.nodes[node].marked
            table.num_entries -= table.nodes[node].marked
            table.nodes[node].marked = 0
        return last

    def remove(self, tokens, name=None):
        """Forget the entry of exactly these tokens; a `Claim` on the slots that it alone needed, or None."""
        cdef cnp.ndarray ids = uint32_tokens(tokens)
        self.clean_up()
        cdef Space space = self.spaces.find(name)
        cdef int32_t node = -1 if space is None else self.entry(space, ids)
        if node < 0:
            return None
        cdef Claim claim = space.slots.claim_of(ids.shape[0])
        self.cut_entry(node, claim)
        self.unname_claimed(space, claim)
        self.spaces.close(space)
        return claim
