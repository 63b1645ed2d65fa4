"""`AttentionCall` and `QueriedSequences`: what was checked once and is used for many calls."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import PagedKvCache
from kvcache.core.attention_call import AttentionCall
from kvcache.paged.queried import QueriedSequences


def test_a_kept_call_does_not_change_with_the_arrays_it_was_made_of():
    rng = np.random.default_rng(1)
    cache = PagedKvCache(8, 4, 2, 8, dtype="f32")
    ids, lens, starts, sinks = np.array([3, 5], np.uint64), np.array([2, 1]), np.array([0, 4]), np.ones(4, np.float32)
    cache.allocate_batch(ids, np.array([6, 7]))
    keys, values, queries = (rng.standard_normal((3, heads, 8), np.float32) for heads in (2, 2, 4))
    sequences = QueriedSequences(ids.copy(), lens, starts=starts).kept()
    call = AttentionCall(0.5, 3, 20.0, sinks).kept()
    expected_sinks = sinks.copy()
    lens[:], starts[:], sinks[:] = (1, 2), 9, 5
    got = cache.write_and_attend(sequences, {7: (0, call, True)}, 7, queries, keys, values)
    options = {"scale": 0.5, "window": 3, "softcap": 20.0, "sinks": expected_sinks}
    expected = cache.attention(0, queries, ids, query_lens=[2, 1], starts=[0, 4], **options)
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(ValueError, match="read-only"):
        call.sinks[0] = 2


@pytest.mark.parametrize("options", [{"dtype": "f32"}, {"dtype": "q8"}, {"dtype": "q4", "residual_length": 12}])
def test_one_call_for_two(rng, options):
    """`write_and_attend` is `write_ragged` and `attention` of the same tokens, bit for bit."""
    one, two = (PagedKvCache(20, 8, 2, 16, **options) for _ in range(2))
    ids, lens = np.array([3, 7], np.uint64), np.array([5, 1])
    for cache in (one, two):
        cache.allocate_batch(ids, [0, 9])
    sequences, calls = QueriedSequences(ids, lens).kept(), {4: (0, AttentionCall(0.3).kept(), True)}
    calls |= {5: (*calls[4][:2], False)}
    for _ in range(4):
        keys, values = rng.standard_normal((2, 6, 2, 16), np.float32)
        queries = rng.standard_normal((6, 4, 16), np.float32)
        for cache in (one, two):
            cache.append_batch(ids, lens)
        one.write_ragged(0, ids, lens, keys, values)
        want = one.attention(0, queries, ids, query_lens=lens, scale=0.3)
        np.testing.assert_array_equal(two.write_and_attend(sequences, calls, 4, queries, keys, values), want)
        np.testing.assert_array_equal(two.write_and_attend(sequences, calls, 5, queries, None, None), want)
    with pytest.raises(ValueError, match="queries"):
        two.write_and_attend(sequences, calls, 4, queries[:5], keys, values)
    with pytest.raises(TypeError):  # which would be read before anything is written
        two.write_and_attend(sequences, calls, 4, queries, None, None)
    for rows in ((keys, values), (keys, None), (None, values)):
        with pytest.raises(ValueError, match="keys: expected None for layer 5, which reads K and V of another one"):
            two.write_and_attend(sequences, calls, 5, queries, *rows)


@pytest.mark.parametrize("sinks", [[1.0, 2.0], np.ones((2, 4), np.float32)])
def test_sinks_of_a_kept_call_are_those_of_the_queries(sinks):
    cache = PagedKvCache(8, 4, 2, 8)
    cache.allocate(1, 4)
    rows, queries = np.ones((1, 2, 8), np.float32), np.ones((1, 4, 8), np.float32)
    calls = {0: (0, AttentionCall(sinks=np.asarray(sinks, np.float32)).kept(), True)}
    with pytest.raises(ValueError, match=r"sinks: expected shape \((1, )?4,?\), got"):
        cache.write_and_attend(QueriedSequences([1], [1]).kept(), calls, 0, queries, rows, rows)


def test_a_kept_call_refuses_sinks_that_are_not_finite():
    with pytest.raises(ValueError, match="sinks: expected finite numbers, got NaN or infinity"):
        AttentionCall(sinks=np.array([np.nan], np.float32)).kept()
