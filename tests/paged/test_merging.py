"""Attention over the parts of a context, merged, against attention over the whole."""

import numpy as np
import pytest
from blocks import Scattered
from oracles import kernels as oracle
from oracles.bits import merged

from kvcache import PagedKvCache, merge_attention
from kvcache.kernels import kernelcalls
from kvcache.kernels.functions import merge_parts

FORMATS = {"f32": 2e-5, "f16": 2e-5, "q8": 0.01, "q6": 0.01, "q5": 0.01, "q4": 0.01, "q3": 0.01, "q2": 0.01}


@pytest.mark.parametrize(("hidden", "threads"), [(0, 1), (1, 3), (16, 1), (15, 3), (1000, 1), (17, 3), (40, 1)])
@pytest.mark.parametrize(("name", "tolerance"), FORMATS.items())
def test_hidden_tokens_and_log_sum_exp(rng, name, tolerance, hidden, threads):
    lengths, counts = [33, 1, 700, 64], [2, 1, 1, 40]
    s = Scattered(rng, lengths, dim=32, key_format=name, value_format=name)
    queries = rng.standard_normal((sum(counts), 2 * s.layout.num_heads, 32)).astype(np.float32)
    shown = [max(0, n - hidden) for n in lengths]
    out, lse = np.full_like(queries, np.nan), np.full(queries.shape[:2], np.nan, np.float32)
    scores = np.full(sum(shown), np.nan, np.float32)
    kernelcalls.attend(
        s.layout, s.arena, [(runs, n, 0) for runs, n in zip(s.runs, counts, strict=True)], queries, 0.2,
        out=out, scores=scores, lse=lse, hidden_tokens=hidden, threads=threads,
    )
    at = token = 0
    for i, (tokens, count, seen) in enumerate(zip(lengths, counts, shown, strict=True)):
        mass = np.zeros(seen)
        for j in range(count):
            row = queries[at + j : at + j + 1]
            last = min(seen, tokens - count + j + 1)
            keys, values = s.read_keys[i][:last], s.read_values[i][:last]
            want, weights = oracle.attention(row, keys, values, 0.2) if last else (np.zeros(row.shape), np.zeros(0))
            assert np.abs(out[at + j] - want).max() <= tolerance * max(1, np.abs(want).max())
            expected = oracle.log_sum_exp(row, keys, 0.2)[0]
            np.testing.assert_allclose(lse[at + j], expected, rtol=tolerance, atol=tolerance)
            mass[:last] += weights
        np.testing.assert_allclose(scores[token : token + seen], mass, rtol=4 * tolerance, atol=tolerance)
        at, token = at + count, token + seen


@pytest.mark.parametrize(("seen", "count"), [(0, 1), (0, 30), (1, 30), (17, 1), (64, 30), (70, 30), (99, 1)])
def test_parts_make_the_whole(rng, seen, count):
    cache = PagedKvCache(32, 16, 2, 32, dtype="f32")
    cache.allocate(0, 100)
    cache.write(0, 0, *rng.standard_normal((2, 100, 2, 32), np.float32))
    cache.allocate(1, 100 - seen)
    cache.write(0, 1, *(rows[seen:] for rows in cache.read(0, 0)))
    queries = 3 * rng.standard_normal((count, 4, 32), np.float32)
    want, want_lse = cache.attention(0, queries, [0], query_lens=[count], return_lse=True)
    head = cache.attention(0, queries, [0], query_lens=[count], context_lens=[seen], return_lse=True)
    tail = cache.attention(0, queries, [1], query_lens=[count], return_lse=True)
    for parts in ((head, tail), (tail, head)):
        out, lse = merge_attention(*parts[0], *parts[1])
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-5 * np.abs(want).max())
        np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-5)


def test_order_of_what_is_returned(rng):
    cache = PagedKvCache(4, 16, 1, 8, dtype="f32")
    cache.allocate(0, 20)
    cache.write(0, 0, *rng.standard_normal((2, 20, 1, 8), np.float32))
    queries = rng.standard_normal((2, 1, 8), np.float32)
    out, scores, lse = cache.attention(
        0, queries, [0, 0], context_lens=[5, 20], return_scores=True, return_lse=True
    )  # the same sequence twice
    assert out.shape == (2, 1, 8)
    assert scores.shape == (25,)
    assert lse.shape == (2, 1)
    np.testing.assert_allclose([scores[:5].sum(), scores[5:].sum()], 1, rtol=1e-5)
    assert np.array_equal(cache.attention(0, queries, [0, 0], context_lens=[5, 20]), out)


@pytest.mark.parametrize("context", [[21], [-1], [5, 5], [2.5]])
def test_contexts_that_are_none(context):
    cache = PagedKvCache(4, 16, 1, 8)
    cache.allocate(0, 20)
    with pytest.raises((ValueError, TypeError), match="context"):
        cache.attention(0, np.zeros((1, 1, 8), np.float32), [0], context_lens=context)


