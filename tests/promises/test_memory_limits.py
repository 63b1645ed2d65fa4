"""`max_memory_bytes` and `memory()`: every pool stays within the bytes that it was given, and says where they are."""

import re

import numpy as np
import pytest
from contents import pairs, state
from prefix_engines import GREEDY, prompt

from kvcache import (
    CacheManager,
    EvictionPolicy,
    InferenceEngine,
    KvCache,
    KVCacheConfig,
    OutOfMemoryError,
    PagedKvCache,
    PrefixCache,
    PrefixCacheConfig,
    PrefixCachedEngine,
    PrefixKvCache,
)
from kvcache.kernels.kernels import FORMATS
from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix
from kvcache.networks.linear import MatrixStack
from kvcache.support.arguments import as_bytes

pytestmark = pytest.mark.exhaustive

KEYS = {"kv", "bookkeeping", "scratch", "huge"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4GiB", 4 << 30), ("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5KiB", 1536), ("0.1 KB", 100), (" 7 B ", 7),
        ("3TiB", 3 << 40), ("1TB", 10**12), ("0.3B", 0), ("1.9999KB", 1999), (5, 5), (np.uint8(9), 9), (0, 0),
    ],
)
def test_bytes(text, value):
    got = as_bytes(text, "x")
    assert (got, type(got)) == (value, int)


NO_BYTES = ["", "4", "GiB", "4gib", "4 G", "-1GiB", "1e3MiB", "4GiB2", "\u0664GiB", "9" * 30 + "B", "9" * 99]


@pytest.mark.parametrize("wrong", NO_BYTES)
def test_texts_that_are_no_bytes(wrong):
    with pytest.raises(ValueError, match=r'^x: expected an int or a text such as "4GiB"'):
        as_bytes(wrong, "x")


@pytest.mark.parametrize("wrong", [1.5, None, True, b"4GiB", [4], np.float32(4)])
def test_objects_that_are_no_bytes(wrong):
    with pytest.raises(TypeError, match=r'^x: expected an int or a text such as "4GiB", got '):
        as_bytes(wrong, "x")


@pytest.mark.parametrize("wrong", [-1, 2**63, "10000000000GB"])
def test_bytes_out_of_range(wrong):
    with pytest.raises(ValueError, match=r"^x: expected an int [<>]= "):
        as_bytes(wrong, "x")


def raises(kind, message):
    """The whole message."""
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def too_few(least, what="of one block"):
    return raises(ValueError, f"max_memory_bytes: expected at least {least}, the bytes {what}, got {least - 1}")


def neither(name):
    return raises(TypeError, f"{name}: expected an int, or max_memory_bytes in its place, got None")


def paged(**size):
    return PagedKvCache(block_size=16, num_heads=2, head_dim=64, num_layers=3, dtype="q4", **size)


def blocks(**size):
    if "num_blocks" in size:
        size["max_blocks"] = size.pop("num_blocks")
    return PrefixCache(block_size=16, num_layers=3, num_kv_heads=2, head_dim=61, dtype="q8", **size)


@pytest.mark.parametrize("make", [paged, blocks])
def test_a_pool_of_blocks_within_a_number_of_bytes(make):
    one = make(num_blocks=1).memory()["kv"]
    count = lambda cache: cache.memory()["kv"] // one  # noqa: E731
    for limit in (one, 2 * one - 1, 7 * one, 7 * one + 1, f"{7 * one}B"):
        cache = make(max_memory_bytes=limit)
        limit = as_bytes(limit, "limit")
        assert limit - one < cache.memory()["kv"] <= limit
        cache.check()
    assert count(make(num_blocks=4, max_memory_bytes=7 * one)) == 4
    assert count(make(num_blocks=9, max_memory_bytes=7 * one)) == 7
    with too_few(one):
        make(max_memory_bytes=one - 1)
    with neither("num_blocks" if make is paged else "max_blocks"):
        make()
    with pytest.raises(TypeError, match=r'^max_memory_bytes: expected an int or a text such as "4GiB", got float$'):
        make(max_memory_bytes=1e9)


