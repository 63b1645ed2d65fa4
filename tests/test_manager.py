"""CacheManager: sizes, policies, rows, attention and bad input."""

import numpy as np
import pytest
from oracle import attention

from kvcache import CacheManager, EvictionPolicy, KVCacheConfig
from kvcache.eviction import pyramid_budgets
from kvcache.manager_config import FORMATS

H2O, SlidingWindow, PyramidKV = EvictionPolicy.H2O, EvictionPolicy.SlidingWindow, EvictionPolicy.PyramidKV
BITS = sorted(FORMATS)


@pytest.fixture
def unquantised(monkeypatch):
    """Rows as they came, for what does not depend on the format."""
    for bits in BITS:
        monkeypatch.setitem(FORMATS, bits, "f32")


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


# -- what one row is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "row", "heads", "bound"),
    [
        (4, [0, 0.5, 1, -1, 0.25, -0.5, 0.75, -0.25], 2, 0.15),
        (3, [0, 0.5, 1, -1, 0.3, -0.7, 0.8, -0.2], 2, 0.35),
        (4, [0, 0.5, -0.5, 1, -1], 1, 0.2),
    ],
)
def test_round_trip(simd, bits, row, heads, bound):
    cache = manager(heads=heads, dim=len(row) // heads, bits=bits)
    cache.append(row, row)
    for got in cache.get([0]):
        assert got.shape == (1, len(row))
        assert np.abs(got[0] - row).max() < bound


def test_ties_round_to_even(simd):
    # 0 and 255 make the scale 1 (fewer bits would be fitted); seven channels are stored padded, and so not rotated.
    row = np.array([0, 255, 2.5, 3.5, 4.5, 1.3, 1.7], np.float32)
    cache = manager(heads=1, dim=7, bits=8)
    cache.append(row, row)
    np.testing.assert_array_equal(cache.get([0])[0][0], [0, 255, 2, 4, 4, 1, 2])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [4, 5, 8, 40, 64])
@pytest.mark.parametrize("constant", [0.5, 0.42, 1.0, 100.0, -1.0, -0.42])
def test_constant_rows_come_back(simd, bits, dim, constant):
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
    # Every bit saved is a bit saved.
    ratios = [manager(dim=128, bits=bits).compression_ratio for bits in BITS]
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize("value", BITS)
@pytest.mark.parametrize("key", BITS)
def test_keys_and_values_of_different_bits(key, value):
    """Each side is what it is in a cache of these bits on both sides."""
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
def test_bits_that_are_not_supported(name):
    for bits in (0, 1, 5, 6, 7, 16, 32, -4):
        with pytest.raises(ValueError, match=f"{name} to be 2, 3, 4 or 8, got {bits}"):
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
    with pytest.raises(IndexError, match=r"positions in \[0, 0\), got 0"):
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


# -- policies ------------------------------------------------------------------------------------------------


def test_h2o_evicts_the_lowest_score():
    cache = manager()
    fill(cache, 4)
    cache.update_attention_scores([5, 1, 3, 4])
    assert cache.evict(3) == 1
    assert len(cache) == 3
    assert kept(cache) == [0, 2, 3]
    assert cache.attention_scores().tolist() == [5, 3, 4]


def test_h2o_protects_the_newest():
    cache = manager(8)
    fill(cache, 8)
    cache.update_attention_scores(np.full(8, 10.0))
    # Without a recent window every new row would leave at once, since its score is 0.
    for i in range(8, 20):
        fill(cache, 1)
        assert kept(cache)[-4:] == list(range(i - 3, i + 1))
        assert kept(cache)[0] == (1 if i < 11 else 4) or len(cache) == 8


def test_h2o_keeps_heavy_hitters():
    cache = manager(8)
    fill(cache, 8)
    cache.update_attention_scores([0, 9, 0, 9, 0, 0, 0, 0])
    fill(cache, 100)
    assert kept(cache)[:2] == [1, 3]
    assert kept(cache)[-4:] == [104, 105, 106, 107]


@pytest.mark.parametrize(("fraction", "want"), [(0.0, [0, 1, 2, 3]), (1.0, [8, 9, 10, 11]), (0.25, [0, 1, 2, 11])])
def test_h2o_fractions(fraction, want):
    cache = manager(4, H2O(fraction))
    fill(cache, 4)
    cache.update_attention_scores([4, 3, 2, 1])
    fill(cache, 8)
    assert kept(cache) == want


