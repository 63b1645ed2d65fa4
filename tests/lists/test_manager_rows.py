"""CacheManager: the rows of an entry, their size, and their values when read."""

import numpy as np
import pytest
from managers import BITS, SlidingWindow, compare, fill, kept, manager

from kvcache import CacheManager, KVCacheConfig


@pytest.mark.parametrize(
    ("bits", "row", "heads", "bound"),
    [
        (4, [0, 0.5, 1, -1, 0.25, -0.5, 0.75, -0.25], 2, 0.15),
        (3, [0, 0.5, 1, -1, 0.3, -0.7, 0.8, -0.2], 2, 0.35),
        (4, [0, 0.5, -0.5, 1, -1], 1, 0.2),
    ],
)
def test_round_trip(bits, row, heads, bound):
    cache = manager(heads=heads, dim=len(row) // heads, bits=bits)
    cache.append(row, row)
    for got in cache.get([0]):
        assert got.shape == (1, len(row))
        assert np.abs(got[0] - row).max() < bound


def test_ties_round_to_even():
    # 0 and 255 make the scale 1 (fewer bits would be fitted). Seven channels are padded in storage and so not rotated.
    row = np.array([0, 255, 2.5, 3.5, 4.5, 1.3, 1.7], np.float32)
    cache = manager(heads=1, dim=7, bits=8)
    cache.append(row, row)
    np.testing.assert_array_equal(cache.get([0])[0][0], [0, 255, 2, 4, 4, 1, 2])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [4, 5, 8, 40, 64])
@pytest.mark.parametrize("constant", [0.5, 0.42, 1.0, 100.0, -1.0, -0.42])
def test_constant_rows_are_exact(bits, dim, constant):
    cache = manager(dim=dim, bits=bits)
    row = np.full(2 * dim, constant, np.float32)
    cache.append(row, -row)
    k, v = cache.get([0])
    np.testing.assert_allclose(k[0], row, rtol=2e-3)
    np.testing.assert_allclose(v[0], -row, rtol=2e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 128])
def test_sizes_are_those_of_packed_rows(bits, dim):
    cache = manager(64, heads=8, dim=dim, bits=bits)
    assert cache.compression_ratio == 4 * dim / (dim * bits / 8 + 4)
    fill(cache, 64)
    assert cache.memory_bytes == 64 * 2 * 8 * (dim * bits // 8 + 4)
    assert cache._layers[0].store.nbytes == cache.memory_bytes


def test_known_ratios():
    assert round(manager(dim=128, bits=4).compression_ratio, 2) == 7.53
    assert manager().compression_ratio > 1
    # Each bit less reduces the size.
    ratios = [manager(dim=128, bits=bits).compression_ratio for bits in BITS]
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize("value", BITS)
@pytest.mark.parametrize("key", BITS)
def test_keys_and_values_of_different_bits(key, value):
    """Each side is the same as in a cache with these bits on both sides."""
    cache = CacheManager(KVCacheConfig(64, 2, 64, key_bits=key, value_bits=value))
    alike = [manager(64, dim=64, bits=bits) for bits in (key, value)]
    for c in (cache, *alike):
        fill(c, 20, rng=np.random.default_rng(0))
    for side, other in enumerate(alike):
        np.testing.assert_array_equal(cache.get(range(20))[side], other.get(range(20))[side])
    assert cache.memory_bytes == sum(other.memory_bytes for other in alike) / 2
    assert cache.compression_ratio == 2 * 64 * 8 / (cache.memory_bytes / 20)
    q = np.random.default_rng(1).standard_normal((1, 4, 64)).astype(np.float32)
    compare(cache, q, cache.attention(q, return_scores=True), 2e-2)


@pytest.mark.parametrize("name", ["quantization_bits", "key_bits", "value_bits"])
def test_unsupported_bits(name):
    for bits in (0, 1, 5, 6, 7, 16, 32, -4):
        with pytest.raises(ValueError, match=f"{name}: expected one of 2, 3, 4, 8, got {bits}"):
            KVCacheConfig(8, 2, 8, **{name: bits})
    with pytest.raises(TypeError, match=name):
        KVCacheConfig(8, 2, 8, **{name: 4.0})


def test_memory_grows_by_the_entry():
    cache = manager()
    assert cache.memory_bytes == 0
    fill(cache, 1)
    one = cache.memory_bytes
    fill(cache, 1)
    assert one > 0
    assert cache.memory_bytes == 2 * one
    assert cache.allocated_bytes >= cache.memory_bytes


def test_append_and_get():
    cache = manager()
    cache.append(np.ones(8, np.float32), -np.ones(8, np.float32))
    assert (len(cache), cache.is_empty) == (1, False)
    k, v = cache.get([0])
    np.testing.assert_array_equal(k, np.ones((1, 8)))
    np.testing.assert_array_equal(v, -np.ones((1, 8)))


def test_empty():
    cache = manager()
    assert (len(cache), cache.is_empty, cache.layers) == (0, True, ())
    k, v = cache.get([])
    assert k.shape == v.shape == (0, 8)
    assert kept(cache) == []
    assert cache.evict(0) == 0
    cache.update_attention_scores([])
    cache.append(np.empty((0, 8), np.float32), np.empty((0, 8), np.float32))
    assert cache.layers == ()
    with pytest.raises(IndexError, match=r"positions: expected ints in \[0, 0\), got 0"):
        cache.get([0])


def test_one_entry_of_constants_survives():
    cache = manager(bits=3)
    cache.append([0.42] * 8, [-0.42] * 8)
    cache.update_attention_scores([1.0])
    assert cache.evict(1) == 0
    assert len(cache) == 1
    k, v = cache.get([0])
    assert k.shape == v.shape == (1, 8)
    np.testing.assert_allclose(k, 0.42, rtol=1e-3)
    np.testing.assert_allclose(v, -0.42, rtol=1e-3)


def test_a_first_use():
    cache = CacheManager(KVCacheConfig(128, 4, 16, 4, SlidingWindow(64, 4)))
    cache.append([0.5] * 64, [-0.3] * 64, 0)
    k, v = cache.get([0])
    assert len(k) == 1
    np.testing.assert_allclose(k, 0.5, rtol=2e-3)
    np.testing.assert_allclose(v, -0.3, rtol=2e-3)
