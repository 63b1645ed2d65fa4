"""Worlds of the caches for `reentry.py`: paged with prefixes over it, prefixes alone, entries, live, managed."""

from contextlib import contextmanager

import numpy as np
import numpy.random  # now, not where a handler may strike
from contents import pairs, state
from reentry import Via, World, pure, release

from kvcache import (
    CachedKvState,
    CacheManager,
    EvictionPolicy,
    EvictionStrategy,
    KvCache,
    KVCacheConfig,
    PagedKvCache,
    PrefixAwarePrefill,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
)

SIZE = 4  # of blocks
DIM = 8


class Prefixes:
    """The calls of a `PrefixCache`, `self.prefix`; the others of a world come beside them.

    Attributes:
        sessions, found: what is held, by sessions and by lookups.
    """

    def _start(self, prefix):
        self.prefix, self.prefill = prefix, PrefixAwarePrefill(prefix)
        self.sessions, self.found = [], []

    def _text(self, tag=None, length=None):
        tag = tag or self.random.choice((1, 2, 3))
        length = length or self.random.choice((3, 8, 13, 22))
        return tag * 1000 + np.arange(length, dtype=np.uint32)

    def prefix_lookup(self, via):
        matched, blocks = self.prefix.lookup(via.tokens(self._text()), via.name(self.random.choice((None, "b"))))
        self.found += blocks
        return matched, [[block.index, block.token_ids] for block in blocks]

    @release
    def prefix_release(self, via):
        self.prefix.release(via.integer(self.found.pop().index))

    def prefix_read_found(self, via):
        block = self.random.choice(self.found)
        return block.keys, block.values, block.memory_bytes

    def prefix_open_session(self, via):
        return self._open(self.prefix.open_session, via, via.name("b")).block_indices

    def _open(self, call, via, *name, tag=None, length=None):
        tag = tag or self.random.choice((1, 2, 3))
        session = call(via.tokens(self._text(tag, length)), *name)
        session.tag = tag
        self.sessions.append(session)
        return session

    def prefix_prepare(self, via):
        return self._open(lambda text: self.prefill.prepare(text)[0], via).matched_prefix_len

    def _closed(self, session):
        claim = session._claim
        self.promises.append((lambda: claim.is_released, "a session is open that was closed"))

    @release
    def prefix_close_session(self, via):
        session = self.sessions.pop()
        self.prefix.close_session(session)
        self._closed(session)

    @release
    def prefix_release_session(self, via):
        session = self.sessions.pop(0)
        self.prefill.release_session(session)
        self._closed(session)

    @release
    def prefix_leave_session(self, via):
        with self.sessions.pop() as session:
            pass
        self._closed(session)

    @release
    def prefix_drop_session(self, via):
        self.sessions.pop()

    def prefix_evict(self, via):
        return self.prefix.evict(via.integer(self.random.choice((1, 3))))

    def prefix_clear(self, via):
        self.prefix.clear()

    def prefix_save(self, via):
        self.prefix.save(self.path / f"{type(self).__name__}", "m")

    def prefix_load(self, via):
        self.prefix_save(via)
        self.prefix.clear()
        return self.prefix.load(self.path / f"{type(self).__name__}", "m")

    @pure
    def prefix_get_block(self, via):
        block = self.prefix.get_block(via.integer(self.random.randrange(12)))
        return block and (block.index, block.token_ids, block.keys)

    @pure
    def prefix_reports(self, via):
        it = self.prefix
        return it.block_ids(), it.pinned_blocks, it.references(), str(it.stats()), str(self.prefill.stats())

    @pure
    def prefix_sizes(self, via):
        it = self.prefix
        return len(it), it.is_empty, it.capacity, it.hits, it.misses, it.evictions, it.hit_rate, it.memory_bytes

    @pure
    def prefix_check(self, via):
        self.prefix.check()

    def _let_go(self):
        self.sessions.clear()
        self.found.clear()
        slots = self.prefix._slots
        for block in range(self.prefix._pool.num_blocks):
            while slots.is_looked_up(block):
                self.prefix.release(block)
        assert self.prefix.pinned_blocks == 0
        assert (slots.counts(references=True) <= 1).all()


