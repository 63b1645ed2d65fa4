"""Systems of `CacheManager` for `reentry.py`."""

import numpy as np
from systems.system import System, pure

from kvcache import CacheManager, EvictionPolicy, KVCacheConfig

DIM = 8


class ManagedSystem(System):
    """Rows of one value each: that of their layer."""

    policy = EvictionPolicy.H2O()

    def _build(self):
        self.manager = CacheManager(KVCacheConfig(40, 2, DIM, 8, self.policy))
        for layer in (0, 1):
            self.manager.append(*self._rows(layer, 15), layer_idx=layer)

    @staticmethod
    def _rows(layer, n):
        return np.full((2, n, 2 * DIM), layer + 1, np.float32)

    def append(self, wrap):
        layer, n = self.random.randrange(3), self.random.choice((1, 7, 30))
        k, v = self._rows(layer, n)
        self.manager.append(wrap.array(k), wrap.array(v), wrap.integer(layer))

    def get(self, wrap):
        layer = self.random.randrange(2)
        keys, values = self.manager.get(wrap.array([3, 0, 7]), wrap.integer(layer))
        assert (keys == layer + 1).all()
        assert (values == layer + 1).all()
        return keys

    def get_all(self, wrap):
        return self.manager.get(wrap.array([0, 1, 2]))[0]

    def attention(self, wrap):
        layer = self.random.randrange(2)
        q = np.ones((3, 4, DIM), np.float32)
        out, scores = self.manager.attention(wrap.array(q), wrap.integer(layer), True, scale=wrap.number(0.5))
        np.testing.assert_allclose(out, layer + 1, rtol=1e-5)
        return out, scores

    def evict(self, wrap):
        layer = self.random.choice((None, 0))
        return self.manager.evict(wrap.integer(self.random.choice((4, 20))), layer)

    def update_attention_scores(self, wrap):
        layer = self.random.choice((None, 1))
        n = len(self.manager) if layer is None else len(self.manager.positions(layer))
        self.manager.update_attention_scores(wrap.array(np.arange(n) % 3.0), layer)

    @pure
    def positions(self, wrap):
        return self.manager.positions(wrap.integer(0)), self.manager.attention_scores(wrap.integer(1))

    @pure
    def reports(self, wrap):
        it = self.manager
        sizes = len(it), it.is_empty, it.layers, it.memory_bytes, it.compression_ratio, repr(it), it.allocated_bytes > 0
        return *sizes, it.pyramid_budget(wrap.integer(1), wrap.integer(3))

    @pure
    def check(self, wrap):
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


class PyramidSystem(ManagedSystem):
    policy = EvictionPolicy.PyramidKV(3)
