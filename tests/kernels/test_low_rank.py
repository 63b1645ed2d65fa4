"""Products of low rank of several adapters in one call, beside `Matrix.multiply` of each alone."""

import re

import numpy as np
import pytest

from kvcache.kernels.kernels import get_num_threads, set_num_threads
from kvcache.kernels.low_rank import LowRankProduct, add_low_rank
from kvcache.kernels.matrix import Matrix

FORMATS = ("f32", "f16", "bf16")


def filled(rng, rows, columns, format="f32"):
    matrix = Matrix(rows, columns, format)
    matrix.put(0, rng.standard_normal((rows, columns)).astype(np.float32))
    return matrix


def product(rng, columns, ranks, outputs, format, gap=0):
    parts, column = [], gap
    for rank, rows in zip(ranks, outputs, strict=True):
        parts.append((filled(rng, rows, rank, format), float(rng.standard_normal()), column))
        column += rows + gap
    return LowRankProduct(filled(rng, sum(ranks), columns, format), parts)


def plain(x, out, spans):
    """Do what `add_low_rank` does, row by row, with the products of `Matrix.multiply`."""
    for first, stop, each in spans:
        for row in range(first, stop):
            low, at = each.a.multiply(x[row : row + 1]), 0
            for b, scale, column in each.parts:
                own = low[:, at : at + b.shape[1]] * np.float32(scale)
                out[row, column : column + len(b)] += b.multiply(own)[0]
                at += b.shape[1]


@pytest.mark.parametrize("format", FORMATS)
def test_rows_have_the_bits_of_each_alone(rng, format):
    """Ranks fill no panel, more rows come than meet a matrix together, and one thread runs them, or several."""
    columns, outputs = 300, (40, 17, 33)
    products = [product(rng, columns, ranks, outputs, format, gap=3) for ranks in ((16, 16, 16), (1, 5, 33), (4, 4, 8))]
    threads = get_num_threads()
    for lens in ((1, 0, 1, 1), (130, 2, 1, 49), (0, 3, 0, 12)):
        spans, at = [], 0
        for length, each in zip(lens, (products[0], None, *products[1:]), strict=True):
            if length and each is not None:
                spans.append((at, at + length, each))
            at += length
        x = rng.standard_normal((at, columns)).astype(np.float32)
        before = rng.standard_normal((at, 120)).astype(np.float32)
        want = before.copy()
        plain(x, want, spans)
        for count in (1, 2, 5):
            set_num_threads(count)
            try:
                out = before.copy()
                add_low_rank(x, out, spans)
            finally:
                set_num_threads(threads)
            np.testing.assert_array_equal(out, want)


def test_what_is_refused(rng):
    one, x, out = product(rng, 20, (2,), (10,), "f32"), np.ones((4, 20), np.float32), np.zeros((4, 12), np.float32)
    packed = filled(rng, 32, 32, "q8_0")
    for make, message in (
        (lambda: LowRankProduct(packed, [(one.parts[0][0], 1, 0)]), "a: expected matrices of floats, got q8_0"),
        (lambda: LowRankProduct(one.a, [(packed, 1, 0)]), "parts: expected matrices of floats, got q8_0"),
        (lambda: LowRankProduct(one.a, []), "parts: expected 1 to 8, got 0"),
        (lambda: LowRankProduct(one.a, [(one.parts[0][0], 1, 0)] * 2), "parts: expected ascending columns, got 0"),
        (lambda: LowRankProduct(filled(rng, 3, 20), one.parts), "a: expected 2 rows, the ranks of all parts, got 3"),
        (lambda: add_low_rank(x[:, :19], out, []), "x: expected C-contiguous float32 of two axes"),
        (lambda: add_low_rank(x, out[:3], []), "out: expected C-contiguous, writeable float32 of 4 rows"),
        (lambda: add_low_rank(x, x, []), "out: expected memory apart from x"),
        (lambda: add_low_rank(x, out, [(0, 5, one)]), "spans: expected ascending ones of 4 rows, got 0 to 5 behind 0"),
        (lambda: add_low_rank(x, out, [(0, 2, one), (1, 3, one)]), "spans: expected ascending ones of 4 rows, got 1"),
        (lambda: add_low_rank(x, out[:, :9].copy(), [(0, 1, one)]), "spans: expected products of 20 columns that give"),
        (lambda: add_low_rank(x[:, :10].copy(), out, [(0, 1, one)]), "spans: expected products of 10 columns"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()
    for make in (
        lambda: add_low_rank(x, out, [(0, 1, None)]), lambda: add_low_rank(x, out, [(0, 1, one.a)]),
        lambda: LowRankProduct(np.ones((2, 20), np.float32), one.parts),
    ):
        with pytest.raises(TypeError, match=r"expected a (LowRankProduct|Matrix)"):
            make()
    assert not out.any()