def rows(tag, positions, layer):
    """K and V that say whose they are: the last digit of a sequence's id, the position in the text, the layer."""
    k = np.full((len(positions), 1, DIM), tag, np.float32)
    k[..., 1] = np.reshape(positions, (-1, 1))
    k[..., 2] = layer
    return k, k.copy()


class PagedWorld(Prefixes, World):
    """Sequences, forks of them (ids that end alike), blocks adopted (ids from 100 on), a prefix cache over all that."""

    rare = ("prefix_save", "prefix_load")

    def _build(self):
        self.forks = 1000
        self.cache = PagedKvCache(70, SIZE, 1, DIM, num_layers=2, dtype="f32")
        for seq, n in ((1, 9), (2, 14), (3, 22)):
            self.cache.allocate(seq, n)
            for layer in range(2):
                self.cache.write(layer, seq, *rows(seq, range(n), layer))
        self._start(PrefixCache.over(self.cache, 20))
        self.prefix.adopt(self._text(3, 20), self.cache.get_sequence(3).block_ids)
        self.prefix.adopt(self._text(1, 8), self.cache.get_sequence(1).block_ids, "b")
        self._open(self.prefix.open_session, Via(), tag=3, length=13)
        self.found += self.prefix.lookup(self._text(3, 8))[1]
        for source, target in ((1, 11), (3, 13), (2, 12)):
            self.cache.fork(source, target)
        self.cache.keep_tokens(2, range(0, 14, 2))
        self.handles = [self.cache.handle(3), self.cache.handle(11)]
        self.live = self.handles[0].block_table_mut()

    def _seq(self):
        return self.random.choice((1, 2, 3, 11, 12, 13, 21, 22, 23, 101, 103))

    @contextmanager
    def _kept(self, seq):
        """The blocks of a fork of a sequence, which nobody else touches."""
        self.forks += 1
        fork = self.forks
        self.cache.fork(seq, fork)
        try:
            self.cache.pin(fork)
            info = self.cache.get_sequence(fork)
            yield list(info.block_ids)
        finally:
            self.cache.free(fork)

    def _new(self, source):
        return source + self.random.choice((10, 20, 30))

    # -- sequences

    def allocate(self, via):
        self.cache.allocate(via.integer(self._new(self._seq())), via.integer(self.random.choice((0, 3, 9))))

    def allocate_batch(self, via):
        ids = [self._new(self._seq()) for _ in range(3)]
        self.cache.allocate_batch(via.array(ids), via.array([1, 5, 8]))

    def adopt(self, via):
        with self._kept(3) as blocks:
            self.cache.adopt(via.integer(103), via.array(blocks[:3]), via.integer(11))

    def adopt_found(self, via):
        session = self.random.choice(self.sessions)
        self.cache.adopt(100 + session.tag, via.array(session.shared_blocks), session.num_tokens)

    def fork(self, via):
        seq = self._seq()
        self.cache.fork(via.integer(seq), via.integer(self._new(seq)))

    def fork_batch(self, via):
        self.cache.fork_batch(via.array([1, 3, 1]), via.array([41, 43, 51]))

    def swap(self, via):
        tag = self.random.choice((1, 2, 3))
        self.cache.swap(via.integer(tag), via.integer(tag + 10))

    def _freed(self, ids):
        table = self.cache._table
        gone = [(seq, table.uid(seq)) for seq in ids]

        def kept():
            return all(uid < 0 or table.uid(seq) != uid for seq, uid in gone)

        return kept, f"a sequence of {ids} is there that was freed"

    @release
    def free(self, via):
        seq = self._seq()
        promise = self._freed([seq])
        self.cache.free(via.integer(seq))
        self.promises.append(promise)

    @release
    def free_batch(self, via):
        ids = [1, 11] if self.random.random() < 0.5 else [3, 12]
        promise = self._freed(ids)
        self.cache.free_batch(via.array(ids))
        self.promises.append(promise)

    def append(self, via):
        self.cache.append(via.integer(self._seq()), via.integer(self.random.choice((0, 1, 6))))

    def append_batch(self, via):
        self.cache.append_batch(via.array([1, 11, 3, 2]))

    def truncate(self, via):
        self.cache.truncate(via.integer(self._seq()), via.integer(self.random.choice((0, 3, 7))))

    def keep_tokens(self, via):
        self.cache.keep_tokens(via.integer(self._seq()), via.array(range(0, self.random.choice((4, 7)), 2)))

    def apply_streaming_llm(self, via):
        return self.cache.apply_streaming_llm(via.integer(self._seq()), via.integer(2), via.integer(4))

    def compact(self, via):
        self.cache.compact(via.integer(self._seq()))

    @pure
    def contains(self, via):
        return via.integer(3) in self.cache, self.cache.num_sequences, self.cache.sequence_ids()

    @pure
    def get_sequence(self, via):
        return [str(self.cache.get_sequence(via.integer(seq))) for seq in (1, 3, 99)]

    @pure
    def block_table(self, via):
        return self.cache.block_table(via.array([1, 2, 3]))

    @pure
    def reference_counts(self, via):
        return self.cache.reference_counts(via.array([0, 1, 2, 69]))

    @pure
    def reports(self, via):
        it = self.cache
        return (
            it.total_blocks,
            it.used_memory_bytes,
            it.eviction_threshold,
            str(it.eviction_strategy),
            it.needs_eviction,
        )

    @pure
    def stats(self, via):
        stats = self.cache.stats()
        return stats.total_allocations, stats.total_frees, stats.total_forks, stats.peak_blocks_used

    @pure
    def texts(self, via):
        return str(self.cache), repr(self.cache), repr(self.handles[0])

    @pure
    def check(self, via):
        self.cache.check()

    def copy_blocks(self, via):
        with self._kept(3) as blocks:
            self.cache.copy_blocks(via.array(blocks), via.array(blocks))

    # -- who leaves

    def with_eviction_strategy(self, via):
        kinds = (EvictionStrategy.LRU(), EvictionStrategy.LongestFirst(), EvictionStrategy.Priority(4))
        self.cache.with_eviction_strategy(self.random.choice(kinds))

    def with_eviction_threshold(self, via):
        self.cache.with_eviction_threshold(via.number(0.8))

    def set_priority(self, via):
        self.cache.set_priority(via.integer(self._seq()), via.integer(2))

    def pin(self, via):
        self.cache.pin(via.integer(self._seq()))

    def unpin(self, via):
        self.cache.unpin(via.integer(self._seq()))

    @pure
    def select_eviction_target(self, via):
        return self.cache.select_eviction_target()

    def evict(self, via):
        return self.cache.evict()

    def evict_to_threshold(self, via):
        return self.cache.evict_to_threshold(via.number(0.3))

    # -- K and V

    def write(self, via):
        seq, layer = self._seq(), self.random.randrange(2)
        k, v = rows(seq % 10, self._anywhere(self.random.choice((1, 6))), layer)
        start = self.random.choice((None, via.integer(0), via.integer(3)))
        self.cache.write(via.integer(layer), via.integer(seq), via.array(k), via.array(v), start)

    @staticmethod
    def _anywhere(n):
        """What rows say of their position where nobody knows it: other calls may have evicted tokens meanwhile."""
        return [-1] * n

    def write_doubles(self, via):
        k, v = rows(1, self._anywhere(4), 1)
        self.cache.write(1, 1, via.array(k.astype(np.float64)), via.array(v.astype(np.float64)), 0)

    def write_batch(self, via):
        k, v = (np.concatenate(sides) for sides in zip(*(rows(tag, [-1], 0) for tag in (3, 1, 3)), strict=True))
        self.cache.write_batch(via.integer(0), via.array([3, 11, 103]), via.array(k), via.array(v))

    def read(self, via):
        return self.cache.read(via.integer(self.random.randrange(2)), via.integer(self._seq()), via.integer(0))

    def _queries(self, n):
        return np.random.default_rng(1).standard_normal((n, 2, DIM)).astype(np.float32)

    def _mixed(self, out):
        assert np.isfinite(out).all()
        # What lies in channel 0 is the last digit of a sequence, or 0 where nothing was written.
        assert out[..., 0].min() >= -1e-4
        assert out[..., 0].max() <= 3 + 1e-4
        return out

    def attention(self, via):
        ids = self.random.choice(([1, 3], [2, 11]))
        return self._mixed(self.cache.attention(via.integer(0), via.array(self._queries(2)), via.array(ids)))

    def attention_with_all(self, via):
        q = self._queries(7)
        out = self.cache.attention(
            1, via.array(q), via.array([3, 1, 13]), query_lens=via.array([4, 2, 1]), scale=via.number(0.3),
            sink_queries=via.array(q), out=np.empty_like(q), return_scores=True, context_lens=via.array([9, 3, 20]),
            return_lse=True,
        )  # fmt: skip
        self._mixed(out[0])
        return out

    # -- handles

    def handle(self, via):
        self.handles.append(self.cache.handle(via.integer(self._seq())))

    @release
    def drop_handle(self, via):
        self.handles.pop()

    def handle_clone(self, via):
        self.handles.append(self.handles[0].clone_handle())

    def handle_reads(self, via):
        it = self.random.choice(self.handles)
        return it.kv_cache(via.integer(1)), it.key_cache(0), it.value_cache(via.integer(0))

    @pure
    def handle_reports(self, via):
        it = self.handles[0]
        table = it.block_table
        return str(it.stats()), it.num_tokens, it.is_valid, it.cache_id, table.physical_blocks, table.sequence_length

    @pure
    def live_table(self, via):
        return self.live.physical_blocks, self.live.sequence_length, self.live.num_blocks, self.live.free_tokens

    def live_resize(self, via):
        self.live.sequence_length = via.integer(self.random.choice((20, 22, 25)))

    def live_extend(self, via):
        self.handles[0].block_table_mut().extend_sequence(1)

    # -- prefixes over them

    def prefix_adopt(self, via):
        tag = self.random.choice((1, 3))
        with self._kept(tag + 10 * self.random.randrange(2)) as blocks:
            text = self._text(tag, SIZE * len(blocks))
            return self.prefix.adopt(via.tokens(text), via.array(blocks), via.name("b"))

    def prefix_insert(self, via):
        k, v = rows(2, self._anywhere(SIZE), 0)
        layers = [k.swapaxes(0, 1).reshape(-1)] * 2
        text = via.tokens(self._text(2, 8))
        return self.prefix.insert(text, via.integer(0), via.items(layers), via.items(layers), via.name("b"))

    def prefix_store(self, via):
        k, v = rows(2, self._anywhere(SIZE), 0)
        layers = [k.swapaxes(0, 1).reshape(-1)] * 2
        block = via.items([via.items([via.array(x) for x in layers]), via.items(layers)])
        return self.prefill.store_blocks(via.tokens(self._text(2, 13)), 0, via.items([block, (layers, layers)]))

    # -- the end

    def _verify(self):
        cache = self.cache
        cache.check()
        self.prefix.check()
        for seq in cache.sequence_ids():
            runs, starts = cache._table.runs(seq), cache._table.run_positions(seq)
            positions = np.concatenate(
                [np.arange(at, at + int(run["stop"]) - int(run["first"])) for run, at in zip(runs, starts, strict=True)]
                or [np.empty(0)]
            )
            for layer in range(2):
                for side in cache._store.read(layer, runs):
                    tags = side[:, 0, [0, 3, 4, 5, 6, 7]]
                    assert seq >= 1000 or np.isin(tags, (0, seq % 10)).all(), (
                        f"sequence {seq} has rows of {np.unique(tags)}"
                    )
                    if seq < 100:
                        told = side[:, 0, 1]
                        right = (told == positions) | (told == -1) | (side[:, 0, 0] == 0)
                        assert right.all(), f"sequence {seq} has the tokens {told}, expected {positions}"
        for session in self.sessions:
            for block in session.block_indices:
                held = self.prefix.get_block(block)
                assert held.token_ids[0] // 1000 == session.tag, "a block of another text"
                assert all(np.isin(layer[3::DIM], (0, session.tag)).all() for layer in held.keys), (
                    "rows of another text"
                )

    def _finish(self):
        cache = self.cache
        self._let_go()
        self.handles.clear()
        cache.free_batch(cache.sequence_ids())
        assert cache.used_block_count == len(self.prefix)
        self.prefix.clear()
        self.prefix.check()
        cache.check()
        assert cache.free_block_count == cache.total_blocks, "blocks are lost"
        cache.allocate(5, cache.total_blocks * SIZE)
        assert not any(cache.read(layer, 5)[0].any() for layer in range(2)), "fresh tokens are not zero"
        cache.free(5)


