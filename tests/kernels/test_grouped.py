"""Products of groups of rows, each with its own matrix, beside `Matrix.multiply` of each group."""

import numpy as np
import pytest
from matrices import filled
from tensors import Bfloat16, Elsewhere, Tensor, floats_of, words_of

from kvcache.kernels.grouped import multiply_groups
from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix

ROWS, COLUMNS = 37, 70


def matrices_of(rng, count, format):
    return [filled(rng, ROWS, COLUMNS, format) for _ in range(count)]


def rounded(x):
    """Finite numbers as words of bfloat16, half to even."""
    bits = x.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


@pytest.mark.parametrize("format", MATRIX_FORMATS)
@pytest.mark.parametrize("counts", [[1], [0], [2, 0, 1, 7], [0, 0, 3], [5, 1, 1, 1, 0, 13]])
@pytest.mark.parametrize("has_bias", [False, True])
def test_groups(rng, format, counts, has_bias):
    matrices, n = matrices_of(rng, len(counts), format), sum(counts)
    biases = rng.standard_normal((len(counts), ROWS)).astype(np.float32) if has_bias else None
    x = rng.standard_normal((n, COLUMNS)).astype(np.float32)
    for activations in ("int8", "exact"):
        for tensor, rows in ((Tensor, x), (Bfloat16, words_of(x))):
            out = np.full((n, ROWS), 9, rows.dtype)
            multiply_groups(
                matrices, counts, tensor(rows).__dlpack__(), tensor(out).__dlpack__(), biases, activations=activations
            )
            values = x if tensor is Tensor else floats_of(rows)
            want, stop = np.empty((n, ROWS), np.float32), 0
            for i, (matrix, count) in enumerate(zip(matrices, counts, strict=True)):
                own, stop = slice(stop, stop + count), stop + count
                bias = None if biases is None else biases[i]
                want[own] = matrix.multiply(values[own], bias, activations=activations)
            np.testing.assert_array_equal(out, want if tensor is Tensor else rounded(want))


def test_what_is_refused(rng):
    matrices, x = matrices_of(rng, 2, "f32"), rng.standard_normal((3, COLUMNS)).astype(np.float32)
    out = np.full((3, ROWS), 7, np.float32)
    given = {"matrices": matrices, "counts": [1, 2], "x": Tensor(x), "out": Tensor(out), "biases": None}
    bias = np.zeros((2, ROWS), np.float32)
    mistakes = [
        ({"matrices": [], "counts": []}, ValueError, r"counts: expected one, and a bias, per matrix, got 0 for 0"),
        ({"counts": [3]}, ValueError, r"counts: expected one, and a bias, per matrix, got 1 for 2"),
        ({"counts": [1, 1]}, ValueError, r"x: expected \(2, 70\), got \(3, 70\)"),
        ({"counts": [2, 2]}, ValueError, r"counts: expected 3 rows in all, got 2 after 2"),
        ({"counts": [4, -1]}, ValueError, r"counts: expected 3 rows in all, got 4 after 0"),
        ({"counts": [2**62, 2**62]}, ValueError, r"counts: expected 3 rows in all"),
        ({"counts": [1.0, 2.0]}, TypeError, r"counts"),
        ({"matrices": [matrices[0], None]}, TypeError, r"matrices: expected a Matrix, got NoneType"),
        ({"matrices": [matrices[0], Matrix(ROWS, 71, "f32")]}, ValueError, r"matrices: expected one shape"),
        ({"biases": bias[:1]}, ValueError, r"counts: expected one, and a bias, per matrix"),
        ({"biases": bias[:, 1:]}, ValueError, r"bias: expected \(37,\), got \(36,\)"),
        ({"x": Tensor(x[:, 1:].copy())}, ValueError, r"x: expected \(3, 70\), got \(3, 69\)"),
        ({"x": Elsewhere(x.copy())}, ValueError, r"x: expected a tensor .* on the CPU"),
        ({"x": Bfloat16(words_of(x))}, ValueError, r"out: expected \(3, 37\) of the type of x"),
        ({"out": Tensor(out[:, 1:].copy())}, ValueError, r"out: expected \(3, 37\) .*, got \(3, 36\)"),
        ({"activations": "f32"}, ValueError, r"activations: expected one of int8, exact, bf16, got 'f32'"),
    ]
    for changed, error, message in mistakes:
        arguments = given | changed
        tensors = {name: arguments[name].__dlpack__() for name in ("x", "out")}
        with pytest.raises(error, match=message):
            multiply_groups(**(arguments | tensors))
    square = [Matrix(COLUMNS, COLUMNS, "f32")]
    with pytest.raises(ValueError, match=r"out: expected memory apart from x"):
        multiply_groups(square, [3], Tensor(x).__dlpack__(), Tensor(x).__dlpack__())
    assert (out == 7).all()
