"""Subjects of the caches of live sequences: paged, contiguous, managed."""

import numpy as np
from subjects.subject import BLOCK, DIM, HEADS, LAYERS, Subject, plain, rows

from kvcache import CacheManager, EvictionPolicy, EvictionStrategy, KvCache, KVCacheConfig, PagedKvCache, PrefixCache


def sequences(cache):
    """The observable state of a `PagedKvCache`; not an access."""
    table, stats = cache._table, cache.stats()
    seqs = {}
    for id in table.seq_ids():
        runs = table.runs(id)
        data = [cache._store.read(layer, runs) for layer in range(cache.num_layers)]
        seqs[id] = plain([table.info(id), runs, table.run_positions(id), data])
    counters = (stats.total_allocations, stats.total_frees, stats.total_evictions, stats.total_forks)
    return seqs, counters, cache.free_block_count, cache.select_eviction_target(), cache.eviction_strategy


class Paged(Subject):
    """Forks that share their tails, a sequence whose kept tokens are scattered, and no spare row for one more."""

    def _build(self):
        cache = PagedKvCache(120, BLOCK, HEADS, DIM, num_layers=LAYERS, dtype="f32")
        for seq, n in ((1, 30), (2, 41), (3, 82)):
            cache.allocate(seq, n)
            for layer in range(LAYERS):
                cache.write(layer, seq, *rows(n, seq, HEADS, DIM))
        for seq in (11, 12, 13, 14):
            cache.fork(1, seq)
        cache.fork(3, 4)
        cache.keep_tokens(2, range(0, 41, 2))
        return cache

    def _state(self):
        return sequences(self.it)

    def new(self):
        PagedKvCache(900, BLOCK, HEADS, DIM, num_layers=LAYERS, dtype="q4").allocate(0, 100)

    def allocate(self):
        self.it.allocate(20, 50)

    def allocate_batch(self):
        self.it.allocate_batch(list(range(20, 50)), [1] * 30)

    def adopt(self):
        blocks = self.it.get_sequence(3).block_ids
        self.it.adopt(20, blocks, 82)

    def append(self):
        self.it.append(2, 70)

    def append_to_a_shared_tail(self):
        self.it.append(3, 70)

    def append_batch(self):
        self.it.append_batch([1, 11, 12, 13, 2, 4])

    def append_batch_of_counts(self):
        self.it.append_batch([1, 11, 2, 4], [20, 0, 70, 3])

    def truncate_batch(self):
        self.it.truncate_batch([3, 1, 2], [30, 0, 5])

    def reorder(self):
        self.it.reorder([2, 1, 3, 11, 4], [2, 0, 2, 0, 4])

    def grow(self):
        self.it.grow(100)

    def write_ragged(self):
        self.it.write_ragged(0, [1, 12, 3, 4], [7, 0, 40, 82], *rows(129, 9, HEADS, DIM))

    def fork(self):
        self.it.fork(3, 20)

    def fork_batch(self):
        self.it.fork_batch([3, 1] * 5, list(range(20, 30)))

    def free(self):
        self.it.free(2)

    def free_batch(self):
        self.it.free_batch([2, 4, 11])

    def truncate(self):
        self.it.truncate(3, 30)

    def keep_tokens(self):
        self.it.keep_tokens(3, range(0, 82, 3))

    def compact(self):
        self.it.compact(2)

    def stream(self):
        self.it.apply_streaming_llm(3, 10, 50)

    def write(self):
        self.it.write(1, 3, *rows(82, 9, HEADS, DIM))

    def write_doubles(self):
        self.it.write(1, 2, *rows(15, 9, HEADS, DIM).astype(np.float64))

    def write_batch(self):
        self.it.write_batch(0, [1, 12, 3], *rows(3, 9, HEADS, DIM))

    def read(self):
        self.it.read(1, 3)

    def attention(self):
        queries = rows(25, 9, HEADS * 2, DIM)[0]
        self.it.attention(0, queries, [3, 2], query_lens=[15, 10], return_scores=True)

    def copy_blocks(self):
        self.it.copy_blocks(list(range(0, 30)), list(range(10, 40)))

    def choose_a_strategy(self):
        self.it.with_eviction_strategy(EvictionStrategy.LongestFirst())

    def evict(self):
        self.it.evict()

    def evict_to_threshold(self):
        self.it.evict_to_threshold(0.1)

    def reports(self):
        self.it.block_table([1, 2, 3, 4])
        assert self.it.handle(3).block_table.num_blocks
        self.it.stats()
        self.it.with_eviction_strategy(self.it.eviction_strategy)


class SharedPool(Paged):
    """Prefix caches over the blocks of a paged cache, one of them with a lookup."""

    def _build(self):
        cache = super()._build()
        self.prefixes = [PrefixCache.over(cache), PrefixCache.over(cache, 5)]
        for prefixes in self.prefixes:
            prefixes.adopt(range(80), cache.get_sequence(3).block_ids[:20])
        self.prefixes[0].lookup(range(80))
        return cache

    def _check(self):
        super()._check()
        for prefixes in self.prefixes:
            prefixes.check()

    def _state(self):
        return super()._state(), [(len(prefixes), prefixes.capacity) for prefixes in self.prefixes]

    def grow_twice(self):
        self.it.grow(100)


