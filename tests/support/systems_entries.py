"""Systems of `PrefixKvCache` for `reentry.py`: entries, states that it returns, a live cache to restore them to."""

import numpy as np
from contents import state
from system import System, pure, release

from kvcache import CachedKvState, KvCache, PrefixCacheConfig, PrefixKvCache

DIM = 8


class Source:
    """A live cache of a caller, whose rows identify their tokens."""

    def __init__(self, via, text, name):
        self.via, self.seq_len, self.state = via, len(text), state(name, text, DIM)

    def get_keys(self, layer):
        self.via.run()
        return self.via.array(self.state.keys[layer]) if layer else self.state.keys[layer]

    def get_values(self, layer):
        return self.state.values[layer]


class EntriesSystem(System):
    """A `PrefixKvCache`, states that it returned, and a live cache to restore them to."""

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
            assert not kind.counts().any(), "the cache counts a state that no caller holds"
        self.cache.clear()
        assert self.cache.memory_usage == 0
        text = self._text(1, 45)
        self.cache.store_snapshot(text, state(None, text, DIM))
        self._compare(text, None, self.cache.lookup(text)[1])


class PackedEntriesSystem(EntriesSystem):
    formats, tolerance = "q8", 0.02
