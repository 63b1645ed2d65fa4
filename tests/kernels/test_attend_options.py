"""Attention with a window, a soft cap and sinks against NumPy in float64, at every SIMD level and in every format."""

import numpy as np
import pytest
from blocks import Scattered
from oracles import kernels as oracle
from pace import FAST, half

from kvcache.kernels import kernelcalls

TOLERANCE = {"f32": 5e-6, "f16": 5e-6, "q8": 0.01, "q6": 0.01, "q5": 0.01, "q4": 0.01, "q3": 0.01, "q2": 0.01}
FORMATS = [*((name, name) for name in TOLERANCE), ("q4", "f16"), ("f32", "q8"), ("q8", "q3")]
WINDOWS = [1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 5000]


def compare(rng, s, num_queries, group=2, *, threads=1, spread=1.0, scale=None, starts=None, window=0, softcap=0.0,
            sinks=None, hidden=0, whole=False, parents=None, both=False, chunked=False, firsts=None):
    """One call over all sequences of s against the oracle: output, scores and lse."""
    heads, dim = s.layout.num_heads, s.layout.head_dim
    scale = dim**-0.5 if scale is None else scale
    queries = (spread * rng.standard_normal((sum(num_queries), heads * group, dim))).astype(np.float32)
    tokens = [len(k) for k in s.keys]
    shown = [n - min(hidden, n) for n in tokens]
    out, lse = np.full_like(queries, np.nan), np.full(queries.shape[:2], np.nan, np.float32)
    scores = np.full(sum(shown) if rng.random() < 0.5 else (heads, sum(shown)), np.nan, np.float32)
    tree = None if parents is None else tree_of(parents)
    kernelcalls.attend(
        s.layout, s.arena, [(runs, n, 0) for runs, n in zip(s.runs, num_queries, strict=True)], queries, scale, out=out,
        scores=scores, lse=lse, hidden_tokens=hidden, starts=starts, window=window, softcap=softcap, sinks=sinks,
        whole=whole, ahead=window - 1 if both else 0, tree=tree, threads=threads, chunked=chunked,
        firsts=firsts,
    )
    tolerance = max(TOLERANCE[name] for name in s.formats) + 2e-6 * (spread - 1)  # scores of this size are rounded
    at = token = 0
    for i, n in enumerate(num_queries):
        expected, mass, logs = oracle.attend(
            queries[at : at + n], s.read_keys[i], s.read_values[i], scale, shown=shown[i], window=window or None,
            softcap=softcap or None, sinks=sinks if np.ndim(sinks) < 2 else sinks[at : at + n],
            causal=not (whole or both), parents=parents and parents[i], chunked=chunked,
            start=0 if starts is None else starts[i], firsts=None if firsts is None else firsts[at : at + n],
        )
        largest = np.abs(s.read_values[i]).max(initial=1e-3) if tolerance > 1e-3 else 1e-3
        limit = tolerance * np.maximum(np.abs(expected).max(-1, keepdims=True), largest)
        assert (np.abs(out[at : at + n] - expected) <= limit).all()
        mass = mass.reshape(heads, group, -1).sum(1) if scores.ndim == 2 else mass.sum(0)
        np.testing.assert_allclose(
            scores[..., token : token + shown[i]], mass, rtol=8 * tolerance, atol=4 * tolerance * mass.max(initial=1e-3)
        )
        np.testing.assert_allclose(lse[at : at + n], logs, rtol=1e-5, atol=2 * tolerance * max(1, spread))
        at, token = at + n, token + shown[i]
    return out, lse


def tree_of(parents):
    """Parents of all sequences, and depths."""
    depths = []
    for line in parents:
        own = []
        for parent in line:
            own.append(own[parent] + 1 if parent >= 0 else 0)
        depths += own
    return np.array([np.concatenate(parents), depths], np.int64)


def grown(rng, n):
    """Parents of n queries, some of them lines, some of them bushes."""
    near = rng.random()
    return [i - 1 if rng.random() < near else int(rng.integers(-1, max(i, 1))) if i else -1 for i in range(n)]


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("block_size", half([5, 64, 16, 33]))
def test_windows(rng, formats, block_size):
    s = Scattered(rng, [700, 1, 130, 64], block_size=block_size, key_format=formats[0], value_format=formats[1])
    for window in rng.choice(WINDOWS, 2, replace=False).tolist():
        for num_queries in ([1, 1, 1, 1], [1, 0, 130, 9]):
            starts = rng.integers(0, 3000, 4).tolist()
            threads = int(rng.integers(1, 4))
            for more in ({}, {"both": True}, {"chunked": True}):
                compare(rng, s, num_queries, window=window, starts=starts, threads=threads, **more)