class CompactShared(Paged):
    """Scattered kept tokens in blocks that another sequence shares: they move to fresh blocks.

    And what was room for longer sequences waits for the next ones.
    """

    def _build(self):
        cache = super()._build()
        cache.fork(2, 20)
        for n in (6, 7, 8):
            cache.allocate(60 + n, n)
        cache.free_batch([68, 67, 66])
        return cache

    def compact(self):
        self.it.compact(2)

    def fork_holes(self):
        self.it.fork(2, 21)

    def fork_batch_holes(self):
        self.it.fork_batch([2, 1, 2], [21, 22, 23])

    def allocate_batch_in_room(self):
        self.it.allocate_batch([21, 22, 23, 24], [1, 5, 40, 2])


class WithResidual(Paged):
    """Rows in f16 beside packed ones: forks that share them, groups that leave, and no free block for more."""

    def _build(self):
        cache = PagedKvCache(
            120, BLOCK, HEADS, DIM, num_layers=LAYERS, dtype="q4", residual_length=12, first_tokens=4
        )
        for seq, n in ((1, 30), (2, 41), (3, 7)):
            cache.allocate(seq, 0)
            cache.append(seq, n)
            for layer in range(LAYERS):
                cache.write(layer, seq, *rows(n, seq, HEADS, DIM))
        for seq in (11, 12, 13):
            cache.fork(1, seq)
        cache.append(2, 1)
        cache.keep_tokens(2, range(0, 42, 2))
        return cache

    def _state(self):
        seqs = map(int, self.it.sequence_ids())
        exact = {
            seq: plain([self.it.unpacked_tokens(seq), [self.it.read_unpacked(layer, seq) for layer in range(LAYERS)]])
            for seq in seqs
        }
        return super()._state(), exact

    def allocate_batch(self):
        self.it.allocate_batch(list(range(20, 50)), [2] * 30)

    def adopt(self):
        self.it.adopt(20, self.it.get_sequence(1).block_ids, 30)

    def append(self):
        self.it.append(2, 70)

    def append_batch(self):
        self.it.append_batch([1, 11, 12, 2, 3], [30, 0, 20, 9, 40])

    def truncate_batch(self):
        self.it.truncate_batch([3, 1, 2], [3, 0, 5])

    def fork_batch(self):
        self.it.fork_batch([3, 1, 2] * 5, list(range(20, 35)))

    def reorder(self):
        self.it.reorder([2, 1, 3, 11], [2, 0, 2, 0])

    def keep_tokens(self):
        self.it.keep_tokens(1, range(0, 30, 3))

    def stream(self):
        self.it.apply_streaming_llm(1, 6, 10)

    def write(self):
        self.it.write(1, 11, *rows(30, 9, HEADS, DIM))

    def write_ragged(self):
        self.it.write_ragged(0, [1, 12, 3, 2], [7, 0, 7, 21], *rows(35, 9, HEADS, DIM))

    def pack(self):
        self.it.pack(1, 13)

    def unpack(self):
        self.it.unpack(11, [rows(6, 9, HEADS, DIM)] * LAYERS, [rows(4, 8, HEADS, DIM)] * LAYERS)

    def reserve_unpacked(self):
        self.it.reserve_unpacked(500)

    def attention(self):
        queries = rows(32, 9, HEADS * 2, DIM)[0]
        self.it.attention(0, queries, [1, 3, 2], query_lens=[22, 7, 3], return_scores=True)

    def evict(self):
        self.it.evict()

    def free(self):
        self.it.free(1)


class Live(Subject):
    def _build(self):
        cache = KvCache(LAYERS, 400, 16)
        k, v = rows(300, 1, 16)
        cache.restore_from_snapshot([k] * LAYERS, [v] * LAYERS, 300)
        return cache

    def _state(self):
        snapshot = self.it.snapshot()
        return plain([snapshot.keys, snapshot.values, self.it._writes.lengths])

    def store_kv(self):
        self.it.store_kv(1, np.ones(16), np.ones(16))

    def snapshot(self):
        self.it.snapshot()

    def restore(self):
        k, v = rows(350, 2, 16).astype(np.float64)
        self.it.restore_from_snapshot([k] * LAYERS, [v] * LAYERS, 350)


class Manager(Subject):
    policy = EvictionPolicy.H2O()

    def _build(self):
        manager = CacheManager(KVCacheConfig(400, HEADS, DIM, 4, self.policy))
        for layer in range(LAYERS):
            manager.append(*rows(350, layer, HEADS, DIM), layer_idx=layer)
        manager.update_attention_scores(np.arange(len(manager)) % 5.0)
        return manager

    def _state(self):
        it = self.it
        layers = {i: [it.positions(i), it.attention_scores(i), it.get(range(len(it._layers[i])), i)] for i in it.layers}
        return plain(layers), len(it)

    def append(self):
        self.it.append(*rows(1, 9, HEADS, DIM), layer_idx=1)

    def append_many(self):
        self.it.append(*rows(300, 9, HEADS, DIM), layer_idx=0)

    def append_to_a_new_layer(self):
        self.it.append(*rows(300, 9, HEADS, DIM), layer_idx=2)

    def get(self):
        self.it.get(np.arange(len(self.it))[::-1])

    def attention(self):
        self.it.attention(rows(100, 9, HEADS * 2, DIM)[0], 1, return_scores=True)

    def update_attention_scores(self):
        self.it.update_attention_scores(np.arange(len(self.it)) % 3.0)

    def evict(self):
        self.it.evict(100)


class Pyramid(Manager):
    policy = EvictionPolicy.PyramidKV(3)
    append_many = Manager.append_many
    append_to_a_new_layer = Manager.append_to_a_new_layer
