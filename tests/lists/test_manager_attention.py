"""CacheManager.attention over entries in scattered slots, compared with float64."""

import numpy as np
import pytest
from managers import BITS, PyramidKV, compare, fill, manager
from oracles.kernels import attention

from kvcache.lists.manager_config import FORMAT_OF_BITS


@pytest.fixture
def unquantised(monkeypatch):
    """Disable quantisation, for tests that do not depend on the format."""
    for bits in BITS:
        monkeypatch.setitem(FORMAT_OF_BITS, bits, "f32")


def scattered(bits, heads, dim, rng, n=300, capacity=200):
    """A cache whose entries are in the slots of evicted ones."""
    cache = manager(capacity, heads=heads, dim=dim, bits=bits)
    for _ in range(3):
        fill(cache, n, rng=rng)
        cache.update_attention_scores(rng.random(len(cache)))
    cache.evict(capacity - 30)
    fill(cache, 17, rng=rng)
    cache.check()
    return cache


@pytest.mark.parametrize("num_queries", [1, 2, 65])
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 64), (1, 1, 4), (3, 2, 40)])
def test_attention_over_scattered_slots(unquantised, num_queries, heads, group, dim):
    rng = np.random.default_rng(num_queries)
    cache = scattered(4, heads, dim, rng)
    q = rng.standard_normal((num_queries, heads * group, dim)).astype(np.float32)
    compare(cache, q, cache.attention(q, return_scores=True), 5e-6)
    np.testing.assert_array_equal(cache.attention(q), cache.attention(q, return_scores=True)[0])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 128), (1, 1, 12), (3, 2, 64)])
def test_attention_on_packed_rows(bits, heads, group, dim):
    rng = np.random.default_rng(bits)
    cache = scattered(bits, heads, dim, rng)
    for num_queries in (1, 9):
        q = rng.standard_normal((num_queries, heads * group, dim)).astype(np.float32)
        compare(cache, q, cache.attention(q, return_scores=True), 2e-2)


def test_attention_of_one_layer(unquantised, rng):
    cache = manager(20, PyramidKV(2), heads=1, dim=8)
    fill(cache, 30, 0, rng)
    k, v = fill(cache, 30, 1, rng)
    q = rng.standard_normal((1, 1, 8)).astype(np.float32)
    at = cache.positions(1)
    out, mass = cache.attention(q, 1, True, scale=0.7)
    want, want_mass = attention(q, k[at][:, None], v[at][:, None], 0.7)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mass, want_mass, rtol=1e-5, atol=1e-5)
    assert cache.attention(np.empty((0, 1, 8), np.float32), 0).shape == (0, 1, 8)
    options = {"softcap": 0.5, "sinks": np.array([1.5])}
    out, mass = cache.attention(q, 1, True, **options)
    want, want_mass = attention(q, k[at][:, None], v[at][:, None], 8**-0.5, **options)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mass, want_mass, rtol=1e-5, atol=1e-5)
    for name, wrong in (("softcap", 0), ("sinks", np.ones(2)), ("sinks", "x")):
        with pytest.raises((TypeError, ValueError), match=f"{name}: expected"):
            cache.attention(q, 1, **{name: wrong})
