"""Several matrices above each other work like one, and all matrices of a network share one allocation."""

import numpy as np
import pytest

from kvcache.kernels.matrix import ACTIVATIONS, Matrix
from kvcache.networks.linear import MatrixStack, empty_matrices, stacked

SHAPES = [(16, 64, "q4_1"), (5, 64, "q8_0"), (33, 64, "bf16")]


@pytest.fixture
def parts(rng):
    matrices = empty_matrices(SHAPES)
    for matrix in matrices:
        matrix.put(0, rng.standard_normal(matrix.shape).astype(np.float32))
    return matrices


def test_a_stack_is_its_parts(rng, parts):
    stack = MatrixStack(parts)
    whole = np.concatenate([part.to_float32() for part in parts])
    assert (stack.shape, len(stack), stack.format) == ((54, 64), 54, "q4_1+q8_0+bf16")
    assert stack.nbytes == sum(part.nbytes for part in parts)
    np.testing.assert_array_equal(stack.to_float32(), whole)
    rows = np.array([53, 0, 16, 15, 21, 20, 0])
    np.testing.assert_array_equal(stack[rows], whole[rows])
    for wrong in (54, 70, -1):
        with pytest.raises(IndexError, match=rf"^rows: expected 0 to 53, got {wrong}$"):
            stack[np.array([0, wrong])]
    x, bias = rng.standard_normal((3, 64)).astype(np.float32), rng.standard_normal(54).astype(np.float32)
    for activations in ACTIVATIONS:
        want = np.concatenate([part.multiply(x, activations=activations) for part in parts], axis=1)
        np.testing.assert_array_equal(stack.multiply(x, activations=activations), want)
        np.testing.assert_array_equal(stack.multiply(x, bias, activations=activations), want + bias)
        for add in (False, True):
            before = rng.standard_normal(want.shape).astype(np.float32)
            out = before.copy()
            assert stack.multiply(x, bias, activations=activations, out=out, add=add) is out
            np.testing.assert_array_equal(out, (before + want if add else want) + bias)
    with pytest.raises(ValueError, match=r"^out: expected an array to add to, got None$"):
        stack.multiply(x, add=True)


def test_one_part_needs_no_stack(parts):
    assert stacked(parts[:1]) is parts[0]
    assert isinstance(stacked(parts), MatrixStack)


def test_matrices_share_one_allocation(parts):
    fresh = empty_matrices(SHAPES)
    assert [(*matrix.shape, matrix.format) for matrix in fresh] == SHAPES
    for i, matrix in enumerate(fresh):
        assert not matrix.to_float32().any()
        matrix.put(0, np.full(matrix.shape, i, np.float32))
    for i, matrix in enumerate(fresh):
        np.testing.assert_allclose(matrix.to_float32(), i, rtol=1e-3)
    assert empty_matrices([]) == []
    assert isinstance(fresh[0], Matrix)
