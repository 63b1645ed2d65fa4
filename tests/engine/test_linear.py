"""Products with the weights: every BLAS call compared with float64, and the memory order of the matrices."""

from itertools import pairwise

import numpy as np
import pytest

from kvcache.engine.linear import empty_matrices, linear

SHAPES = [(1, 1), (3, 5), (5, 3), (64, 64), (200, 33), (33, 200), (1, 70), (70, 1)]


@pytest.mark.parametrize("rows", [0, 1, 2, 6, 7, 64, 65, 130])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("biased", [False, True])
def test_product(rng, rows, shape, order, biased):
    weight = np.asarray(rng.standard_normal(shape, np.float32), order=order)
    x = rng.standard_normal((rows, shape[1]), np.float32)
    bias = rng.standard_normal(shape[0], np.float32) if biased else None
    before = x.copy()
    out = linear(x, weight, bias)
    want = x.astype(np.float64) @ weight.T.astype(np.float64) + (bias if biased else 0)
    assert out.dtype == np.float32
    assert out.flags.c_contiguous
    assert out.flags.writeable
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6 * shape[1] + 1e-6)
    np.testing.assert_array_equal(x, before)


def test_matrices_share_one_allocation_each_in_its_order():
    matrices = empty_matrices(SHAPES)
    assert [matrix.shape for matrix in matrices] == SHAPES
    for i, matrix in enumerate(matrices):
        matrix[...] = i
    for i, (matrix, (out, columns)) in enumerate(zip(matrices, SHAPES, strict=True)):
        assert matrix.dtype == np.float32
        assert matrix.ctypes.data % 64 == 0
        assert (matrix == i).all(), "two matrices share memory"
        assert matrix.T.flags.c_contiguous if out > columns else matrix.flags.c_contiguous
    for a, b in pairwise(matrices):
        assert 0 < b.ctypes.data - a.ctypes.data < a.nbytes + 64
    assert empty_matrices([]) == []