@pytest.mark.parametrize("formats", [("f32", "f32"), ("q4", "q4"), ("q8", "f16")], ids="-".join)
@pytest.mark.parametrize("dim", [8, 24, 64, 128, 256, 320, 512])
def test_all_options_at_once(rng, formats, dim):
    s = Scattered(rng, [300, 40], dim=dim, key_format=formats[0], value_format=formats[1])
    for group in (1, 3):
        sinks = rng.standard_normal(2 * group).astype(np.float32)
        for num_queries, window in (([1, 1], 100), ([60, 40], 33)):
            compare(rng, s, num_queries, group, window=window, softcap=2.0, sinks=sinks, starts=[1000, 5], threads=2)


@pytest.mark.parametrize("name", ["f32", "f16", "q8", "q4"])
@pytest.mark.parametrize("holes", [False, True])
def test_each_query_has_first_tokens_of_its_own(rng, name, holes):
    """Causal, with a window, or all of what is shown; up to no token."""
    s = Scattered(rng, [700, 40, 1100], block_size=16, key_format=name, value_format=name, holes=holes)
    for num_queries in ([1, 1, 1], [70, 9, 0], [3, 40, 130]):
        firsts = np.concatenate([
            np.sort(rng.integers(0, len(keys) + 40, n)) for keys, n in zip(s.keys, num_queries, strict=True)
        ])
        for more in ({}, {"window": 60}, {"whole": True}, {"whole": True, "starts": [0, 33, 1500], "hidden": 5}):
            compare(rng, s, num_queries, firsts=firsts, threads=int(rng.integers(1, 4)), **more)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", ["f32", "q8"])
def test_windows_count_stored_tokens(rng, holes, name):
    s = Scattered(rng, [1500, 400], block_size=16, key_format=name, holes=holes)
    for window in (5, 130, 1025):
        compare(rng, s, [1, 30], window=window, threads=2)
        compare(rng, s, [40, 1], window=window, threads=3, starts=[900, 77])


@pytest.mark.parametrize("name", ["f32", "q4"])
def test_hidden_tokens_and_windows(rng, name):
    """Queries whose windows end before, within and behind the tokens that are shown."""
    s = Scattered(rng, [200, 30], key_format=name)
    for hidden in (1, 20, 25, 100):
        for window in (1, 10, 30, 150):
            sinks = rng.standard_normal(4).astype(np.float32)
            out, lse = compare(rng, s, [25, 1], window=window, hidden=hidden, sinks=sinks)
            assert not np.isinf(lse).any()
            out, lse = compare(rng, s, [25, 1], window=window, hidden=hidden)
            assert np.isinf(lse[-1]).all() == (hidden >= min(window, 30))


@pytest.mark.parametrize("cap", [1e-30, 0.01, 1.0, 50.0, 1e15])
@pytest.mark.parametrize("num_queries", [1, 20])
def test_soft_caps(rng, cap, num_queries):
    s = Scattered(rng, [150], dim=64)
    compare(rng, s, [num_queries], softcap=cap, spread=5.0)


def test_the_soft_cap_keeps_relative_precision(rng):
    """The lse of a single token is its score; kvc_simd.h states 3e-7 for the tangent, products add 3e-7."""
    n = 4000
    x = np.concatenate([10.0 ** rng.uniform(-20, 3, n), rng.uniform(0.6, 0.65, n), rng.uniform(0, 12, n), [0.625, 0]])
    x = (x * rng.choice([-1.0, 1.0], len(x))).astype(np.float32)
    s = Scattered(rng, [1], heads=1, dim=8)
    keys = np.zeros((1, 1, 8), np.float32)
    keys[..., 0] = 1.0
    kernelcalls.write(s.layout, s.arena, s.runs[0], keys, keys)
    queries = np.zeros((len(x), 1, 8), np.float32)
    queries[:, 0, 0] = x
    for cap in (1.0, 30.0):
        lse = np.full((len(x), 1), np.nan, np.float32)
        kernelcalls.attend(s.layout, s.arena, [(s.runs[0], 1, 0)] * len(x), queries, 1.0, lse=lse, softcap=cap)
        want = cap * np.tanh(x.astype(np.float64) / cap)
        error = np.abs(lse[:, 0] - want)
        assert (error <= 6e-7 * np.abs(want) + 1e-38).all(), (error / np.maximum(np.abs(want), 1e-30)).max()