class BlocksWorld(Prefixes, World):
    """A `PrefixCache` with blocks of its own, whose K and V say of which tokens and namespace they are."""

    rare = ("prefix_save", "prefix_load")
    slow = 1

    def _build(self):
        self._start(PrefixCache(14, SIZE, 2, 1, DIM))
        for tag, length, name in ((3, 20, None), (1, 8, "b"), (2, 9, None)):
            text = self._text(tag, length)
            self.prefix.store(text, 0, self._pairs(text, name), name)
        self._open(self.prefix.open_session, Via(), tag=3, length=13)
        self.found += self.prefix.lookup(self._text(3, 8))[1]

    @staticmethod
    def _pairs(text, name):
        return pairs(name, text, SIZE, 1, DIM)

    def prefix_insert(self, via):
        text, name = self._text(length=8), self.random.choice((None, "b"))
        keys, values = self._pairs(text, name)[1]
        keys, values = ([via.array(layer) for layer in side] for side in (keys, values))
        return self.prefix.insert(via.tokens(text), via.integer(SIZE), via.items(keys), values, via.name(name))

    def prefix_store(self, via):
        text, name = self._text(), self.random.choice((None, "b"))
        blocks = [via.items([via.items(side) for side in pair]) for pair in self._pairs(text, name)]
        return self.prefix.store(via.tokens(text), via.integer(0), via.items(blocks), via.name(name))

    def prefix_store_blocks(self, via):
        text = self._text()
        return self.prefill.store_blocks(via.tokens(text), 0, self._pairs(text, "b"), via.name("b"))

    def _verify(self):
        self.prefix.check()
        for name in (None, "b"):
            for tag in (1, 2, 3):
                text = self._text(tag, 22)
                matched, blocks = self.prefix.lookup(text, name)
                expected = self._pairs(text, name)
                for block, (keys, values) in zip(blocks, expected, strict=False):
                    for got, want in zip([*block.keys, *block.values], [*keys, *values], strict=True):
                        np.testing.assert_array_equal(got, want)
                    self.prefix.release(block.index)

    def _finish(self):
        self._let_go()
        self.prefix.clear()
        self.prefix.check()
        pool = self.prefix._pool
        assert pool.num_free == pool.num_blocks, "blocks are lost"
        text = self._text(1, 20)
        assert self.prefix.store(text, 0, self._pairs(text, None)) == 5


