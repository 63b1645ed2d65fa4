"""A small filled `CacheManager`, and its attention in float64."""

import numpy as np
from oracles.kernels import attention

from kvcache import CacheManager, EvictionPolicy, KVCacheConfig
from kvcache.lists.manager_config import FORMAT_OF_BITS

H2O, SlidingWindow, PyramidKV = EvictionPolicy.H2O, EvictionPolicy.SlidingWindow, EvictionPolicy.PyramidKV
BITS = sorted(FORMAT_OF_BITS)


def manager(max_seq_len=8, policy=None, heads=2, dim=4, bits=4):
    return CacheManager(KVCacheConfig(max_seq_len, heads, dim, bits, policy or H2O()))


def fill(cache, n, layer_idx=0, rng=None):
    """Append n rows; row i is full of i and -i, or Gaussian."""
    width = cache.config.num_heads * cache.config.head_dim
    k = np.tile(np.arange(n, dtype=np.float32)[:, None], width) if rng is None else rng.standard_normal((n, width))
    v = -k if rng is None else rng.standard_normal((n, width))
    cache.append(k.astype(np.float32), v.astype(np.float32), layer_idx)
    return k, v


def kept(cache, layer_idx=0):
    cache.check()
    return cache.positions(layer_idx).tolist()


def compare(cache, q, got, tolerance):
    heads, dim = cache.config.num_heads, cache.config.head_dim
    k, v = (x.reshape(-1, heads, dim) for x in cache.get(range(len(cache))))
    out, mass = attention(q, k, v, dim**-0.5)
    assert got[0].shape == q.shape
    assert np.abs(got[0] - out).max() <= tolerance * np.abs(out).max()
    assert np.abs(got[1] - mass).max() <= tolerance * mass.max()
