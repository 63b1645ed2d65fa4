"""CacheManager: sizes, policies, rows, attention and bad input."""

import numpy as np
import pytest
from managers import H2O, PyramidKV, SlidingWindow, fill, kept, manager

from kvcache import CacheManager, KVCacheConfig
from kvcache.eviction import pyramid_budgets

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
    # Without a recent window every new row would be evicted at once, since its score is 0.
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


def test_pyramid_keeps_each_layer_within_its_budget():
    cache = manager(8, PyramidKV(4))
    for _ in range(20):
        for layer in (2, 0, 3, 1):
            fill(cache, 1, layer)
            assert len(cache) <= 8
    assert [len(cache.positions(i)) for i in range(4)] == [3, 2, 2, 1]
    assert cache.layers == (0, 1, 2, 3)
    assert kept(cache, 0) == [17, 18, 19]
    # Each layer evicts what exceeds its share of 4.
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
    # Half of 4 and of 3 is 2 recent entries; of the rest the heavy hitter and the latest stay.
    assert kept(cache, 0) == [1, 7, 8, 9]
    assert kept(cache, 1) == [0, 7, 8]


def test_unused_shares_go_to_other_layers():
    cache = manager(100, PyramidKV(4))
    fill(cache, 10, 2)
    assert cache.evict(9) == 1
    assert kept(cache, 2) == list(range(1, 10))
    fill(cache, 10, 3)
    assert cache.evict(12) == 7  # budgets of 5, 4, 2, 1, of which 9 entries are unused
    assert [len(cache.positions(i)) for i in range(4)] == [0, 0, 9, 3]


def test_layers_share_evenly_under_the_other_policies():
    cache = manager(9)
    fill(cache, 9, 1)
    assert len(cache) == 9
    fill(cache, 9, 0)
    # The lower layer gets the odd entry.
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


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ((0, 2, 8), ValueError, "max_seq_len: expected an int >= 1, got 0"),
        ((8, 0, 8), ValueError, "num_heads: expected an int >= 1, got 0"),
        ((8, 2, 0), ValueError, "head_dim: expected an int >= 1, got 0"),
        ((8, 2, 513), ValueError, "head_dim: expected an int <= 512, got 513"),
        ((8.0, 2, 8), TypeError, "max_seq_len: expected an int, got float"),
        ((8, True, 8), TypeError, "num_heads: expected an int, got bool"),
        ((8, 2, 8, 5), ValueError, "2, 3, 4, 8, got 5"),
        ((8, 2, 8, 0), ValueError, "2, 3, 4, 8, got 0"),
        ((8, 2, 8, "4"), TypeError, "quantization_bits: expected an int, got str"),
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
        (lambda c: c.append(ROW[:15], ROW), ValueError, r"key: expected shape \(16\), got \(15,\)"),
        (lambda c: c.append(ROW, ROW[None, :8]), ValueError, "value: expected shape"),
        (lambda c: c.append(np.ones((2, 16)), ROW), ValueError, "value: expected 2 rows, as many as key has, got 1"),
        (lambda c: c.append(np.ones((2, 2, 4)), np.ones((2, 2, 4))), ValueError, "key: expected shape"),
        (lambda c: c.append(ROW.astype(int), ROW), TypeError, "key: expected a float dtype"),
        (lambda c: c.append(ROW * np.nan, ROW), ValueError, "got nan in row 0"),
        (lambda c: c.append(ROW, np.stack([ROW, ROW * np.inf])), ValueError, "as many as key has"),
        (lambda c: c.append(np.stack([ROW, ROW]), np.stack([ROW, ROW * np.inf])), ValueError, "got inf in row 1"),
        (lambda c: c.append(ROW * np.nan, ROW, 1), ValueError, "got nan in row 0"),
        (lambda c: c.append(ROW, ROW, -1), IndexError, "layer_idx: expected an int >= 0, got -1"),
        (lambda c: c.append(ROW, ROW, 0.0), TypeError, "layer_idx: expected an int"),
        (lambda c: c.append(ROW, ROW, None), TypeError, "layer_idx: expected an int"),
        (lambda c: c.get([4]), IndexError, r"positions: expected ints in \[0, 4\), got 4"),
        (lambda c: c.get([0, -1]), IndexError, r"positions: expected ints in \[0, 4\), got -1"),
        (lambda c: c.get([0], 3), IndexError, r"positions: expected ints in \[0, 0\)"),
        (lambda c: c.get([0.0]), TypeError, "positions: expected integers"),
        (lambda c: c.get(0), ValueError, "one dimension"),
        (lambda c: c.positions(-1), IndexError, "layer"),
        (lambda c: c.evict(-1), ValueError, "budget: expected an int >= 0, got -1"),
        (lambda c: c.evict(2.0), TypeError, "budget: expected an int"),
        (lambda c: c.update_attention_scores([1, 2, 3]), ValueError, "scores: expected 4, one per entry, got shape"),
        (lambda c: c.update_attention_scores([1, 2, 3, 4], 1), ValueError, "scores: expected 0"),
        (lambda c: c.update_attention_scores([1, 2, np.nan, 4]), ValueError, "scores: .*finite numbers, got nan at 2"),
        (lambda c: c.update_attention_scores([1, 2, np.inf, 4]), ValueError, "scores: .*finite numbers, got inf at 2"),
        (lambda c: c.update_attention_scores([1, 2, 3, 1.7e308]), ValueError, "overflow"),
        (lambda c: c.update_attention_scores(["a"] * 4), TypeError, "scores: expected a float dtype"),
        (lambda c: c.attention(np.ones((1, 3, 8), np.float32)), ValueError, "queries: .*multiple of 2 heads, got 3"),
        (lambda c: c.attention(np.ones((1, 2, 4), np.float32)), ValueError, "queries: expected shape"),
        (lambda c: c.attention(np.ones((5, 2, 8), np.float32)), ValueError, "queries: .*at most 4, one per .*, got 5"),
        (lambda c: c.attention(np.full((1, 2, 8), np.nan, np.float32)), ValueError, "queries: expected finite numbers"),
        (lambda c: c.attention(np.ones((1, 2, 8), np.float32), 1), ValueError, "queries: expected at most 0"),
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
    with pytest.raises(IndexError, match=r"layer_idx: expected an int in \[0, 2\), got 2"):
        fill(cache, 1, 2)
    assert cache.is_empty


def test_names():
    cache = manager(8, SlidingWindow(3, 2))
    assert "SlidingWindow(window=3, sink=2)" in repr(cache)
    assert str(H2O()) == "H2O(recent_fraction=0.5)"
    assert str(PyramidKV(4)) == "PyramidKV(total_layers=4, recent_fraction=0.5)"