class Source:
    """A live cache of somebody else's, whose rows say of which tokens they are."""

    def __init__(self, via, text, name):
        self.via, self.seq_len, self.state = via, len(text), state(name, text, DIM)

    def get_keys(self, layer):
        self.via.run()
        return self.via.array(self.state.keys[layer]) if layer else self.state.keys[layer]

    def get_values(self, layer):
        return self.state.values[layer]


class EntriesWorld(World):
    """A `PrefixKvCache`, states that it has lent, and a live cache that they are restored to."""

    formats, tolerance = "f32", 0.0
    rare = ("save", "load")

    def _build(self):
        bytes_per_token = 2 * 2 * DIM * 4
        config = PrefixCacheConfig(
            max_entries=6, max_memory_bytes=120 * bytes_per_token, min_prefix_len=1, dtype=self.formats
        )
        self.cache = PrefixKvCache(config)
        for tag, length, name in ((3, 40, None), (1, 12, "b"), (2, 9, None)):
            text = self._text(tag, length)
            self.cache.store_snapshot(text, state(name, text, DIM), name)
        self.states = []
        self._hold(self._text(3, 30), None, self.cache.lookup(self._text(3, 30)))
        self.live = KvCache(2, 50, DIM, num_heads=2)
        self.cache.restore(self.states[0][2], self.live)
        self.table = self.live.block_table_mut()

    def _text(self, tag=None, length=None):
        tag = tag or self.random.choice((1, 2, 3))
        return tag * 1000 + np.arange(length or self.random.choice((3, 8, 20, 45)), dtype=np.uint32)

    def _hold(self, text, name, hit):
        if hit is not None:
            self.states.append((text, name, hit[1]))
            return hit[0]
        return None

    @staticmethod
    def _state(text, name, via):
        whole = state(name, text, DIM)
        sides = [via.items([via.array(layer) for layer in side]) for side in (whole.keys, whole.values)]
        return CachedKvState(*sides, len(text))

    # -- entries

    def lookup(self, via):
        text, name = self._text(), self.random.choice((None, "b"))
        return self._hold(text, name, self.cache.lookup(via.tokens(text), via.name(name)))

    def store(self, via):
        text, name = self._text(), self.random.choice((None, "b"))
        source, n = Source(via, text, name), via.integer(len(text))
        self.cache.store(via.tokens(text), source, n, via.integer(DIM), via.integer(2), via.name(name))

    def store_live(self, via):
        live = KvCache(2, 30, DIM)
        text = self._text(length=20)
        whole = state(None, text, DIM)
        live.restore_from_snapshot(whole.keys, whole.values, 20)
        self.cache.store(via.tokens(text), live, 20, DIM, 2)

    def store_snapshot(self, via):
        text, name = self._text(), self.random.choice((None, "b"))
        self.cache.store_snapshot(via.tokens(text), self._state(text, name, via), via.name(name))

    def store_another_shape(self, via):
        text = self._text(length=5)
        self.cache.store_snapshot(text, state("wide", text, 2 * DIM), via.name("wide"))

    def remove(self, via):
        return self.cache.remove(via.tokens(self._text(length=self.random.choice((9, 12, 40)))), via.name(None))

    def clear(self, via):
        self.cache.clear()

    def save(self, via):
        self.cache.save(self.path / f"{type(self).__name__}", "m")

    def load(self, via):
        self.save(via)
        self.cache.clear()
        return self.cache.load(self.path / f"{type(self).__name__}", "m")

    @pure
    def reports(self, via):
        it = self.cache
        return it.memory_usage, len(it), it.is_empty, it.hits, it.misses, it.hit_tokens, str(it.stats())

    @pure
    def check(self, via):
        self.cache.check()

    @release
    def drop_state(self, via):
        self.states.pop()

    @pure
    def read_state(self, via):
        text, name, held = self.states[0]
        self._compare(text, name, held)
        return held.seq_len, held.num_layers, held.kv_dim

    def _compare(self, text, name, held):
        whole, n = state(name, text, DIM), held.seq_len * DIM
        for got, want in zip([*held.keys, *held.values], [*whole.keys, *whole.values], strict=True):
            error = np.abs(got - want.reshape(-1)[:n]).max(initial=0)
            assert error <= self.tolerance, f"the rows of another text, or none: off by {error}"

    def restore(self, via):
        self.cache.restore(self.random.choice(self.states)[2], self.live)

    # -- live

    def live_store_kv(self, via):
        self.live.store_kv(via.integer(1), via.array(np.ones(DIM)), via.array(np.ones(DIM)))

    def live_advance(self, via):
        self.live.advance()

    def live_truncate(self, via):
        self.live.truncate(via.integer(self.random.choice((3, 9))))

    def live_clear(self, via):
        self.live.clear()

    def live_get(self, via):
        return self.live.get_keys(via.integer(0)), self.live.get_values(1)

    @pure
    def live_snapshot(self, via):
        snapshot = self.live.snapshot()
        return snapshot.keys, snapshot.values, snapshot.seq_len

    def live_restore(self, via):
        whole = state(None, self._text(3, 20), DIM)
        self.live.restore_from_snapshot(
            via.items(whole.keys), via.items([via.array(layer) for layer in whole.values]), via.integer(20)
        )

    def live_restore_own(self, via):
        n = 5
        keys = [self.live.get_keys(layer)[: n * DIM] for layer in range(2)]
        self.live.restore_from_snapshot(keys, via.items(keys), n)

    def live_for_each(self, via):
        seen = []
        self.live.for_each_key(0, lambda position, row: (via.run(), seen.append(position)))
        self.live.for_each_value(1, lambda position, row: (via.run(), seen.append(position)))
        return seen

    @pure
    def live_reports(self, via):
        it = self.live
        return it.seq_len, str(it.stats()), it.block_table.sequence_length, it.is_valid, it.max_seq_len

    @pure
    def live_views(self, via):
        return self.live.key_cache(via.integer(1)), self.live.value_cache(0), self.live.clone_handle().seq_len

    def live_resize(self, via):
        self.table.sequence_length = via.integer(self.random.choice((5, 30, 51)))

    @pure
    def live_check(self, via):
        self.live.check()

    def _verify(self):
        self.cache.check()
        self.live.check()
        for held in self.states:
            self._compare(*held)
        for name in (None, "b"):
            for tag in (1, 2, 3):
                text = self._text(tag, 45)
                hit = self.cache.lookup(text, name)
                if hit is not None:
                    self._compare(text, name, hit[1])

    def _finish(self):
        self.states.clear()
        self.cache.check()
        for kind in self.cache._index.kinds:
            assert not kind.counts().any(), "a state is lent that nobody has"
        self.cache.clear()
        assert self.cache.memory_usage == 0
        text = self._text(1, 45)
        self.cache.store_snapshot(text, state(None, text, DIM))
        self._compare(text, None, self.cache.lookup(text)[1])