def test_without_scores_h2o_is_first_in_first_out():
    cache = manager(8)
    for _ in range(12):
        fill(cache, 1)
        assert len(cache) <= 8
    assert kept(cache) == list(range(4, 12))


def test_sliding_window_evicts_to_its_budget():
    cache = manager(100, SlidingWindow(3, 2))
    fill(cache, 10)
    assert cache.evict(5) == 0  # enforced at every append
    assert kept(cache) == [0, 1, 7, 8, 9]
    for budget, want in ((4, [0, 1, 8, 9]), (3, [0, 1, 9]), (2, [0, 9]), (1, [9]), (0, [])):
        cache.evict(budget)
        assert kept(cache) == want
    fill(cache, 7)
    assert kept(cache) == [10, 11, 14, 15, 16]


@pytest.mark.parametrize(
    ("max_seq_len", "window", "sink", "want"),
    [(8, 3, 2, 5), (4, 6, 2, 4), (1, 3, 1, 1), (100, 1, 0, 1), (5, 3, 9, 5)],
)
def test_sliding_window_at_every_append(max_seq_len, window, sink, want):
    cache = manager(max_seq_len, SlidingWindow(window, sink))
    for i in range(40):
        fill(cache, 1)
        assert len(cache) == min(i + 1, want)
        assert kept(cache)[-1] == i
    sinks = min(sink, want - 1)
    assert kept(cache) == [*range(sinks), *range(40 - want + sinks, 40)]


def test_pyramid_budgets():
    cache = manager(8, PyramidKV(4))
    assert [cache.pyramid_budget(i, 4) for i in range(4)] == [3, 2, 2, 1]
    assert pyramid_budgets(10, 4) == (4, 3, 2, 1)
    assert pyramid_budgets(10, 10) == (1,) * 10
    assert pyramid_budgets(3, 5) == (1, 1, 1, 0, 0)
    for layers in (1, 2, 3, 4, 7, 32, 80):
        for budget in (1, 2, 8, 31, 32, 100, 1024, 4097):
            budgets = pyramid_budgets(budget, layers)
            assert sum(budgets) == budget
            assert list(budgets) == sorted(budgets, reverse=True)
            assert min(budgets) >= (budget >= layers)
            if budget > 2 * layers > 2:
                assert budgets[0] > budgets[-1]


def test_pyramid_holds_each_layer_to_its_budget():
    cache = manager(8, PyramidKV(4))
    for _ in range(20):
        for layer in (2, 0, 3, 1):
            fill(cache, 1, layer)
            assert len(cache) <= 8
    assert [len(cache.positions(i)) for i in range(4)] == [3, 2, 2, 1]
    assert cache.layers == (0, 1, 2, 3)
    assert kept(cache, 0) == [17, 18, 19]
    # Each layer gives up what it has over its share of 4.
    assert cache.evict(4) == 4
    assert [len(cache.positions(i)) for i in range(4)] == list(pyramid_budgets(4, 4))


def test_pyramid_evicts_like_h2o_inside_a_layer():
    cache = manager(10, PyramidKV(4))
    fill(cache, 4, 0)
    fill(cache, 3, 1)
    cache.update_attention_scores([0, 7, 0, 0], 0)
    cache.update_attention_scores([7, 0, 0], 1)
    fill(cache, 6, 0)
    fill(cache, 6, 1)
    # Half of 4 and of 3 is 2: these are recent, and of the rest the heavy hitter and the latest stay.
    assert kept(cache, 0) == [1, 7, 8, 9]
    assert kept(cache, 1) == [0, 7, 8]


def test_what_a_layer_leaves_of_its_share_serves_the_others():
    cache = manager(100, PyramidKV(4))
    fill(cache, 10, 2)
    assert cache.evict(9) == 1
    assert kept(cache, 2) == list(range(1, 10))
    fill(cache, 10, 3)
    assert cache.evict(12) == 7  # budgets of 5, 4, 2, 1, and 9 of them unused
    assert [len(cache.positions(i)) for i in range(4)] == [0, 0, 9, 3]