@pytest.mark.parametrize("sink", [-3e38, -200.0, 0.0, 7.0, 200.0, 3e38])
def test_sinks_of_any_size(rng, sink):
    s = Scattered(rng, [100, 1, 0], heads=1)
    sinks = np.array([sink, 1.0], np.float32)
    out, lse = compare(rng, s, [5, 1, 2], sinks=sinks)
    np.testing.assert_array_equal(lse[-2:], [sinks, sinks])  # of queries that see no token
    assert not out[-2:].any()


@pytest.mark.parametrize("formats", [("f32", "f32"), ("q4", "q4"), ("q8", "q3")], ids="-".join)
def test_each_query_has_sinks_of_its_own(rng, formats):
    s = Scattered(rng, [100, 3000, 7, 2], key_format=formats[0], value_format=formats[1])
    sinks = (3 * rng.standard_normal((22, 6))).astype(np.float32)
    compare(rng, s, [7, 9, 4, 2], 3, sinks=sinks, window=2000, threads=2)
    compare(rng, s, [7, 9, 4, 2], 3, sinks=sinks, softcap=3.0, hidden=5)


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("block_size", half([5, 33, 16]))
def test_tokens_before_the_windows_are_not_read(rng, formats, block_size):
    """Bytes of ones, which are NaN, in every block that no query sees a token of."""
    tokens, window = 40 * block_size, 2 * block_size
    s = Scattered(rng, [tokens], block_size=block_size, key_format=formats[0], value_format=formats[1])
    blocks = np.array([block for block, _, _ in s.runs[0]])
    for num_queries in (1, block_size):
        queries = rng.standard_normal((num_queries, 4, 32)).astype(np.float32)

        def call(arena, num_queries=num_queries, queries=queries):
            scores = np.empty(tokens, np.float32)
            seqs = [(s.runs[0], num_queries, 0)]
            return kernelcalls.attend(s.layout, arena, seqs, queries, 0.1, scores=scores, window=window, threads=2)

        unseen = blocks[: (tokens - num_queries - window + 1) // block_size]
        poisoned = s.arena.copy().reshape(-1, s.layout.block_bytes)
        poisoned[unseen] = 0xFF
        for got, want in zip(call(poisoned.reshape(-1)), call(s.arena), strict=True):
            np.testing.assert_array_equal(got, want)
            assert not np.isnan(want).any()


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("block_size", half([5, 33, 16]))
def test_queries_that_see_everything(rng, formats, block_size):
    s = Scattered(rng, [150, 1, 0, 20], block_size=block_size, key_format=formats[0], value_format=formats[1])
    for num_queries in ([1, 3, 2, 0], [40, 1, 1, 70]):  # also more than there are tokens
        compare(rng, s, num_queries, whole=True, threads=2)
        compare(rng, s, num_queries, whole=True, hidden=8, softcap=3.0, sinks=np.ones(4, np.float32))


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("block_size", half([5, 64, 16]))
def test_trees(rng, formats, block_size):
    s = Scattered(rng, [1050, 7, 300], block_size=block_size, key_format=formats[0], value_format=formats[1])
    for counts in ([1, 7, 5], [40, 3, 0], [9, 0, 50 if FAST else 200]):
        for window in rng.choice((0, 1, 3, 20, 130), 1, replace=False).tolist():
            parents = [grown(rng, n) for n in counts]
            starts, chunked = rng.integers(0, 99, 3).tolist(), bool(window and rng.integers(2))
            own = {"window": window, "starts": starts, "chunked": chunked}
            compare(rng, s, counts, parents=parents, threads=int(rng.integers(1, 4)), **own)
    parents = [grown(rng, n) for n in (30, 5, 9)]
    compare(rng, s, [30, 5, 9], 1, parents=parents, hidden=4, softcap=2.0, sinks=np.zeros(2, np.float32))


@pytest.mark.parametrize("name", ["f32", "q4"])
def test_a_line_has_the_bits_of_a_causal_call(rng, name):
    s = Scattered(rng, [1100], key_format=name)
    for count, window in ((1, 0), (20, 0), (100, 33), (130, 1)):
        queries = rng.standard_normal((count, 4, 32)).astype(np.float32)
        calls = []
        for tree in (None, tree_of([list(range(-1, count - 1))])):
            lse = np.empty((count, 4), np.float32)
            seqs = [(s.runs[0], count, 0)]
            out = kernelcalls.attend(s.layout, s.arena, seqs, queries, 0.2, lse=lse, window=window, tree=tree)
            calls.append((out, lse))
        for got, want in zip(*calls, strict=True):
            np.testing.assert_array_equal(got, want)