def test_merging_nothing():
    out, lse = np.zeros((1, 2, 8), np.float32), np.full((1, 2), -np.inf, np.float32)
    other, known = np.ones((1, 2, 8), np.float32), np.full((1, 2), -1e4, np.float32)
    for parts in ((out, lse, other, known), (other, known, out, lse)):
        merged, total = merge_attention(*parts)
        assert np.array_equal(merged, other)
        assert np.array_equal(total, known)
    merged, total = merge_attention(out, lse, out, lse)
    assert np.array_equal(merged, out)
    assert np.array_equal(total, lse)


def test_merging_what_does_not_fit():
    out, lse = np.zeros((1, 2, 8), np.float32), np.zeros((1, 2), np.float32)
    with pytest.raises(ValueError, match=r"lse_b: expected shape \(1, 2\), got \(2, 1\)"):
        merge_attention(out, lse, out, lse.T)
    with pytest.raises(ValueError, match="out_b: expected shape"):
        merge_attention(out, lse, out[:, :1], lse)


@pytest.mark.parametrize("shape", [(0, 4, 8), (1, 1, 1), (1, 9, 64), (3, 2, 7), (40, 3, 33)])
def test_shares_of_any_size(rng, shape):
    a, b = rng.standard_normal((2, *shape), np.float32)
    odds = rng.choice(np.array([-np.inf, -1e30, -90, -3, -0.1, 0, 0.2, 5, 100, 1e30], np.float32), shape[:2])
    with np.errstate(over="ignore"):
        share = (1 / (1 + np.exp(-odds.astype(np.float64)))).astype(np.float32)[..., None]
    zeros = np.zeros(shape[:2], np.float32)
    found, lse = merge_attention(a, odds, b, zeros)
    np.testing.assert_allclose(found, b + share * (a - b), rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, np.logaddexp(odds, zeros))
    empty = np.isneginf(odds)
    np.testing.assert_array_equal(found[empty], b[empty])
    for i in range(len(a)):  # rows are independent
        one = slice(i, i + 1)
        np.testing.assert_array_equal(merge_attention(a[one], odds[one], b[one], zeros[one])[0], found[one])


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 9, 64), (7, 2, 7)])
def test_any_number_of_parts_merge_in_their_order(rng, shape):
    """Rows have from no part to four, in any places; each merges as pairs do, bit for bit, and its own row is last."""
    n, heads, dim = shape
    counts = [row % 5 for row in range(1, n + 1)]
    starts, total = np.concatenate([[0], np.cumsum(counts)]), sum(counts)
    chosen = rng.permutation(total)
    parts, mixed = rng.standard_normal((total, heads, dim), np.float32), rng.standard_normal(shape, np.float32)
    logs, masses = (
        rng.choice(np.array([-np.inf, -1e30, -90, -3, -0.1, 0, 0.2, 5, 100], np.float32), each.shape[:2])
        for each in (parts, mixed)
    )
    want = [
        merged([(parts[i, None], logs[i, None]) for i in chosen[starts[row] : starts[row + 1]]],
               (mixed[row, None], masses[row, None])) if counts[row] else (mixed[row, None], masses[row, None])
        for row in range(n)
    ]
    two = merge_attention(parts[:1], logs[:1], mixed[:1], masses[:1])
    pair = merged([(parts[:1], logs[:1])], (mixed[:1], masses[:1]))
    assert [each.tobytes() for each in two] == [each.tobytes() for each in pair]
    merge_parts(starts, chosen, parts.copy(), logs.copy(), mixed, masses)
    assert mixed.tobytes() == np.concatenate([each for each, _ in want]).tobytes()
    assert masses.tobytes() == np.concatenate([each for _, each in want]).tobytes()


def test_parts_that_do_not_fit_are_refused(rng):
    starts, chosen = np.array([0, 1, 2]), np.array([1, 0])
    parts, logs = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    good = [starts, chosen, parts, logs, parts.copy(), logs.copy()]
    merge_parts(*good)
    kept = parts.copy()
    kept.flags.writeable = False
    for place, wrong, words in (
        (0, starts[:2], "shapes that agree"), (0, np.array([0, 2, 1]), "starts"), (0, np.array([1, 1, 2]), "starts"),
        (0, np.array([0, 1, 1]), "starts"), (0, starts.astype(np.int32), "contiguous"), (1, np.array([2, 0]), "chosen"),
        (1, np.array([-1, 0]), "chosen"), (2, parts.astype(np.float64), "contiguous"), (3, logs[:1], "shapes"),
        (4, parts[:, :2].copy(), "shapes"), (5, logs.T, "masses"), (5, None, "masses: .* NoneType"),
        (2, kept, "parts: .* writeable"), (4, kept, "mixed: .* writeable"),
    ):
        with pytest.raises(ValueError, match=words):
            merge_parts(*[wrong if i == place else each for i, each in enumerate(good)])
