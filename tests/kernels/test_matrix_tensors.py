"""Products of rows in tensors of other libraries, and parts of a matrix, beside `Matrix.multiply` of the whole."""

import numpy as np
import pytest
from matrices import filled
from pace import half
from tensors import Bfloat16, Elsewhere, Tensor, floats_of, words_of

from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix


def nearest(x):
    """The words of bfloat16 nearest to float32 numbers; of two as near, the even one: both neighbours are tried."""
    low = words_of(x)
    bits = low.astype(np.uint32) << 16
    with np.errstate(invalid="ignore", over="ignore"):
        exact = x.astype(np.float64)
        below = bits.view(np.float32).astype(np.float64)
        # Above the largest number comes 2^128, which has the word of infinity.
        above = np.where((low & 0x7FFF) == 0x7F7F, np.sign(below) * 2.0**128, floats_of(low + np.uint16(1)))
        to_below, to_above = np.abs(exact - below), np.abs(above - exact)
    up = (to_above < to_below) | ((to_above == to_below) & (low & 1 == 1))
    return np.where(np.isfinite(x) & up, low + np.uint16(1), low)


def capsules(tensor, arrays):
    return [tensor(array).__dlpack__() for array in arrays]


@pytest.mark.parametrize("format", MATRIX_FORMATS)
@pytest.mark.parametrize("sizes", [[40], [16, 32, 5], [48, 16]])
@pytest.mark.parametrize("shape", half([(2, 3), (1,), (1, 17), (3, 0)]))
def test_tensors_get_the_bits_of_a_product(rng, format, sizes, shape):
    matrix, bias = filled(rng, sum(sizes), 70, format), rng.standard_normal(sum(sizes)).astype(np.float32)
    for biases in (None, bias):
        for activations in ("int8", "exact"):
            x = rng.standard_normal((*shape, 70)).astype(np.float32)
            outs = [np.full((*shape, size), 9, np.float32) for size in sizes]
            matrix.multiply_tensors(Tensor(x).__dlpack__(), capsules(Tensor, outs), biases, activations=activations)
            want = matrix.multiply(x.reshape(-1, 70), biases, activations=activations)
            got = np.concatenate(outs, axis=-1).reshape(want.shape)
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
            words = words_of(x)
            outs = [np.full((*shape, size), 9, np.uint16) for size in sizes]
            rows, places = Bfloat16(words).__dlpack__(), capsules(Bfloat16, outs)
            matrix.multiply_tensors(rows, places, biases, activations=activations)
            want = matrix.multiply(floats_of(words).reshape(-1, 70), biases, activations=activations)
            np.testing.assert_array_equal(np.concatenate(outs, axis=-1).reshape(want.shape), nearest(want))


def test_every_kind_of_number_is_rounded(rng):
    """Products of weights with 1 are the weights: numbers of all sizes, ties, infinities and NaN."""
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint64).astype(np.uint32)
    ties = rng.integers(0, 2**16, 2000, dtype=np.uint64).astype(np.uint32) << 16 | 0x8000
    edges = np.array([0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 1, 0x80000001, 0x7F800000, 0xFF800000], np.uint32)
    values = np.concatenate([bits, ties, edges]).view(np.float32)
    values = values[~np.isnan(values)]
    weights = np.concatenate([values, [np.float32("nan")] * 2]).astype(np.float32)
    matrix = Matrix(len(weights), 1, "f32")
    matrix.put_words(0, weights[:, None])
    out = np.zeros((1, len(weights)), np.uint16)
    one = np.array([[0x3F80]], np.uint16)
    matrix.multiply_tensors(Bfloat16(one).__dlpack__(), capsules(Bfloat16, [out]))
    np.testing.assert_array_equal(out[0, :-2], nearest(values + np.float32(0)))  # a sum turns -0 into 0
    assert np.isnan(floats_of(out[0, -2:])).all()