def test_other_settings_are_not_left_out():
    for call in (
        lambda: PagedKvCache(max_memory_bytes="1MiB"),
        lambda: PagedKvCache(8, 16, 2),
        lambda: PrefixCache(8, 16, 1, 1),
        lambda: PrefixCache(max_memory_bytes="1MiB", block_size=16),
        lambda: KVCacheConfig(max_memory_bytes="1MiB", num_heads=2),
        lambda: KVCacheConfig(num_heads=2, head_dim=8),
    ):
        with pytest.raises(TypeError, match=r"^\w+: expected an int, got NoneType$"):
            call()


@pytest.mark.parametrize(("bits", "head_dim"), [(4, 64), (2, 61), (8, 8)])
def test_a_manager_within_a_number_of_bytes(bits, head_dim, rng):
    one = CacheManager(KVCacheConfig(64, 2, head_dim, bits))
    row = rng.standard_normal((2, 200, 2 * head_dim)).astype(np.float32)
    one.append(*row)
    block = one.memory()["kv"]
    assert block == one.memory_bytes  # 64 entries
    limit = 3 * block - 1
    config = KVCacheConfig(num_heads=2, head_dim=head_dim, quantization_bits=bits, max_memory_bytes=limit)
    manager = CacheManager(config)
    assert (config.max_seq_len, manager.memory()) == (128, dict.fromkeys(KEYS, 0))
    manager.append(*row)
    assert len(manager) == 128
    assert manager.memory()["kv"] == manager.memory_bytes == 2 * block <= limit
    assert manager.memory()["kv"] + manager.memory()["bookkeeping"] == manager.allocated_bytes
    assert KVCacheConfig(100, 2, head_dim, bits, max_memory_bytes="1GiB").max_seq_len == 100
    for of_config in (None, 2 * block, 9 * block):
        config = KVCacheConfig(500, 2, head_dim, bits, max_memory_bytes=of_config)
        for limit, entries in ((block, 64), (5 * block, 320), ("1GiB", 500)):
            bounded = CacheManager(config, max_memory_bytes=limit)
            assert bounded.config.max_seq_len == min(entries, config.max_seq_len)
    assert KVCacheConfig(100, 2, head_dim, bits, max_memory_bytes=block).max_seq_len == 64
    with too_few(block):
        KVCacheConfig(100, 2, head_dim, bits, max_memory_bytes=block - 1)


