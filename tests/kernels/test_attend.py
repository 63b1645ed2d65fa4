"""Attention over scattered blocks against NumPy in float64, at every SIMD level."""

import numpy as np
import pytest
from blocks import Scattered, attend, guarded_attention
from oracles import kernels as oracle

from kvcache.kernels import kernelcalls, kernels

TOLERANCE = 5e-6  # relative to the largest output of the row, as stated in kvc_attend.c


def assert_close(got, tolerance=TOLERANCE):
    out, scores, expected, mass = got
    largest = np.abs(expected).max(-1, keepdims=True)
    assert (np.abs(out - expected) <= tolerance * largest).all(), np.nanmax(np.abs(out - expected) / largest)
    np.testing.assert_allclose(scores, mass, rtol=4 * tolerance, atol=tolerance * mass.max(initial=0))


@pytest.mark.parametrize("block_size", [1, 5, 15, 16, 17, 33, 256])
@pytest.mark.parametrize("name", ["f32", "f16"])
def test_decode_over_blocks_of_any_size(rng, block_size, name):
    s = Scattered(rng, [1, 2, 15, 16, 17, 63, 64, 65, 130], block_size=block_size, key_format=name)
    assert_close(attend(s, [1] * 9, rng=rng))


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 56, 64, 72, 80, 96, 104, 128, 160, 192, 248, 256, 264, 384, 512])
@pytest.mark.parametrize("formats", [("f32", "f16"), ("f16", "f32")])
def test_any_head_dim(rng, dim, formats):
    s = Scattered(rng, [37, 100], dim=dim, key_format=formats[0], value_format=formats[1])
    assert_close(attend(s, [1, 13], rng=rng))


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("name", ["f32", "f16"])
def test_any_group_of_query_heads(rng, group, name):
    s = Scattered(rng, [70, 33], dim=64, key_format=name)
    assert_close(attend(s, [1, 2], group, rng=rng))
    assert_close(attend(s, [19, 1], group, rng=rng))


def test_one_kv_head_for_very_many_query_heads(rng):
    s = Scattered(rng, [300], heads=1, dim=64)
    assert_close(attend(s, [2], 71, rng=rng))
    assert_close(attend(s, [1], 130, rng=rng, threads=2))


@pytest.mark.parametrize("num_queries", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 100])
def test_prefill_is_causal(rng, num_queries):
    s = Scattered(rng, [100, num_queries], heads=1, dim=16)
    assert_close(attend(s, [num_queries, num_queries], 3, rng=rng))


def test_mixed_batch_of_decode_prefill_and_nothing(rng):
    s = Scattered(rng, [90, 1, 200, 0, 64, 50], heads=3, dim=40)
    assert_close(attend(s, [1, 1, 150, 0, 64, 0], rng=rng, threads=2))


@pytest.mark.parametrize("block_size", [5, 16, 33])
@pytest.mark.parametrize("name", ["f32", "f16"])
def test_holes(rng, block_size, name):
    s = Scattered(rng, [150, 90], block_size=block_size, key_format=name, holes=True)
    assert_close(attend(s, [1, 40], rng=rng))


@pytest.mark.parametrize("sinks", [0, 1, 4, 16, 17, 64, 99, 100, 500])
def test_sink_tokens_use_the_sink_queries(rng, sinks):
    s = Scattered(rng, [100, 100], heads=1)
    assert_close(attend(s, [1, 20], rng=rng, sinks=[sinks, sinks]))


@pytest.mark.parametrize("tokens", [1000, 8192])
@pytest.mark.parametrize("name", ["f32", "f16"])
def test_long_contexts(rng, tokens, name):
    s = Scattered(rng, [tokens], heads=1, dim=64, key_format=name)
    assert_close(attend(s, [1], 4, rng=rng))
    assert_close(attend(s, [9], 1, rng=rng))


def test_a_constant_value_is_its_own_average(rng):
    s = Scattered(rng, [5000], heads=1, dim=16)
    kernelcalls.write(s.layout, s.arena, s.runs[0], None, np.full_like(s.values[0], 3.0))
    queries = rng.standard_normal((1, 1, 16)).astype(np.float32)
    out = kernelcalls.attend(s.layout, s.arena, [(s.runs[0], 1, 0)], queries, 0.0)
    np.testing.assert_allclose(out, 3.0, rtol=2e-6)


