"""Objects in the states that `integer_calls.py` calls them in; each function makes a new one."""

import numpy as np
from contents import pairs, state
from places import GOLDEN

from kvcache import (
    CacheManager,
    EvictionPolicy,
    KvCache,
    KVCacheConfig,
    PagedKvCache,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
)
from kvcache.engine import InferenceEngine, PrefixCachedEngine, Transformer

LLAMA = GOLDEN / "llama"
MODEL = Transformer.from_pretrained(LLAMA)
WRITTEN = np.ones((20, 1, 8), np.float32)


def empty():
    return PagedKvCache(8, 16, 1, 8)


def forked():
    """A tail that two sequences share, and one with a hole."""
    cache = empty()
    cache.allocate(1, 20)
    cache.write(0, 1, WRITTEN, WRITTEN)
    cache.fork(1, 2)
    cache.allocate(3, 20)
    cache.apply_streaming_llm(3, 2, 5)
    return cache


def indexed():
    """Latent rows beside keys of an indexer; the second sequence has a hole."""
    cache = PagedKvCache(8, 16, latent=(8, 8), index_layers=1, index_dim=8)
    for seq_id in (1, 3):
        cache.allocate(seq_id, 20)
        cache.write(1, seq_id, WRITTEN)
    cache.apply_streaming_llm(3, 2, 5)
    return cache


def unpacked():
    """Two sequences with first and newest tokens in f16, one of them with a hole."""
    cache = PagedKvCache(8, 16, 1, 8, residual_length=4, first_tokens=2)
    for seq_id in (1, 3):
        cache.allocate(seq_id, 18)
        cache.append(seq_id, 2)
        cache.write(0, seq_id, WRITTEN, WRITTEN, 0)
    cache.keep_tokens(3, [0, 1, 5, 18])
    return cache


def full():
    cache = empty()
    cache.allocate(1, 8 * 16 - 3)
    return cache


def over():
    """A prefix cache over a paged one, with a session."""
    paged = forked()
    cache = PrefixCache.over(paged)
    cache.paged = paged
    cache.adopt(np.arange(16), paged.get_sequence(1).block_ids)
    cache.session = cache.open_session(np.arange(20))
    return cache


def pinned():
    return over().paged


def blocks():
    cache = PrefixCache(6, 4, 2, 1, 8)
    text = np.arange(20)
    cache.store(text, 0, pairs(None, text, 4, 1, 8))
    cache.found = cache.lookup(text[:9])
    return cache


def entries():
    cache = PrefixKvCache(PrefixCacheConfig(max_entries=4, max_memory_bytes=1 << 14, min_prefix_len=1))
    cache.store_snapshot(np.arange(20), state(None, np.arange(20), 8))
    return cache


def live():
    cache = KvCache(2, 30, 8)
    whole = state(None, np.arange(20), 8)
    cache.restore_from_snapshot(whole.keys, whole.values, 20)
    return cache


def manager(policy=None):
    it = CacheManager(KVCacheConfig(40, 1, 8, 4, policy or EvictionPolicy.H2O()))
    it.append(*np.ones((2, 15, 8), np.float32))
    it.append(*np.ones((2, 15, 8), np.float32), layer_idx=1)
    return it


def pyramid():
    return manager(EvictionPolicy.PyramidKV(3))


def engine():
    it = InferenceEngine(MODEL, num_blocks=6)
    it.prefill_from_pos([1, 2, 3], 0)
    return it


def cached():
    return PrefixCachedEngine(InferenceEngine(MODEL, num_blocks=6), 4, strict=True)


def nothing():
    return None