def test_what_is_refused(rng):
    matrix = filled(rng, 32, 8, "f32")
    x, out = rng.standard_normal((3, 8)).astype(np.float32), np.full((3, 32), 7, np.float32)
    mistakes = [
        ((Tensor(x), [out]), r"outs: expected 3 rows of the type of x, got 2 rows", {"outs": [out[:2]]}),
        ((Tensor(x), [out]), r"outs: expected 32 columns, got 16", {"outs": [np.ascontiguousarray(out[:, :16])]}),
        ((Tensor(x), [out]), r"outs: expected 32 columns, got 0", {"outs": []}),
        ((Tensor(x), [out]), r"outs: expected a contiguous tensor", {"outs": [out[:, :16], out[:, 16:]]}),
        ((Tensor(x), [out]), r"x: expected \(..., 8\), got \(..., 7\)", {"x": Tensor(x[:, :7].copy())}),
        ((Tensor(x), [out]), r"x: expected a contiguous tensor", {"x": Tensor(np.asfortranarray(x))}),
        ((Tensor(x), [out]), r"x: expected a tensor .* of float32 or bfloat16", {"x": Tensor(x.astype(np.float64))}),
        ((Tensor(x), [out]), r"x: expected a tensor .* of float32 or bfloat16", {"x": Tensor(np.array(1, np.float32))}),
        ((Tensor(x), [out]), r"x: expected a tensor .* on the CPU", {"x": Elsewhere(x.copy())}),
        ((Tensor(x), [out]), r"outs: expected 3 rows of the type of x", {"x": Bfloat16(words_of(x))}),
    ]
    for (rows, outs), message, changed in mistakes:
        rows, outs = changed.get("x", rows), changed.get("outs", outs)
        with pytest.raises(ValueError, match=message):
            matrix.multiply_tensors(rows.__dlpack__(), capsules(Tensor, outs))
    square, rows = filled(rng, 8, 8, "f32"), x.copy()
    with pytest.raises(ValueError, match=r"outs: expected memory apart from x"):
        square.multiply_tensors(Tensor(rows).__dlpack__(), capsules(Tensor, [rows]))
    with pytest.raises(ValueError, match=r"activations: expected one of int8, exact, bf16, got 'f32'"):
        matrix.multiply_tensors(Tensor(x).__dlpack__(), capsules(Tensor, [out]), activations="f32")
    with pytest.raises(ValueError, match=r"bias: expected \(32,\), got \(31,\)"):
        matrix.multiply_tensors(Tensor(x).__dlpack__(), capsules(Tensor, [out]), np.zeros(31, np.float32))
    for other in (None, 3, x):
        with pytest.raises(ValueError, match=r"x: expected a tensor"):
            matrix.multiply_tensors(other, capsules(Tensor, [out]))
    with pytest.raises(TypeError):
        matrix.multiply_tensors(Tensor(x).__dlpack__(), 3)
    np.testing.assert_array_equal(rows, x)
    assert (out == 7).all()


@pytest.mark.parametrize("format", MATRIX_FORMATS)
def test_parts(rng, format):
    matrix, x = filled(rng, 53, 70, format), rng.standard_normal((5, 70)).astype(np.float32)
    want, weights = matrix.multiply(x), matrix.to_float32()
    for row, count in ((0, 53), (0, 16), (16, 32), (32, 21), (48, 5)):
        part = matrix.part(row, count)
        assert (part.shape, part.format) == ((count, 70), format)
        np.testing.assert_array_equal(part.to_float32(), weights[row : row + count])
        np.testing.assert_array_equal(part.multiply(x), want[:, row : row + count])
    last = matrix.part(48, 5).part(0, 5)
    del matrix, part
    np.testing.assert_array_equal(last.to_float32(), weights[48:])


def test_a_part_shares_its_weights(rng):
    matrix, row = filled(rng, 40, 8, "f32"), rng.standard_normal((1, 8)).astype(np.float32)
    matrix.part(16, 16).put(3, row)
    np.testing.assert_array_equal(matrix.to_float32()[19], row[0])


NO_PARTS = [(8, 16), (0, 15), (32, 8), (48, 16), (-16, 16), (0, 0), (16, 2**62), (2**62, 2**62), ("0", 16)]


@pytest.mark.parametrize(("row", "count"), NO_PARTS)
def test_parts_that_there_are_not(rng, row, count):
    with pytest.raises((ValueError, TypeError), match=r"row|count"):
        filled(rng, 53, 8, "q8_0").part(row, count)
