"""`EntryIndex`: the index of a `PrefixKvCache`.

Nothing is pinned: an entry that leaves the trie keeps its slots while a claim holds them.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t

from kvcache.core.tokens cimport uint32_tokens, uint32s
from kvcache.prefix.index.prefixes cimport PrefixIndex
from kvcache.prefix.index.slots cimport Claim
from kvcache.prefix.index.spaces cimport Space
from kvcache.trie.entries cimport EntryTrie
from kvcache.trie.nodes cimport node_t
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

    cdef int32_t entry(self, Space space, cnp.ndarray ids) noexcept:    # its node; -1: there is none
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
        return claim