def test_layers_share_evenly_under_the_other_policies():
    cache = manager(9)
    fill(cache, 9, 1)
    assert len(cache) == 9
    fill(cache, 9, 0)
    # The lower layer takes the odd one.
    assert [kept(cache, i) for i in (0, 1)] == [[4, 5, 6, 7, 8], [5, 6, 7, 8]]
    assert cache.evict(2, layer_idx=1) == 2
    assert [kept(cache, i) for i in (0, 1)] == [[4, 5, 6, 7, 8], [7, 8]]
    k, _ = cache.get([0, 4, 5, 6])
    np.testing.assert_allclose(k[:, 0], [4, 8, 7, 8], rtol=2e-3)
    k, _ = cache.get([1, 1, 0], layer_idx=1)
    np.testing.assert_allclose(k[:, 0], [8, 8, 7], rtol=2e-3)
    cache.update_attention_scores(np.arange(7.0))
    assert [cache.attention_scores(i).tolist() for i in (0, 1, 2)] == [[0, 1, 2, 3, 4], [5, 6], []]
    assert kept(cache, 7) == []


def test_one_layer_more_than_entries():
    cache = manager(2)
    for layer in range(4):
        fill(cache, 3, layer)
        assert len(cache) == 2
    assert [len(cache.positions(i)) for i in range(4)] == [1, 1, 0, 0]


# -- attention -----------------------------------------------------------------------------------------------


def scattered(bits, heads, dim, rng, n=300, capacity=200):
    """A cache whose entries lie in the slots of others."""
    cache = manager(capacity, heads=heads, dim=dim, bits=bits)
    for _ in range(3):
        fill(cache, n, rng=rng)
        cache.update_attention_scores(rng.random(len(cache)))
    cache.evict(capacity - 30)
    fill(cache, 17, rng=rng)
    cache.check()
    return cache


def compare(cache, q, got, tolerance):
    heads, dim = cache.config.num_heads, cache.config.head_dim
    k, v = (x.reshape(-1, heads, dim) for x in cache.get(range(len(cache))))
    out, mass = attention(q, k, v, dim**-0.5)
    assert got[0].shape == q.shape
    assert np.abs(got[0] - out).max() <= tolerance * np.abs(out).max()
    assert np.abs(got[1] - mass).max() <= tolerance * mass.max()


@pytest.mark.parametrize("num_queries", [1, 2, 65])
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 64), (1, 1, 4), (3, 2, 40)])
def test_attention_over_scattered_slots(simd, unquantised, num_queries, heads, group, dim):
    rng = np.random.default_rng(num_queries)
    cache = scattered(4, heads, dim, rng)
    q = rng.standard_normal((num_queries, heads * group, dim)).astype(np.float32)
    compare(cache, q, cache.attention(q, return_scores=True), 5e-6)
    np.testing.assert_array_equal(cache.attention(q), cache.attention(q, return_scores=True)[0])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 128), (1, 1, 12), (3, 2, 64)])
def test_attention_on_packed_rows(simd, bits, heads, group, dim):
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


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ((0, 2, 8), ValueError, "max_seq_len in"),
        ((8, 0, 8), ValueError, "num_heads in"),
        ((8, 2, 0), ValueError, "head_dim in"),
        ((8, 2, 257), ValueError, "head_dim in"),
        ((8.0, 2, 8), TypeError, "max_seq_len to be an int, got float"),
        ((8, True, 8), TypeError, "num_heads to be an int, got bool"),
        ((8, 2, 8, 5), ValueError, "2, 3, 4 or 8, got 5"),
        ((8, 2, 8, 0), ValueError, "2, 3, 4 or 8, got 0"),
        ((8, 2, 8, "4"), TypeError, "quantization_bits to be an int, got str"),
        ((8, 2, 8, 4, "H2O"), TypeError, "EvictionPolicy, got str"),
    ],
)
def test_bad_configs(settings, error, message):
    with pytest.raises(error, match=message):
        KVCacheConfig(*settings)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: H2O(1.5), ValueError),
        (lambda: H2O(float("nan")), ValueError),
        (lambda: SlidingWindow(0, 2), ValueError),
        (lambda: SlidingWindow(3, -1), ValueError),
        (lambda: SlidingWindow(3.0, 1), TypeError),
        (lambda: PyramidKV(0), ValueError),
        (lambda: PyramidKV(True), TypeError),
        (lambda: CacheManager(8), TypeError),
        (lambda: manager().pyramid_budget(0, 0), ValueError),
        (lambda: manager().pyramid_budget(4, 4), IndexError),
        (lambda: manager().pyramid_budget(-1, 4), IndexError),
        (lambda: manager().pyramid_budget(0.0, 4), TypeError),
    ],
)
def test_bad_policies(make, error):
    with pytest.raises(error, match="expected"):
        make()


