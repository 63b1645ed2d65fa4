"""Subjects of the prefix caches."""

import dataclasses

import numpy as np
from subjects.structures import nodes
from subjects.subject import BLOCK, LAYERS, Subject, plain

from kvcache import CachedKvState, KvCache, PrefixCache, PrefixCacheConfig, PrefixKvCache


class Prefix(Subject):
    """Almost full, with a shared prefix, a state that a caller holds, and a second namespace."""

    formats = "f32"
    evicts = True

    def _build(self):
        slot = 2 * LAYERS * 16 * 4 if self.formats == "f32" else 2 * LAYERS * (16 // 2 + 4)
        cache = PrefixKvCache(PrefixCacheConfig(max_entries=5, max_memory_bytes=700 * slot, dtype=self.formats))
        self.text = np.arange(2000, dtype=np.uint32)
        self._put(cache, self.text[:200])
        self._put(cache, np.r_[self.text[:100], self.text[:150]])
        self._put(cache, self.text[7:150], "other")
        self.held = cache.lookup(self.text[:180])
        return cache

    @staticmethod
    def _put(cache, tokens, name=None):
        layers = [np.cumsum(np.repeat(tokens.astype(np.float32) + i, 16)) / 1e6 for i in range(LAYERS)]
        cache.store_snapshot(tokens, CachedKvState(layers, layers, len(tokens)), name)

    def _state(self):
        it, content = self.it, {}
        for space in it._index.namespaces():
            for leaf in it._index.trie.leaf_ids():
                top, tokens, slots = it._index.trie.path(leaf)
                if top == space.root:
                    data = [space.slots.rows.read(s, layer, slots) for s in (0, 1) for layer in range(LAYERS)]
                    content[space.name, tokens.tobytes()] = plain([it._index.trie.is_marked(leaf), data])
        leases = sum(np.count_nonzero(kind.counts()) for kind in it._index.kinds)
        return content, it.stats(), leases, nodes(it._index.trie)[1:4]

    def store(self):
        self._put(self.it, self.text[50:250])

    def store_longer(self):
        self._put(self.it, self.text[:300])

    def store_and_evict(self):
        self._put(self.it, self.text[10:510])

    def store_in_a_new_namespace(self):
        self._put(self.it, self.text[:100], "new")

    def lookup(self):
        self.it.lookup(self.text[:190])

    def lookup_nothing(self):
        self.it.lookup(self.text[1000:])

    def read_what_is_held(self):
        _ = self.held[1].keys, self.held[1].values

    def restore(self):
        self.it.restore(self.held[1], KvCache(LAYERS, 300, 16))

    def remove(self):
        self.it.remove(self.text[:200])

    def clear(self):
        self.it.clear()


class PackedPrefix(Prefix):
    formats = "q4"
    store = Prefix.store
    store_longer = Prefix.store_longer
    store_and_evict = Prefix.store_and_evict
    read_what_is_held = Prefix.read_what_is_held


def block_cache(cache):
    """The observable state of a `PrefixCache`."""
    index = cache._index
    stats = dataclasses.replace(cache.stats(), bookkeeping_bytes=0)  # memory may be there, and not in use
    counters = (stats, index.hit_tokens, index.lookup_tokens, dict(index.reasons), cache._slots.counts())
    blocks = {}
    for space in index.namespaces():
        for leaf in index.trie.leaf_ids():
            top, tokens, values = index.trie.path(leaf)
            if top == space.root:
                data = [cache.get_block(int(value)).keys for value in values]
                records = cache._slots.records(values)[["named", "born", "used"]].tolist()
                blocks[space.name, tokens.tobytes()] = plain([values, records, data])
    return blocks, plain(counters), plain(cache._pool.ref_counts()), len(index.trie)


class Blocks(Subject):
    """A full cache; a session and a lookup hold some of it."""

    evicts = True

    def _build(self):
        cache = PrefixCache(48, BLOCK, 1, 1, 8)
        self.text = np.arange(1000, dtype=np.uint32)
        self._put(cache, self.text[:80])
        self._put(cache, np.r_[self.text[:18], self.text[:22]], "b")
        self._put(cache, np.r_[self.text[:20], self.text[:40]])
        self.session = cache.open_session(self.text[:51])
        _, self.found = cache.lookup(self.text[:20])
        return cache

    @staticmethod
    def _put(cache, tokens, name=None, start=0):
        pairs = [([np.full(32, float(i))], [np.full(32, -float(i))]) for i in range(len(tokens) // BLOCK)]
        return cache.store(tokens, start, pairs[start // BLOCK :], name)

    def _state(self):
        return block_cache(self.it)

    @staticmethod
    def _kept(state):
        """All but the counters: a lookup that found its blocks and could not hold them has counted them as used."""
        blocks, counters, references, held = state
        return {key: (value[0], value[2]) for key, value in blocks.items()}, counters[-1], references, held

    def store_and_evict(self):
        self._put(self.it, self.text[300:400])

    def store_on_and_evict(self):
        self._put(self.it, self.text[:120], None, 40)

    def store_in_a_new_namespace_and_evict(self):
        self._put(self.it, self.text[300:400], "c")

    def lookup(self):
        self.it.lookup(self.text[:60].tolist())

    def open_session(self):
        self.it.open_session(self.text[:63])

    def close_session(self):
        self.it.close_session(self.session)

    def release(self):
        self.it.release(self.found[0].index)

    def evict(self):
        self.it.evict(20)

    def clear(self):
        self.it.clear()

    def read(self):
        _ = self.it.get_block(3).keys