@pytest.mark.parametrize("dtype", FORMATS)
def test_states_within_a_text_of_bytes(dtype):
    config = PrefixCacheConfig(max_memory_bytes="64KiB", dtype=dtype, head_dim=64)
    assert config.max_memory_bytes == 64 << 10
    cache = PrefixKvCache(config)
    assert cache.memory()["kv"] == 0
    bits = FORMATS[dtype].bits
    spare = 2 * 2 * 63 * (64 * bits // 8 + 4) if FORMATS[dtype].quantised else 0  # 2 layers, blocks of 64 slots
    for first in range(0, 4000, 100):
        cache.store_snapshot(range(first, first + 40), state(None, range(first, first + 40), 64))
        memory = cache.memory()
        assert cache.memory_usage <= memory["kv"] <= (64 << 10) + spare
        assert memory["bookkeeping"] > 0
    assert cache.stats().evictions > 0
    with pytest.raises(ValueError, match=r'^max_memory_bytes: expected an int or a text such as "4GiB"'):
        PrefixCacheConfig(max_memory_bytes="much")


def test_states_within_bytes_beside_a_config():
    limit = lambda *config, **size: PrefixKvCache(*config, **size).config.max_memory_bytes  # noqa: E731
    assert limit(max_memory_bytes="4GiB") == 4 << 30
    config = PrefixCacheConfig(max_memory_bytes="1MiB", dtype="f16", max_entries=3)
    assert (limit(config), limit(config, max_memory_bytes="4GiB"), limit(config, max_memory_bytes=9)) == (
        2**20,
        2**20,
        9,
    )
    cache = PrefixKvCache(config, max_memory_bytes="1KiB")
    assert (cache.config.dtype, cache.config.max_entries, config.max_memory_bytes) == ("f16", 3, 2**20)
    with pytest.raises(OutOfMemoryError):
        cache.store_snapshot(range(40), state(None, range(40), 8))
    with pytest.raises(TypeError, match=r'^max_memory_bytes: expected an int or a text such as "4GiB", got list$'):
        PrefixKvCache(max_memory_bytes=[])


def test_bookkeeping_of_a_prefix_cache():
    own = PrefixCache(8, 4, 2, 1, 8)
    own.store(range(32), 0, pairs(None, np.arange(32), 4, 1, 8))
    bookkeeping = own.stats().bookkeeping_bytes
    assert own.memory() == {"kv": 8 * 4 * 8 * 4 * 2 * 2, "bookkeeping": bookkeeping, "scratch": 0, "huge": 0}
    pool = PagedKvCache(8, 4, 1, 8)
    over = PrefixCache.over(pool)
    bookkeeping = pool.stats().bookkeeping_bytes
    assert pool.memory() == {"kv": pool.total_memory_bytes, "bookkeeping": bookkeeping, "scratch": 0, "huge": 0}
    assert over.memory() == {"kv": 0, "bookkeeping": over.stats().bookkeeping_bytes, "scratch": 0, "huge": 0}
    assert KvCache(2, 5, 8).memory() == {"kv": 2 * 5 * 8 * 4 * 2, "bookkeeping": 0, "scratch": 0, "huge": 0}


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_an_engine_within_a_number_of_bytes(network, dtype):
    whole = InferenceEngine(network, dtype=dtype, max_memory_bytes="1GiB")
    positions = network.config.max_position_embeddings
    assert whole.cache.total_blocks == -(-positions // 16) + 1
    most, one = whole.memory()["kv"], whole.cache.block_memory_bytes
    for limit in (most, most - 1, most - 9 * one):
        engine = InferenceEngine(network, dtype=dtype, max_memory_bytes=limit)
        assert limit - one < engine.memory()["kv"] <= limit
        assert engine.generate(prompt(1, 30), GREEDY) == whole.generate(prompt(1, 30), GREEDY)
    assert InferenceEngine(network, dtype=dtype, num_blocks=5, max_memory_bytes=most).cache.total_blocks == 5
    fits = most - whole.cache.total_blocks * one + 3 * one  # the residual and three blocks
    engine = InferenceEngine(network, dtype=dtype, max_memory_bytes=fits, prefill_chunk=512)
    assert engine.cache.total_blocks == 3
    with pytest.raises(OutOfMemoryError):
        engine.generate(prompt(1, 60), GREEDY)
    least = fits - 2 * one
    beside = least - one
    with too_few(least, f"of one block ({beside} beside it)" if beside else "of one block"):
        InferenceEngine(network, dtype=dtype, max_memory_bytes=least - 1)


def test_an_engine_that_evicts_within_a_number_of_bytes(network):
    engine = InferenceEngine(network, eviction_policy=EvictionPolicy.H2O(), kv_budget=24, max_memory_bytes=40_000)
    assert 0 < engine.memory()["kv"] <= 40_000
    assert engine.memory()["kv"] == engine.cache.total_blocks * engine.cache.block_memory_bytes
    free = InferenceEngine(network, eviction_policy=EvictionPolicy.H2O(), kv_budget=24)
    assert InferenceEngine(
        network, eviction_policy=EvictionPolicy.H2O(), kv_budget=24, max_memory_bytes="1GiB"
    ).cache.total_blocks == free.cache.total_blocks


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_an_engine_with_a_prefix_cache_within_a_number_of_bytes(network, dtype):
    def engine():
        return InferenceEngine(network, dtype=dtype, num_blocks=20)

    one, alone = engine().cache.block_memory_bytes, engine().memory()["kv"]
    unpacked = PrefixCachedEngine(engine(), 1).memory()["kv"] - alone - one  # the groups of NewestGroups
    for limit in (alone + unpacked + one, alone + unpacked + 30 * one - 1, 200_000 * one):
        cached = PrefixCachedEngine(engine(), max_memory_bytes=limit)
        capacity = cached.prefix_cache.cache.capacity
        assert cached.memory()["kv"] <= limit
        more = PrefixCachedEngine(engine(), capacity + 1)
        assert more.memory()["kv"] > limit
        bounded = PrefixCachedEngine(engine(), capacity + 1, max_memory_bytes=limit)
        assert bounded.cache_stats().capacity_blocks == capacity
    assert PrefixCachedEngine(engine(), 7, max_memory_bytes="1GiB").cache_stats().capacity_blocks == 7
    least = alone + unpacked + one
    kept = engine()
    with too_few(least, "of one block and of the engine's K and V"):
        PrefixCachedEngine(kept, max_memory_bytes=least - 1)
    assert kept.cache.total_blocks == 20
    with neither("max_cache_blocks"):
        PrefixCachedEngine(kept)


def test_every_engine_and_cache_has_the_same_keys(network):
    inner = InferenceEngine(network, dtype="q4")
    alone = inner.memory()
    assert set(alone) == {"weights", *KEYS}
    assert alone["weights"] == network.weights.nbytes > 0
    assert alone["bookkeeping"] > inner.cache.stats().bookkeeping_bytes  # that of the residual is included
    cached = PrefixCachedEngine(inner, 64)
    cached.generate(prompt(2, 100), GREEDY)
    memory = cached.memory()
    assert set(memory) == {"weights", *KEYS}
    assert memory["weights"] == alone["weights"]
    assert memory["kv"] > alone["kv"] + 64 * cached.inner.cache.block_memory_bytes
    assert memory["bookkeeping"] > alone["bookkeeping"] + cached.cache_stats().bookkeeping_bytes
    assert memory["scratch"] >= network.weights.scratch_bytes > 0  # attention of the engine's own cache beside it
    others = (paged(num_blocks=2), blocks(num_blocks=2), PrefixKvCache(), KvCache(1, 2, 8))
    assert all(set(each.memory()) == KEYS for each in (*others, CacheManager(KVCacheConfig(4, 1, 8))))


def test_scratch_is_what_attention_keeps(rng):
    cache = PagedKvCache(64, 16, num_heads=2, head_dim=64)
    cache.allocate_batch([1, 2], [100, 900])
    sizes = [cache.memory()["scratch"]]
    for seq_id, queries in ((1, 1), (2, 1), (2, 256), (1, 1)):
        cache.attention(0, rng.standard_normal((queries, 8, 64), np.float32), [seq_id], query_lens=[queries])
        sizes.append(cache.memory()["scratch"])
    assert sizes == sorted(sizes)  # it grows to the largest call, and is kept
    assert 0 == sizes[0] < sizes[1] < sizes[3] == sizes[4]
    manager = CacheManager(KVCacheConfig(64, 2, 64))
    manager.append(*rng.standard_normal((2, 5, 128), np.float32))
    assert manager.memory()["scratch"] == 0
    manager.attention(rng.standard_normal((1, 2, 64), np.float32))
    assert manager.memory()["scratch"] > 0


@pytest.mark.parametrize("format", MATRIX_FORMATS)
def test_scratch_of_products_is_that_of_the_largest(format, rng):
    one, two = Matrix(16, 64, format), Matrix(32, 64, format)
    stack = MatrixStack([one, two])
    assert (one.scratch_bytes, stack.scratch_bytes) == (0, 0)
    for rows in (1, 7, 3):
        stack.multiply(rng.standard_normal((rows, 64), np.float32))
    line = MATRIX_FORMATS[format]
    groups = -(-64 // line.record) * line.record // 32
    most = 7 * (groups * (32 + 8 + 4 * 32 // line.channels) if line.packed else 64 * 4)
    assert one.scratch_bytes == stack.scratch_bytes == most
    one.multiply(rng.standard_normal((20, 64), np.float32))
    assert one.scratch_bytes == stack.scratch_bytes > two.scratch_bytes == most
