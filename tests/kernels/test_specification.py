"""ckernels/BITS.md is enough to write the kernels again: what its text gives in NumPy has the same bits."""

import numpy as np
import pytest
from oracles import bits

from kvcache import PagedKvCache
from kvcache.kernels.matrix import Matrix

pytestmark = pytest.mark.one_build
BITS = {"q8": 8, "q6": 6, "q5": 5, "q4": 4, "q3": 3, "q2": 2}


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def cached(dtype, keys, values, rotate=False):
    cache = PagedKvCache(1 + len(keys) // 16, 16, 1, keys.shape[1], dtype=dtype, rotate=rotate)
    cache.allocate(0, len(keys))
    cache.write(0, 0, keys[:, None], values[:, None])
    return cache


def same(got, want):
    got, want = (np.asarray(each, np.float32).view(np.uint32) for each in (got, want))
    np.testing.assert_array_equal(got, want)


def test_rows(rng):
    for name, width in BITS.items():
        for dim, rotate in ((64, False), (40, False), (128, True)):
            rows = normal(rng, 10, dim) * 10.0 ** rng.integers(-2, 3, (10, 1)).astype(np.float32)
            got, _ = cached(name, rows, rows, rotate).read(0, 0)
            for row, found in zip(rows, got, strict=True):
                scale, minimum, codes = bits.quantised(bits.written(row) if rotate else row, width)
                want = minimum + scale * codes
                same(found.ravel(), bits.read(want) if rotate else want)


def test_attention(rng):
    for name, dim, num_tokens in (
        ("f32", 40, 130), ("f16", 64, 33), ("q8", 64, 1060), ("q6", 32, 17), ("q5", 64, 140), ("q4", 64, 140),
        ("q3", 32, 129), ("q2", 32, 1),
    ):
        keys, values, q = normal(rng, num_tokens, dim), normal(rng, num_tokens, dim), 3 * normal(rng, 1, 1, dim)
        cache = cached(name, keys, values)
        got = cache.attention(0, q, [0])
        if name in BITS:
            sides = [bits.Tiles(rows, BITS[name]) for rows in (keys, values)]
        else:
            sides = [bits.Floats(bits.half(rows) if name == "f16" else rows) for rows in (keys, values)]
        same(got.ravel(), bits.attended(q.ravel(), dim**-0.5, *sides, num_tokens))
        for window, chunked in ((50, False), (50, True), (1030, True)):
            got = cache.attention(0, q, [0], window=window, chunked=chunked)
            unseen = (num_tokens - 1) // window * window if chunked else max(0, num_tokens - window)
            same(got.ravel(), bits.attended(q.ravel(), dim**-0.5, *sides, num_tokens, unseen))
        firsts = np.array([0, num_tokens // 3, num_tokens // 3, num_tokens - 1])
        got = cache.attention(0, q.repeat(4, axis=0), [0], query_lens=[4], causal=False, firsts=firsts)
        for row, unseen in zip(got, firsts.tolist(), strict=True):
            same(row.ravel(), bits.attended(q.ravel(), dim**-0.5, *sides, num_tokens, unseen))


def test_products(rng):
    for format, zero in (("q8_0", 0), ("q4_0", 8), ("q4_1", 0)):
        matrix, x = Matrix(5, 300, format), normal(rng, 3, 300)
        matrix.put(0, normal(rng, 5, 300))
        for digits, activations in ((1, "int8"), (2, "exact")):
            got = matrix.multiply(x, activations=activations)
            for row in range(5):
                codes, scales, *minima = matrix.codes(row)[: 3 if format == "q4_1" else 2]
                parts = codes.ravel(), scales.ravel(), minima[0].ravel() if minima else None
                same(got[:, row], [bits.multiplied(each, *parts, digits=digits, zero=zero) for each in x])