ROW = np.ones(16, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.append(ROW[:15], ROW), ValueError, r"key of shape \(16\), got \(15,\)"),
        (lambda c: c.append(ROW, ROW[None, :8]), ValueError, "value of shape"),
        (lambda c: c.append(np.ones((2, 16)), ROW), ValueError, "as many values as keys, 2, got 1"),
        (lambda c: c.append(np.ones((2, 2, 4)), np.ones((2, 2, 4))), ValueError, "key of shape"),
        (lambda c: c.append(ROW.astype(int), ROW), TypeError, "key of a float dtype"),
        (lambda c: c.append(ROW * np.nan, ROW), ValueError, "got nan in row 0"),
        (lambda c: c.append(ROW, np.stack([ROW, ROW * np.inf])), ValueError, "as many values"),
        (lambda c: c.append(np.stack([ROW, ROW]), np.stack([ROW, ROW * np.inf])), ValueError, "got inf in row 1"),
        (lambda c: c.append(ROW * np.nan, ROW, 1), ValueError, "got nan in row 0"),
        (lambda c: c.append(ROW, ROW, -1), IndexError, r"layer in \[0, any\), got -1"),
        (lambda c: c.append(ROW, ROW, 0.0), TypeError, "layer_idx to be an int"),
        (lambda c: c.append(ROW, ROW, None), TypeError, "layer_idx to be an int"),
        (lambda c: c.get([4]), IndexError, r"positions in \[0, 4\), got 4"),
        (lambda c: c.get([0, -1]), IndexError, r"positions in \[0, 4\), got -1"),
        (lambda c: c.get([0], 3), IndexError, r"positions in \[0, 0\)"),
        (lambda c: c.get([0.0]), TypeError, "integer positions"),
        (lambda c: c.get(0), ValueError, "one dimension"),
        (lambda c: c.positions(-1), IndexError, "layer"),
        (lambda c: c.evict(-1), ValueError, "budget >= 0, got -1"),
        (lambda c: c.evict(2.0), TypeError, "budget to be an int"),
        (lambda c: c.update_attention_scores([1, 2, 3]), ValueError, "4 scores, one per entry, got shape"),
        (lambda c: c.update_attention_scores([1, 2, 3, 4], 1), ValueError, "0 scores"),
        (lambda c: c.update_attention_scores([1, 2, np.nan, 4]), ValueError, "finite scores, got nan at 2"),
        (lambda c: c.update_attention_scores([1, 2, np.inf, 4]), ValueError, "finite scores, got inf at 2"),
        (lambda c: c.update_attention_scores([1, 2, 3, 1.7e308]), ValueError, "overflow"),
        (lambda c: c.update_attention_scores(["a"] * 4), TypeError, "scores of a float dtype"),
        (lambda c: c.attention(np.ones((1, 3, 8), np.float32)), ValueError, "multiple of 2 query heads, got 3"),
        (lambda c: c.attention(np.ones((1, 2, 4), np.float32)), ValueError, "queries of shape"),
        (lambda c: c.attention(np.ones((5, 2, 8), np.float32)), ValueError, "at most 4 queries, one per entry, got 5"),
        (lambda c: c.attention(np.full((1, 2, 8), np.nan, np.float32)), ValueError, "finite queries"),
        (lambda c: c.attention(np.ones((1, 2, 8), np.float32), 1), ValueError, "at most 0 queries"),
        (lambda c: c.attention(np.ones((1, 2, 8), np.float32), -1), IndexError, "layer"),
    ],
)
def test_bad_calls_change_nothing(call, error, message):
    cache = manager(4, dim=8)
    fill(cache, 6)
    cache.update_attention_scores([1, 2, 3, 1.7e308])
    before = kept(cache), cache.attention_scores().tolist(), cache.get(range(4))[0].tolist(), cache.layers
    with pytest.raises(error, match=message):
        call(cache)
    after = kept(cache), cache.attention_scores().tolist(), cache.get(range(4))[0].tolist(), cache.layers
    assert after == before
    fill(cache, 1)
    assert kept(cache)[-1] == 6


def test_a_layer_outside_the_pyramid():
    cache = manager(8, PyramidKV(2))
    with pytest.raises(IndexError, match=r"layer in \[0, 2\), got 2"):
        fill(cache, 1, 2)
    assert cache.is_empty


def test_names():
    cache = manager(8, SlidingWindow(3, 2))
    assert "SlidingWindow(window=3, sink=2)" in repr(cache)
    assert str(H2O()) == "H2O(recent_fraction=0.5)"
    assert str(PyramidKV(4)) == "PyramidKV(total_layers=4, recent_fraction=0.5)"