@pytest.mark.parametrize("num_queries", [1, 30])
@pytest.mark.parametrize("top", [100.0, 1e4])
def test_the_error_of_extreme_scores_is_their_rounding(rng, num_queries, top):
    s = Scattered(rng, [300], heads=1, dim=64)
    out, scores, expected, _ = attend(s, [num_queries], rng=rng, scale=1.0, spread=top / 30)
    assert np.isfinite(out).all()
    assert np.isfinite(scores).all()
    # |score| is at most about `top`; each product q * k and the scaled query have a relative error of 2^-24.
    largest = np.abs(s.read_values[0]).max()
    assert np.abs(out - expected).max() <= largest * (TOLERANCE + 8 * top * 2.0**-24)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_equal_extreme_scores_share_the_weight(sign):
    layout = kernels.Layout(16, 1, 8)
    arena = np.zeros(8 * layout.block_bytes, np.uint8)
    runs = [(i, 0, 16) for i in range(7)]
    keys = np.full((112, 1, 8), 100.0, np.float32)
    values = np.arange(112, dtype=np.float32)[:, None, None] * np.ones((1, 1, 8), np.float32)
    kernelcalls.write(layout, arena, runs, keys, values)
    queries = np.full((1, 1, 8), sign * 12.5, np.float32)
    out = kernelcalls.attend(layout, arena, [(runs, 1, 0)], queries, 1.0)  # every score is +-10,000
    np.testing.assert_allclose(out, 55.5, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in kernels.FORMATS if kernels.FORMATS[name].quantised])
def test_the_largest_sums_of_integers_fit(name):
    # Codes, query and weights are the largest there are, in heads of the largest size and in a whole chunk.
    n, dim = 128, 512
    layout = kernels.Layout(16, 1, dim, name, name)
    arena = np.zeros(n // 16 * layout.block_bytes, np.uint8)
    runs = [(i, 0, 16) for i in range(n // 16)]
    rows = np.ones((n, 1, dim), np.float32)
    rows[:, :, 0] = 0.0
    for lengths in (np.ones(n), np.linspace(0.5, 1.5, n)):
        keys = rows * lengths.astype(np.float32)[:, None, None]
        read_keys, read_values = np.empty_like(keys), np.empty_like(keys)
        kernelcalls.write(layout, arena, runs, keys, rows)
        kernelcalls.read(layout, arena, runs, read_keys, read_values)
        for sign in (-0.01, 0.01):
            out = kernelcalls.attend(layout, arena, [(runs, 1, 0)], np.full((1, 1, dim), sign, np.float32), 1.0)
            scores = sign * read_keys[:, 0].sum(-1, dtype=np.float64)
            weights = np.exp(scores - scores.max())
            expected = weights @ read_values[:, 0].astype(np.float64) / weights.sum()
            np.testing.assert_allclose(out[0, 0], expected, atol=0.01)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing_but_rounding_and_each_count_repeats(rng, threads):
    s = Scattered(rng, [2500, 300, 700], heads=2, dim=64)
    seed = rng.integers(1000)
    first = attend(s, [1, 1, 60], rng=np.random.default_rng(seed), threads=threads)
    again = attend(s, [1, 1, 60], rng=np.random.default_rng(seed), threads=threads)
    assert_close(first)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("name", ["f32", "f16"])
@pytest.mark.parametrize("dim", [8, 24, 64, 72])
def test_nothing_outside_the_arrays_is_touched(rng, at_end, name, dim):
    for s, queries, out, scores in guarded_attention(rng, name, dim, at_end, (1, 2)):
        expected, mass = oracle.attention(queries, s.read_keys[0], s.read_values[0], 0.1)
        assert_close((out, scores, expected, mass))


def test_no_sequences_are_no_work():
    layout = kernels.Layout(16, 1, 8)
    arena = np.zeros(layout.block_bytes, np.uint8)
    assert kernelcalls.attend(layout, arena, [], np.empty((0, 2, 8), np.float32), 1.0).shape == (0, 2, 8)


def test_queries_before_the_first_token_give_zeros(rng):
    s = Scattered(rng, [3, 0], heads=1)
    assert_close(attend(s, [5, 2], rng=rng))
