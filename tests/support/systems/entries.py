"""Systems of `PrefixKvCache` for `reentry.py`: entries, states that it returns, a live cache to restore them to."""

import numpy as np
from contents import state
from systems.system import System, pure, release

from kvcache import CachedKvState, KvCache, PrefixCacheConfig, PrefixKvCache

DIM = 8


class Source:
    """A live cache of a caller, whose rows identify their tokens."""

    def __init__(self, wrap, text, name):
        self.wrap, self.seq_len, self.state = wrap, len(text), state(name, text, DIM)

    def get_keys(self, layer):
        self.wrap.run()
        return self.wrap.array(self.state.keys[layer]) if layer else self.state.keys[layer]

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
    def _state(text, name, wrap):
        whole = state(name, text, DIM)
        sides = [wrap.items([wrap.array(layer) for layer in side]) for side in (whole.keys, whole.values)]
        return CachedKvState(*sides, len(text))

    # -- entries

    def lookup(self, wrap):
        text, name = self._text(), self.random.choice((None, "b"))
        return self._hold(text, name, self.cache.lookup(wrap.tokens(text), wrap.name(name)))

    def store(self, wrap):
        text, name = self._text(), self.random.choice((None, "b"))
        source, n = Source(wrap, text, name), wrap.integer(len(text))
        self.cache.store(wrap.tokens(text), source, n, wrap.integer(DIM), wrap.integer(2), wrap.name(name))

    def store_live(self, wrap):
        live = KvCache(2, 30, DIM)
        text = self._text(length=20)
        whole = state(None, text, DIM)
        live.restore_from_snapshot(whole.keys, whole.values, 20)
        self.cache.store(wrap.tokens(text), live, 20, DIM, 2)

    def store_snapshot(self, wrap):
        text, name = self._text(), self.random.choice((None, "b"))
        self.cache.store_snapshot(wrap.tokens(text), self._state(text, name, wrap), wrap.name(name))

    def store_another_shape(self, wrap):
        text = self._text(length=5)
        self.cache.store_snapshot(text, state("wide", text, 2 * DIM), wrap.name("wide"))

    def remove(self, wrap):
        return self.cache.remove(wrap.tokens(self._text(length=self.random.choice((9, 12, 40)))), wrap.name(None))

    def clear(self, wrap):
        self.cache.clear()

    def save(self, wrap):
        self.cache.save(self.path / f"{type(self).__name__}", "m")

    def load(self, wrap):
        self.save(wrap)
        self.cache.clear()
        return self.cache.load(self.path / f"{type(self).__name__}", "m")

    @pure
    def reports(self, wrap):
        it = self.cache
        return it.memory_usage, len(it), it.is_empty, it.hits, it.misses, it.hit_tokens, str(it.stats())

    @pure
    def check(self, wrap):
        self.cache.check()

    @release
    def drop_state(self, wrap):
        self.states.pop()

    @pure
    def read_state(self, wrap):
        text, name, held = self.states[0]
        self._compare(text, name, held)
        return held.seq_len, held.num_layers, held.kv_dim

    def _compare(self, text, name, held):
        whole, n = state(name, text, DIM), held.seq_len * DIM
        for got, want in zip([*held.keys, *held.values], [*whole.keys, *whole.values], strict=True):
            error = np.abs(got - want.reshape(-1)[:n]).max(initial=0)
            assert error <= self.tolerance, f"the rows of another text, or none: off by {error}"

    def restore(self, wrap):
        self.cache.restore(self.random.choice(self.states)[2], self.live)

    # -- live

    def live_store_kv(self, wrap):
        self.live.store_kv(wrap.integer(1), wrap.array(np.ones(DIM)), wrap.array(np.ones(DIM)))

    def live_advance(self, wrap):
        self.live.advance()

    def live_truncate(self, wrap):
        self.live.truncate(wrap.integer(self.random.choice((3, 9))))

    def live_clear(self, wrap):
        self.live.clear()

    def live_get(self, wrap):
        return self.live.get_keys(wrap.integer(0)), self.live.get_values(1)

    @pure
    def live_snapshot(self, wrap):
        snapshot = self.live.snapshot()
        return snapshot.keys, snapshot.values, snapshot.seq_len

    def live_restore(self, wrap):
        whole = state(None, self._text(3, 20), DIM)
        self.live.restore_from_snapshot(
            wrap.items(whole.keys), wrap.items([wrap.array(layer) for layer in whole.values]), wrap.integer(20)
        )

    def live_restore_own(self, wrap):
        n = 5
        keys = [self.live.get_keys(layer)[: n * DIM] for layer in range(2)]
        self.live.restore_from_snapshot(keys, wrap.items(keys), n)

    def live_for_each(self, wrap):
        seen = []
        self.live.for_each_key(0, lambda position, row: (wrap.run(), seen.append(position)))
        self.live.for_each_value(1, lambda position, row: (wrap.run(), seen.append(position)))
        return seen

    @pure
    def live_reports(self, wrap):
        it = self.live
        return it.seq_len, str(it.stats()), it.block_table.sequence_length, it.is_valid, it.max_seq_len

    @pure
    def live_views(self, wrap):
        return self.live.key_cache(wrap.integer(1)), self.live.value_cache(0), self.live.clone_handle().seq_len

    def live_resize(self, wrap):
        self.table.sequence_length = wrap.integer(self.random.choice((5, 30, 51)))

    @pure
    def live_check(self, wrap):
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