class PackedEntriesWorld(EntriesWorld):
    formats, tolerance = "q8", 0.02


class ManagedWorld(World):
    """Rows of one value each: that of their layer."""

    policy = EvictionPolicy.H2O()

    def _build(self):
        self.manager = CacheManager(KVCacheConfig(40, 2, DIM, 8, self.policy))
        for layer in (0, 1):
            self.manager.append(*self._rows(layer, 15), layer_idx=layer)

    @staticmethod
    def _rows(layer, n):
        return np.full((2, n, 2 * DIM), layer + 1, np.float32)

    def append(self, via):
        layer, n = self.random.randrange(3), self.random.choice((1, 7, 30))
        k, v = self._rows(layer, n)
        self.manager.append(via.array(k), via.array(v), via.integer(layer))

    def get(self, via):
        layer = self.random.randrange(2)
        keys, values = self.manager.get(via.array([3, 0, 7]), via.integer(layer))
        assert (keys == layer + 1).all()
        assert (values == layer + 1).all()
        return keys

    def get_all(self, via):
        return self.manager.get(via.array([0, 1, 2]))[0]

    def attention(self, via):
        layer = self.random.randrange(2)
        q = np.ones((3, 4, DIM), np.float32)
        out, scores = self.manager.attention(via.array(q), via.integer(layer), True, scale=via.number(0.5))
        np.testing.assert_allclose(out, layer + 1, rtol=1e-5)
        return out, scores

    def evict(self, via):
        layer = self.random.choice((None, 0))
        return self.manager.evict(via.integer(self.random.choice((4, 20))), layer)

    def update_attention_scores(self, via):
        layer = self.random.choice((None, 1))
        n = len(self.manager) if layer is None else len(self.manager.positions(layer))
        self.manager.update_attention_scores(via.array(np.arange(n) % 3.0), layer)

    @pure
    def positions(self, via):
        return self.manager.positions(via.integer(0)), self.manager.attention_scores(via.integer(1))

    @pure
    def reports(self, via):
        it = self.manager
        sizes = len(it), it.is_empty, it.layers, it.memory_bytes, it.compression_ratio, repr(it), it.allocated_bytes > 0
        return *sizes, it.pyramid_budget(via.integer(1), via.integer(3))

    @pure
    def check(self, via):
        self.manager.check()

    def _verify(self):
        it = self.manager
        it.check()
        for layer in it.layers:
            keys, values = it.get(range(len(it.positions(layer))), layer)
            assert (keys == layer + 1).all()
            assert (values == layer + 1).all()

    def _finish(self):
        self.manager.evict(0)
        assert self.manager.is_empty
        self.manager.append(*self._rows(1, 5), layer_idx=1)
        self._verify()


class PyramidWorld(ManagedWorld):
    policy = EvictionPolicy.PyramidKV(3)
