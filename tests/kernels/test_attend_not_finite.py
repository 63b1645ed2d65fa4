"""Queries with NaN or infinities: NaN in their own results, and nothing in others. Large ones."""

import numpy as np
import pytest
from pace import half

from kvcache import PagedKvCache
from kvcache.kernels.kernels import FORMATS

HEADS, GROUP, DIM, TOKENS = 2, 3, 64, 300


@pytest.fixture
def cache(rng, format):
    cache = PagedKvCache(40, 16, HEADS, DIM, dtype=format)
    for seq_id in (1, 2):
        cache.allocate(seq_id, TOKENS)
        cache.write(0, seq_id, *rng.standard_normal((2, TOKENS, HEADS, DIM)).astype(np.float32))
    return cache


def queries_of(rng, n):
    return rng.standard_normal((n, HEADS * GROUP, DIM)).astype(np.float32)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("count", "bad"), half([(1, np.nan), (2, np.inf), (5, -np.inf), (40, np.nan), (40, np.inf), (TOKENS, -np.inf)])
)
def test_a_query_that_is_not_finite(rng, cache, format, bad, count):
    """It is in a call with others, of its own sequence and of another one."""
    queries = queries_of(rng, count + 3)
    row, head, options = count // 2, 4, {"query_lens": [count, 3], "return_lse": True, "return_scores": "head"}
    for settings in ({}, {"softcap": 20.0}, {"sinks": np.linspace(-2, 2, HEADS * GROUP)}, {"window": 100}):
        broken = queries.copy()
        broken[row, head, 7] = bad
        got = cache.attention(0, broken, [1, 2], **options, **settings)
        want = cache.attention(0, queries, [1, 2], **options, **settings)
        assert np.isnan(got[0][row, head]).all()
        assert np.isnan(got[2][row, head])
        for ours, others in ((got[0], want[0]), (got[2], want[2])):
            ours[row, head] = others[row, head] = 0
            np.testing.assert_array_equal(ours, others)
        lost, others = want[1] - got[1], got[1][1 - head // GROUP]
        np.testing.assert_array_equal(others, want[1][1 - head // GROUP])
        lost = lost[head // GROUP].astype(np.float64)
        seen = TOKENS - count + row + 1
        assert (lost[seen:] == 0).all()
        assert lost.min() > -1e-4
        assert lost.sum() == pytest.approx(1, abs=1e-3) or ("sinks" in settings and 0 < lost.sum() < 1)


@pytest.mark.parametrize("format", ["f32", "q4"])
def test_where_all_scores_are_minus_infinity(rng, format):
    """One token, whose key points away from the query."""
    cache = PagedKvCache(1, 16, 1, DIM, dtype=format)
    cache.allocate(1, 1)
    keys = np.full((1, 1, DIM), -1, np.float32)
    cache.write(0, 1, keys, keys)
    query = np.zeros((1, 1, DIM), np.float32)
    query[..., 3] = np.inf
    out, lse = cache.attention(0, query, [1], return_lse=True)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize("format", FORMATS)
def test_beside_sequences_that_share_blocks(rng, cache, format):
    """They are read together, once for all."""
    ids = [1, *range(3, 10)]
    for seq_id in ids[1:]:
        cache.fork(1, seq_id)
    queries = rng.standard_normal((len(ids), HEADS, DIM)).astype(np.float32)
    broken = queries.copy()
    broken[3, 1, 0] = np.inf
    got, want = cache.attention(0, broken, ids), cache.attention(0, queries, ids)
    assert np.isnan(got[3, 1]).all()
    got[3, 1] = want[3, 1]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", ["q8", "q4"])
def test_with_a_residual(rng, format):
    cache = PagedKvCache(40, 16, HEADS, DIM, dtype=format, residual_length=32)
    cache.allocate(1, 100)
    cache.write(0, 1, *rng.standard_normal((2, 100, HEADS, DIM)).astype(np.float32))
    queries = queries_of(rng, 3)
    broken = queries.copy()
    broken[1, 0, 0] = np.nan
    for scores in (False, True):
        got = cache.attention(0, broken, [1], query_lens=[3], return_scores=scores)
        want = cache.attention(0, queries, [1], query_lens=[3], return_scores=scores)
        ours, others = (got[0], want[0]) if scores else (got, want)
        assert np.isnan(ours[1, 0]).all()
        ours[1, 0] = others[1, 0] = 0
        np.testing.assert_array_equal(ours, others)
        assert not scores or np.isfinite(got[1]).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_scores(sign):
    """Keys and queries as large as they may be: scores are near 2^103 or -2^103, and softmax is what it always is."""
    cache = PagedKvCache(4, 16, 1, DIM, dtype="f32")
    cache.allocate(1, 20)
    values = np.arange(20 * DIM, dtype=np.float32).reshape(20, 1, DIM)
    cache.write(0, 1, np.full((20, 1, DIM), 2.0**95, np.float32), values)
    query = np.full((1, 1, DIM), sign * 1e3, np.float32)
    out, masses, lse = cache.attention(0, query, [1], return_scores=True, return_lse=True)
    np.testing.assert_allclose(out, values.mean(0, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(masses, 1 / 20, rtol=1e-5)
    assert lse[0, 0] == pytest.approx(sign * 1e3 * 2.0**95 * DIM**0.5, rel=1e-5)
