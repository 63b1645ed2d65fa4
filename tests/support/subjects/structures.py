"""Subjects of the structures below the caches: heap, ids, pool, tries, kept tokens."""

import numpy as np
from subjects.subject import BLOCK, Subject, plain

from kvcache.core.block_pool import BlockPool
from kvcache.core.heap import IndexedHeap
from kvcache.core.idmap import IdMap
from kvcache.lists.kept_tokens import KeptTokens
from kvcache.trie.entries import EntryTrie
from kvcache.trie.trie import TokenTrie


class Heap(Subject):
    def _build(self):
        heap = IndexedHeap()
        for id in range(8):
            heap.push(id, id % 3)
        return heap

    def _state(self):
        return sorted((id, self.it.key(id)) for id in range(900) if id in self.it)

    def push(self):
        self.it.push(800, 1.5)


class Ids(Subject):
    def _build(self):
        ids = IdMap()
        for id in range(64):
            ids[id * 977] = id
        return ids

    def _state(self):
        return [(key, self.it[key]) for key in self.it.keys_list()]

    def put(self):
        self.it[10**12] = 5


class Pool(Subject):
    def _build(self):
        pool = BlockPool(2000)
        pool.retain(pool.acquire(700)[:200])
        return pool

    def _state(self):
        it = self.it
        return plain([it.ref_counts(), it.num_free, it.total_allocations, it.total_frees, it.peak_used])

    def new(self):
        BlockPool(2000)

    def acquire(self):
        self.it.acquire(900)

    def retain(self):
        self.it.retain(list(range(600)))

    def release(self):
        self.it.release(list(range(600)))


def nodes(trie):
    """Cached sequences, pins and counters; not the shape of the trie, which may differ."""
    paths = sorted((root, tokens.tolist(), values.tolist()) for root, tokens, values in map(trie.path, trie.leaf_ids()))
    pins = sum(trie.num_pins(id) for id in {*trie.leaf_ids(), *trie.roots()})
    return paths, pins, len(trie), trie.num_entries, trie.roots()


class Trie(Subject):
    def _build(self):
        trie = TokenTrie(BLOCK)
        self.root, other = trie.add_root(), trie.add_root()
        self.text = np.arange(1200, dtype=np.uint32)
        trie.insert(self.root, self.text, np.arange(300, dtype=np.int32))
        fork = np.r_[self.text[:600], self.text[:400]].astype(np.uint32)
        trie.insert(self.root, fork, np.arange(300, 550, dtype=np.int32))
        for i in range(20):
            trie.insert(other, [i] * 8, [600 + 2 * i, 601 + 2 * i])
        return trie

    def _state(self):
        return nodes(self.it)

    def insert_a_fork(self):
        self.it.insert(self.root, np.r_[self.text[:802], self.text[:798]], np.arange(700, 1100))

    def insert_longer(self):
        self.it.insert(self.root, np.r_[self.text, self.text[:800]], np.arange(700, 1200))

    def insert_many(self):
        self.it.insert(self.root, self.text[5:805], np.arange(700, 900))

    def lookup(self):
        self.it.lookup(self.root, self.text[:1100].tolist())

    def touch(self):
        self.it.touch(self.it.match(self.root, self.text)[0], 800)

    def evict_some(self):
        self.it.evict(400)

    def evict_all(self):
        self.it.evict(10_000)

    def remove(self):
        self.it.remove(self.root, self.text)

    def add_root(self):
        self.it.add_root()


class Entries(Subject):
    def _build(self):
        trie = EntryTrie()
        self.root = trie.add_root()
        for n in (400, 800, 600):
            node, _ = trie.insert(self.root, range(n), range(n))
            trie.mark(node)
        node, _ = trie.insert(self.root, [*range(300), *range(500)], range(1000, 1800))
        trie.mark(node)
        return trie

    def _state(self):
        return nodes(self.it)

    def evict_entry(self):
        self.it.evict_entry()

    def remove(self):
        self.it.remove(self.root, range(800))


class List(Subject):
    def _build(self):
        kept = KeptTokens(True)
        kept.append(300, 300, 4, 100)
        kept.add_scores(np.arange(300) % 7.0)
        return kept

    def _state(self):
        return plain([self.it.positions(), self.it.scores(), self.it.next_position])

    def append(self):
        self.it.append(500, 400, 4, 100)

    def evict(self):
        self.it.evict(100, 4, 50)
