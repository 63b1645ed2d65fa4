"""Many requests over a cache that is twenty times too small: outputs as without a cache, and nothing is lost."""

import gc
import itertools

import numpy as np
import pytest
from allocator import allocated

from kvcache import (
    CachedKvState,
    CacheManager,
    EvictionPolicy,
    KVCacheConfig,
    OutOfMemoryError,
    PagedKvCache,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
)
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams

pytestmark = pytest.mark.exhaustive

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=4)


@pytest.mark.one_build
@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_requests_over_a_cache_that_is_far_too_small(network, long, dtype):
    """Prompts of 1 token up to the limit with shared heads; 10,000 of them with --long. q4 has a residual."""
    rng = np.random.default_rng(7)
    limit = network.config.max_position_embeddings - GREEDY.max_tokens
    texts = [rng.integers(0, network.config.vocab_size, limit).astype(np.uint32) for _ in range(12)]
    blocks = sum(len(text) for text in texts) // 16 // 20
    cached = PrefixCachedEngine(InferenceEngine(network, dtype=dtype), blocks, strict=True)
    plain = InferenceEngine(network, dtype=dtype)
    answers = {}
    for request in range(10_000 if long else 120):
        # Mostly short, sometimes the longest possible; few different cuts, so that the plain engine runs each once.
        which = int(rng.integers(len(texts)))
        cut = limit if request % 40 == 0 else int(2 ** rng.uniform(0, np.log2(limit)))
        head, tail = texts[which][:cut], texts[(which + 1) % len(texts)][: int(rng.integers(3)) * 9]
        prompt = np.concatenate([head, tail])[:limit]
        key = prompt.tobytes()
        if key not in answers:
            answers[key] = plain.generate(prompt, GREEDY)
        assert cached.generate(prompt, GREEDY) == answers[key], f"request {request}"
        assert cached.cache_stats().cached_blocks <= blocks
        if request % 20 == 0:
            cached.check()
    gc.collect()
    cached.check()
    prefixes = cached.prefix_cache.cache
    for cache in (prefixes, *cached._pool.prefixes[1:]):
        stats = cache.stats()
        assert stats.total_evictions > 0
        assert stats.total_hits > 0
        assert cache.pinned_blocks == 0
        assert cache.references().sum() == len(cache)
    cached.inner.reset()
    assert cached.inner.cache.used_block_count == len(prefixes)
    cached.clear_cache()
    assert cached.inner.cache.used_block_count == 0


def test_memory_stays_flat(long):
    """Many stores, lookups and dropped states: memory at the end equals that at half time."""
    rng = np.random.default_rng(3)
    row = np.ones(8, np.float32)
    cache = PrefixKvCache(PrefixCacheConfig(max_entries=20, max_memory_bytes=300 * 2 * 8 * 4, min_prefix_len=1))

    def request():
        tokens = rng.integers(0, 3, int(rng.integers(1, 40)))
        layers = [np.broadcast_to(row, (len(tokens), 8)).copy()]
        try:
            cache.store_snapshot(tokens, CachedKvState(layers, layers, len(tokens)), int(rng.integers(3)))
        except OutOfMemoryError:
            raise AssertionError("nothing is held, so everything fits") from None
        cache.lookup(tokens, int(rng.integers(3)))

    def held():
        gc.collect()
        cache.check()
        kinds = cache._index.kinds
        held = sum(int(kind.counts().sum()) for kind in kinds)
        return cache._index.trie.nbytes, sum(kind.pool.num_blocks for kind in kinds), held

    count = 100_000 if long else 4_000
    for _ in range(count // 2):
        request()
    nbytes, slots, waiting = held()
    for _ in range(count // 2):
        request()
    again = held()
    assert again[0] <= 1.25 * nbytes
    assert again[1] == slots
    assert again[2] <= waiting + 64


class Blocks:
    """Sessions, lookups and evictions over a paged cache with handles; every third session is dropped."""

    def __init__(self):
        self.paged = PagedKvCache(40, 4, 1, 8)
        self.cache = PrefixCache.over(self.paged, 20)

    def __call__(self, tokens, name):
        session = self.cache.open_session(tokens, name)
        self.paged.adopt(1, session.shared_blocks, session.num_tokens)
        handle = self.paged.handle(1)
        self.paged.append(1, len(tokens) - session.num_tokens)
        self.cache.adopt(tokens, handle.block_table.physical_blocks, name)
        if len(tokens) % 3:
            self.cache.close_session(session)
        for block in self.cache.lookup(tokens[:8], name)[1]:
            self.cache.release(block.index)
        self.paged.free(1)

    def check(self):
        self.cache.check()
        self.paged.check()
        assert self.cache.pinned_blocks == 0
        assert self.paged.used_block_count == len(self.cache)


class Entries:
    """A cache of states that is sometimes saved and loaded into a new cache."""

    def __init__(self, path):
        self.path, self.turn = path, itertools.count(1)
        self._start()

    def _start(self):
        config = PrefixCacheConfig(max_entries=20, max_memory_bytes=300 * 2 * 8 * 4, min_prefix_len=1)
        self.cache = PrefixKvCache(config)

    def __call__(self, tokens, name):
        layers = [np.ones((len(tokens), 8), np.float32)]
        self.cache.store_snapshot(tokens, CachedKvState(layers, layers, len(tokens)), name)
        if next(self.turn) % 100 == 0:
            self.cache.save(self.path)
            self._start()
            self.cache.load(self.path)
        hit = self.cache.lookup(tokens, name)
        assert hit is not None
        assert hit[1].keys[0].sum() == 8 * hit[0]

    def check(self):
        self.cache.check()


class Managed:
    """Appends beyond the budget, scores, reads, in two layers."""

    def __init__(self):
        self.manager = CacheManager(KVCacheConfig(24, 1, 8, 4, EvictionPolicy.H2O()))

    def __call__(self, tokens, name):
        rows = np.ones((len(tokens), 8), np.float32)
        self.manager.append(rows, rows, layer_idx=name % 2)
        self.manager.update_attention_scores(np.arange(len(self.manager)) % 3.0)
        self.manager.get(range(len(self.manager)))

    def check(self):
        self.manager.check()


@pytest.mark.parametrize("face", [Blocks, Entries, Managed])
def test_a_process_does_not_grow(face, long, tmp_path):
    """The allocated bytes at the end equal those at half time; 100,000 requests with --long."""
    rng = np.random.default_rng(4)
    served = face(tmp_path / "cache") if face is Entries else face()
    count = 100_000 if long else 3_000
    taken = []
    for request in range(count + 1):
        served(rng.integers(0, 3, int(rng.integers(1, 40))), int(rng.integers(3)))
        if request % (count // 6) == 0:
            served.check()
            taken.append(allocated())
    # The first sixths fill the cache and its memory of evicted prompts.
    assert max(taken[4:]) <= max(taken[2:4]) + 64 * 1024, taken
