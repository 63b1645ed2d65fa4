"""Rows of every float type and any strides are stored, and queries attend, as their float32 copies would."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from blocks import copy_guarded
from tensors import Bfloat16, floats_of, words_of

from kvcache import PagedKvCache
from kvcache.core.kvrows import KvRows
from kvcache.core.runs import RUN
from kvcache.core.store import BlockStore
from kvcache.kernels import kernelcalls, kernels
from kvcache.kernels.kernels import FORMATS

HEADS, DIM, VALUE_DIM, SIZE = 3, 24, 40, 40
TYPES = ("f32", "f16", "bf16", "f64")
LAYOUTS = {
    "C": lambda x: x,
    "head-major": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "tokens backwards": lambda x: x[::-1].copy()[::-1],
    "every second token": lambda x: np.repeat(x, 2, 0)[::2],
    "a slice of heads": lambda x: np.concatenate([x, x], 1)[:, : x.shape[1]],
    "channels apart": lambda x: np.repeat(x, 2, 2)[:, :, ::2],
    "Fortran": np.asfortranarray,
}


def stored(type_, floats):
    """Rows of this type, and the floats that they are."""
    if type_ == "bf16":
        words = words_of(floats)
        return words, floats_of(words)
    rows = floats.astype({"f32": np.float32, "f16": np.float16, "f64": np.float64}[type_])
    return rows, rows.astype(np.float32)


def bytes_after(rows, runs, dtypes):
    store = BlockStore(1, 6, SIZE, HEADS, DIM, *dtypes, value_head_dim=VALUE_DIM)
    store.write(0, runs, *rows)
    return store.raw(0).copy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("type_", TYPES)
def test_rows_of_any_kind_store_the_bytes_of_their_floats(rng, type_, layout):
    runs = np.array([(4, 3, 5), (1, 0, SIZE), (0, 15, 18), (5, 39, 40), (2, 7, 33)], RUN)
    n = int((runs["stop"].astype(int) - runs["first"]).sum())
    (keys, key_floats), (values, value_floats) = (
        stored(type_, rng.standard_normal((n, HEADS, dim)).astype(np.float32)) for dim in (DIM, VALUE_DIM)
    )
    rows = LAYOUTS[layout](keys), LAYOUTS[layout](values)
    mixed = LAYOUTS[layout](keys), value_floats
    for dtypes in zip(FORMATS, reversed(FORMATS), strict=True):
        want = bytes_after((key_floats, value_floats), runs, dtypes)
        np.testing.assert_array_equal(bytes_after(rows, runs, dtypes), want)
        np.testing.assert_array_equal(bytes_after(mixed, runs, dtypes), want)


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8", "q3"])
def test_threads_write_the_same_bytes(rng, dtype, threads):
    """Runs of one block stay together: some here share a tile, others are empty; few rows and many."""
    layout = kernels.Layout(SIZE, HEADS, DIM, dtype, dtype, value_head_dim=VALUE_DIM)
    some = [(4, 3, 5), (4, 5, 6), (4, 30, 31), (1, 0, SIZE), (0, 15, 18), (0, 18, 18), (5, 39, 40), (2, 7, 33)]
    many = [(block, first, first + 10) for block in rng.permutation(90).tolist() for first in (0, 10, 25)]
    for runs in (some, many, [(7, 0, SIZE)], [(7, 0, 0)]):
        n = sum(stop - first for _, first, stop in runs)
        keys, values = (rng.standard_normal((n, HEADS, dim)).astype(np.float32) for dim in (DIM, VALUE_DIM))
        one, several = (np.zeros(90 * layout.block_bytes, np.uint8) for _ in range(2))
        kernelcalls.write(layout, one, runs, keys, values)
        kernelcalls.write(layout, several, runs, keys, values, threads=threads)
        np.testing.assert_array_equal(several, one)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("type_", TYPES)
def test_nothing_beside_the_rows_is_read(rng, type_, at_end):
    for n, heads, dim in ((1, 1, 8), (17, 2, 8), (5, 3, 24)):
        rows, floats = stored(type_, rng.standard_normal((heads, n, dim)).astype(np.float32))
        rows = copy_guarded(rows, at_end=at_end).swapaxes(0, 1)  # head-major
        store = BlockStore(1, 1, 32, heads, dim)
        runs = np.array([(0, 0, n)], RUN)
        store.write(0, runs, rows, rows)
        np.testing.assert_array_equal(store.read(0, runs)[0], floats.swapaxes(0, 1))


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("side", [0, 1])
def test_a_value_that_cannot_be_stored_is_named(rng, type_, side):
    store = BlockStore(1, 2, SIZE, HEADS, DIM, "f16", "f16")
    runs = np.array([(0, 0, SIZE)], RUN)
    pair = [stored(type_, rng.standard_normal((SIZE, HEADS, DIM)).astype(np.float32))[0] for _ in range(2)]
    pair[side][29, 1, 5] = 0x7F80 if type_ == "bf16" else np.inf
    pair[side] = LAYOUTS["head-major"](pair[side])
    pair[side][37, 0, 0] = pair[side][29, 1, 5]
    name = ("keys", "values")[side]
    with pytest.raises(ValueError, match=f"^{name}: expected values that f16 can hold.*, got inf in row 29$"):
        store.write(0, runs, *pair)
    assert not store.raw(0).any()


def test_doubles_beyond_float32_are_refused():
    cache = PagedKvCache(2, 16, 1, 8, dtype="f32")
    cache.allocate(1, 1)
    rows = np.full((1, 1, 8), 1e300)
    with pytest.raises(ValueError, match=r"^keys: expected values that f32 can hold.* got inf in row 0$"):
        cache.write(0, 1, rows, rows)


def test_the_whole_is_not_copied(rng):
    """A prompt of 8 MiB in each type: what a write takes is a few tokens."""
    cache = PagedKvCache(128, 16, 8, 64, dtype="q8")
    cache.allocate(1, 2048)
    words = words_of(rng.standard_normal((8, 2048, 64))).swapaxes(0, 1)
    head_major = floats_of(np.ascontiguousarray(words.swapaxes(0, 1))).swapaxes(0, 1)
    for rows in (Bfloat16(words), head_major, head_major.astype(np.float16), head_major.astype(np.float64)):
        tracemalloc.start()
        cache.write(0, 1, rows, rows)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000


# -- queries ------------------------------------------------------------------------------------------------


def attended(cache, queries, sink_queries, **options):
    options |= {"query_lens": [20, 1], "return_scores": True, "return_lse": True}
    return cache.attention(0, queries, [1, 2], sink_queries=sink_queries, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("type_", TYPES)
def test_queries_of_any_kind_have_the_bits_of_their_floats(rng, type_, layout):
    caches = []
    for dtype, dim in (("f32", 24), ("f16", 64), ("q8", 32), ("q3", 24)):
        caches.append((PagedKvCache(20, 16, HEADS, dim, dtype=dtype, value_head_dim=40), dim))
        caches[-1][0].allocate_batch([1, 2], [70, 45])
        rows = (rng.standard_normal((115, HEADS, d)).astype(np.float32) for d in (dim, 40))
        caches[-1][0].write_ragged(0, [1, 2], [70, 45], *rows)
        caches[-1][0].apply_streaming_llm(1, 5, 40)
    for cache, dim in caches:
        given, floats = zip(*(stored(type_, rng.standard_normal((21, 6, dim))) for _ in range(2)), strict=True)
        given = [LAYOUTS[layout](x) for x in given]
        if type_ == "bf16":
            given = [Bfloat16(x) for x in given]
        want = attended(cache, *floats)
        out = np.full_like(want[0], np.nan)
        for got in (attended(cache, *given, out=out), attended(cache, floats[0], given[1])):
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("type_", TYPES)
def test_nothing_beside_the_queries_is_read(rng, type_, at_end):
    for dim in (8, 24, 64):
        cache = PagedKvCache(2, 16, 2, dim, dtype="q8")
        cache.allocate(1, 20)
        cache.write(0, 1, *rng.standard_normal((2, 20, 2, dim)).astype(np.float32))
        rows, floats = stored(type_, rng.standard_normal((4, 17, dim)).astype(np.float32))
        rows = copy_guarded(rows, at_end=at_end).swapaxes(0, 1)  # head-major
        got = cache.attention(0, Bfloat16(rows) if type_ == "bf16" else rows, [1], query_lens=[17])
        np.testing.assert_array_equal(got, cache.attention(0, floats.swapaxes(0, 1), [1], query_lens=[17]))


def test_queries_are_not_copied(rng):
    """8 MiB in each type: what a call takes beside its result does not grow with them."""
    cache = PagedKvCache(1, 16, 8, 64, dtype="q8")
    cache.allocate(1, 1)
    words = words_of(rng.standard_normal((8, 2048, 64))).swapaxes(0, 1)
    head_major = floats_of(np.ascontiguousarray(words.swapaxes(0, 1))).swapaxes(0, 1)
    out = np.empty((2048, 8, 64), np.float32)
    for rows in (Bfloat16(words), head_major, head_major.astype(np.float16), head_major.astype(np.float64)):
        tracemalloc.start()
        cache.attention(0, rows, [1], query_lens=[2048], causal=False, sink_queries=rows, out=out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000


def test_an_output_within_the_memory_of_queries_is_refused(rng):
    cache = PagedKvCache(1, 16, 2, 16, dtype="f32")
    cache.allocate(1, 3)
    both = np.zeros((6, 3, 16), np.float32)  # heads, queries, channels
    for queries in (both[2:4].swapaxes(0, 1), both[2:4].swapaxes(0, 1)[::-1], both[3:1:-1].swapaxes(0, 1)):
        for first, free in ((0, True), (1, False), (2, False), (3, False), (4, True)):
            out = both[first : first + 2].reshape(3, 2, 16)
            if free:
                assert cache.attention(0, queries, [1], query_lens=[3], out=out) is out
                continue
            with pytest.raises(ValueError, match=r"^out: expected memory apart from queries, got the same memory$"):
                cache.attention(0, queries, [1], query_lens=[3], out=out)


def test_mistakes():
    floats = np.zeros((2, 1, 8), np.float32)
    for other in (floats[:1], floats.repeat(2, 1), floats[0]):
        with pytest.raises(ValueError, match=r"^values: expected as many rows and heads as keys of shape \(2, 1, 8\)"):
            KvRows(floats, other)
    with pytest.raises(TypeError, match=r"^rows: expected float32, float16, float64 or words of bfloat16, got int64$"):
        KvRows(floats.astype(np.int64), floats.astype(np.int64))
