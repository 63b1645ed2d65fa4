"""Weight matrices: what they keep, their products compared with NumPy, and the bits of their rows."""

import numpy as np
import pytest
from blocks import copy_guarded, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import fill, filled, random_parts, values_of
from oracles.bits import multiplied_in_bf16
from oracles.matrix import product, rounded, rounded_to_bf16
from pace import examples, half

from kvcache import get_num_threads, set_num_threads, simd_levels, use_simd
from kvcache.kernels.kernels import bf16_order
from kvcache.kernels.matrix import ACTIVATIONS, MATRIX_FORMATS, Matrix
from kvcache.networks.linear import MatrixStack

FLOATS = [name for name, line in MATRIX_FORMATS.items() if not line.packed]
PACKED = [name for name, line in MATRIX_FORMATS.items() if line.packed]
QUANTISED = [name for name in PACKED if MATRIX_FORMATS[name].quantises]
# Formats and the activations that meet them in a way of their own.
MEETINGS = [(name, "int8") for name in MATRIX_FORMATS] + [(name, "exact") for name in PACKED]
MEETINGS += [(name, "bf16") for name in ("bf16", "f16", "f32", "q8_0", "q4_1", "q6_k", "nvfp4")]
SHAPES = [(1, 1), (16, 64), (33, 70), (100, 257), (17, 576), (70, 1030)]
# The largest error of a value over the largest magnitude of its group of 32, or of a value over itself.
STEPS = {"q8_0": 1.04 / 254 + 2**-11, "q4_0": 1 / 8 + 2**-11, "q4_1": 2 / 15}
ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}


@pytest.fixture(params=[1, 3])
def threads(request):
    before = get_num_threads()
    set_num_threads(request.param)
    yield request.param
    set_num_threads(before)


def matrix_of(weights, format):
    matrix = Matrix(*weights.shape, format)
    matrix.put(0, weights)
    return matrix


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_floats_are_rounded_once(rng, format, shape):
    weights = normal(rng, *shape)
    kept = matrix_of(weights, format).to_float32()
    np.testing.assert_array_less(
        np.abs(kept - weights), ROUNDING[format] * np.abs(weights) + 3.1e-8
    )  # halves below 6e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_words_are_kept(rng, shape):
    """Every finite half and bf16: the matrix has the same words, and multiplies by their exact values."""
    words = rng.integers(0, 2**16, shape).astype(np.uint16)
    for format, values in (("f16", words.view(np.float16).astype(np.float32)),
                           ("bf16", (words.astype(np.uint32) << 16).view(np.float32))):
        matrix = Matrix(*shape, format)
        matrix.put_words(0, words)
        finite = np.isfinite(values)
        np.testing.assert_array_equal(matrix.to_float32()[finite], values[finite])
    matrix.put(0, np.where(finite, values, 0))
    np.testing.assert_array_equal(matrix.to_float32(), np.where(finite, values, 0))


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_values_are_near(rng, format, shape):
    weights = normal(rng, *shape) * 10.0 ** rng.integers(-3, 3, (shape[0], 1)).astype(np.float32)
    kept = matrix_of(weights, format).to_float32()
    for first in range(0, shape[1], 32):
        group, found = weights[:, first : first + 32], kept[:, first : first + 32]
        largest = np.abs(group).max(axis=1, keepdims=True)
        assert (
            np.abs(found - group) <= STEPS[format] * largest + 5e-6
        ).all()  # scales below 6e-5 are not normal halves


def test_q4_1_is_fitted(rng):
    """Its error is below that of levels over the whole range."""
    weights = normal(rng, 256, 1024)
    groups = weights.reshape(256, -1, 32)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    plain = low + np.round((groups - low) / (high - low) * 15) * (high - low) / 15
    kept = matrix_of(weights, "q4_1").to_float32().reshape(groups.shape)
    assert ((kept - groups) ** 2).mean() < 0.95 * ((plain - groups) ** 2).mean()


def test_the_scales_of_q8_are_fitted(rng):
    """The scale has the least squared error of a few: never more than that of the largest magnitude over 127."""
    for weights, share in ((normal(rng, 300, 320), 0.85), (np.rint(normal(rng, 300, 320) * 3) - 2, 0.6)):
        weights = np.float32(0.01) * weights.astype(np.float32)
        groups = weights.reshape(300, -1, 32)
        plain = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
        plain = plain.astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint(groups / plain), -127, 127)
        before = ((groups - codes * plain) ** 2).sum(axis=2)
        after = ((groups - matrix_of(weights, "q8_0").to_float32().reshape(groups.shape)) ** 2).sum(axis=2)
        assert (after <= before * 1.01 + plain[..., 0] ** 2 * 0.01).all()
        assert after.sum() < share * before.sum()


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_of_others_are_kept(rng, format, shape):
    """Rows in any order and in pieces, beside each other in a panel; `codes` gives them back."""
    parts, want = random_parts(rng, format, *shape)
    matrix = Matrix(*shape, format)
    for first in rng.permutation(np.arange(0, shape[0], 7)):
        matrix.put_codes(first, *(None if part is None else part[first : first + 7] for part in parts))
    np.testing.assert_array_equal(matrix.to_float32(), want)
    for row in (0, shape[0] - 1):
        for mine, theirs in zip(matrix.codes(row), parts, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                assert mine.dtype == theirs.dtype
                np.testing.assert_array_equal(mine, theirs[row])


@pytest.mark.parametrize(("format", "activations"), MEETINGS)
def test_products(rng, threads, format, activations):
    for shape in half(SHAPES) if threads == 1 else SHAPES[-1:]:  # few products have one thread anyway
        matrix = filled(rng, *shape, format)
        weights = matrix.to_float32()
        for n in half((0, 1, 3, 2, 7, 13, 29, 50)):
            x = normal(rng, n, shape[1]) * np.float32(10.0 ** rng.integers(-3, 4))
            bias = normal(rng, shape[0]) if n % 2 else None
            before = x.copy()
            out = matrix.multiply(x, bias, activations=activations)
            want, bound = product(x, weights, bias, format=format, activations=activations)
            assert out.dtype == np.float32
            assert out.shape == (n, shape[0])
            assert (np.abs(out - want) <= bound).all(), (shape, n, np.abs(out - want).max(initial=0))
            np.testing.assert_array_equal(x, before)


def test_products_in_bf16(rng):
    """Weights of every format, as the matrix reads them, and x round to bf16, at every level in its order."""
    for format in MATRIX_FORMATS:
        matrix, x = filled(rng, 19, 297, format), normal(rng, 34, 297)
        numbers = rounded_to_bf16(x), rounded_to_bf16(matrix.to_float32())
        wanted = {}
        for level in simd_levels():
            with use_simd(level):
                order = bf16_order()
                if order == "quads":  # tests/ckernels/orders.h
                    continue
                if order not in wanted:
                    wanted[order] = multiplied_in_bf16(*numbers, order)
                out = matrix.multiply(x, activations="bf16")
                np.testing.assert_array_equal(out.view(np.uint32), wanted[order].view(np.uint32))
                for n in (1, 3, 17, 33):
                    np.testing.assert_array_equal(matrix.multiply(x[:n], activations="bf16"), out[:n])


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("extreme", ["codes", "activations"])
def test_the_largest_sums_do_not_overflow(rng, format, extreme):
    """All codes at either end, all activations at theirs, signs that agree, and one value far above the others."""
    line, shape = MATRIX_FORMATS[format], (16, 256)
    numbers = line.numbers or range(1 << line.bits)
    for end in (min(numbers), max(numbers)):
        (codes, scales, minima, units), _ = random_parts(rng, format, *shape)
        codes[:] = numbers.index(end) if line.numbers else end - 128 if line.bits == 8 else end
        matrix = Matrix(*shape, format)
        matrix.put_codes(0, codes, scales, minima, units)
        x = np.ones((3, 256), np.float32)
        x[1] = -1
        if extreme == "activations":
            x[2, ::7] = 1000.0
        for activations in ("int8", "exact"):
            want, bound = product(x, matrix.to_float32(), format=format, activations=activations)
            assert (np.abs(matrix.multiply(x, activations=activations) - want) <= bound).all()


@pytest.mark.parametrize("exact", [False, True])
def test_rounded_activations_stay_in_their_bounds(rng, exact):
    x = normal(rng, 20, 70)
    near, steps = rounded(x, exact)
    assert (np.abs(near - x) <= np.repeat(steps, 32, axis=1)[:, :70] * 0.500001).all()
    matrix = matrix_of(np.eye(70, dtype=np.float32), "q8_0")  # its diagonal is 1 within f16
    out = matrix.multiply(x, activations="exact" if exact else "int8")
    assert np.abs(out - near).max() < 1e-3 * np.abs(x).max()


@pytest.mark.parametrize("format", MATRIX_FORMATS)
@settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_company(format, data):
    """Rows split at random over calls, beside other rows, on one to four threads."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n, rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 80)), data.draw(st.integers(1, 700))
    how = {"activations": data.draw(st.sampled_from(ACTIVATIONS))}
    matrix, x = filled(rng, rows, columns, format), normal(rng, n, columns)
    bias = normal(rng, rows) if data.draw(st.booleans()) else None
    before = get_num_threads()
    try:
        set_num_threads(1)
        want = matrix.multiply(x, bias, **how)
        cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
        parts = [x[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        found = []
        for part in parts:
            set_num_threads(data.draw(st.integers(1, 4)))
            company = normal(rng, data.draw(st.integers(0, 20)), columns)
            ahead = data.draw(st.booleans())
            both = matrix.multiply(np.concatenate([company, part] if ahead else [part, company]), bias, **how)
            found.append(both[len(company) :] if ahead else both[: len(part)])
    finally:
        set_num_threads(before)
    np.testing.assert_array_equal(np.concatenate(found).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize(
    ("format", "activations"), half([how for how in MEETINGS if how[0] in (*FLOATS, *QUANTISED, "q6_k")])
)
@pytest.mark.parametrize(("n", "shape"), half([(29, (70, 520)), (250, (70, 520)), (131, (9, 16_000))]))
def test_many_rows_meet_a_matrix_in_chunks(rng, format, activations, n, shape):
    """More rows than a chunk of kvc_matmul.c has at any level, with many channels: the bits of few at a time."""
    matrix, x, bias = filled(rng, *shape, format), normal(rng, n, shape[1]), normal(rng, shape[0])
    out = matrix.multiply(x, bias, activations=activations)
    few = [matrix.multiply(x[i : i + 10], bias, activations=activations) for i in range(0, n, 10)]
    np.testing.assert_array_equal(out.view(np.uint32), np.concatenate(few).view(np.uint32))


@pytest.mark.parametrize("format", MATRIX_FORMATS)
@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_beside_the_arrays_is_touched(rng, format, at_end):
    for shape in ((16, 64), (33, 70), (5, 1)):
        size = Matrix(*shape, format).nbytes
        matrix = Matrix(*shape, format, memory=guarded((size,), np.uint8, at_end=at_end))
        fill(rng, matrix)
        bias = copy_guarded(normal(rng, shape[0]), at_end=at_end)
        for n in (1, 5, 13):
            x = copy_guarded(normal(rng, n, shape[1]), at_end=at_end)
            for how in ACTIVATIONS:
                out = guarded((n, shape[0]), np.float32, at_end=at_end)
                assert matrix.multiply(x, bias, activations=how, out=out) is out
                np.testing.assert_array_equal(out, matrix.multiply(x.copy(), bias.copy(), activations=how))


@pytest.mark.parametrize(("format", "activations"), MEETINGS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(rng, format, activations, value):
    """Only in its own row."""
    matrix = filled(rng, 20, 70, format)
    x = np.abs(normal(rng, 3, 70))
    want = matrix.multiply(x, activations=activations)
    x[1, 40] = value
    out = matrix.multiply(x, activations=activations)
    assert not np.isfinite(out[1]).any()
    np.testing.assert_array_equal(out[[0, 2]], want[[0, 2]])


def test_looked_up_rows(rng):
    for format in MATRIX_FORMATS:
        matrix = filled(rng, 40, 70, format)
        rows = np.array([39, 0, 7, 7], np.uint32)
        np.testing.assert_array_equal(matrix[rows], matrix.to_float32()[rows])
        assert matrix[np.arange(0)].shape == (0, 70)
        np.testing.assert_array_equal(matrix[39], matrix.to_float32()[39:])
        for found in (matrix, MatrixStack([matrix, matrix]).parts[0], MatrixStack([matrix])):
            for wrong in ([40], [-1], [0, 2**40], 40, -1, np.int64(40)):
                with pytest.raises(IndexError, match="rows: expected 0 to 39, got"):
                    found[np.array(wrong) if isinstance(wrong, list) else wrong]
            for wrong in (2**63, 2**64, np.array([2**64 - 1], np.uint64), np.zeros((1, 1), np.int64)):
                with pytest.raises(ValueError, match=r"^rows: expected"):
                    found[wrong]
            for wrong in ([2**64], 1.5, [1.5], None, "1", True, slice(3)):
                with pytest.raises((TypeError, ValueError), match=r"^rows: expected"):
                    found[wrong]


BITS = {
    "f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q4_0": 4.5, "q4_1": 5, "q5_0": 5.5, "q5_1": 6, "q4_k": 4.625,
    "q5_k": 5.625, "q6_k": 6.625, "q3_k": 3.625, "q2_k": 2.625, "iq4_nl": 4.5, "iq4_xs": 4.375, "iq3_s": 4.375,
    "iq3_xxs": 4.375, "iq2": 4.625, "mxfp4": 4.25, "nvfp4": 4.625,
}


def test_sizes():
    """Bits per weight as documented, where nothing has to be filled up."""
    assert BITS.keys() == MATRIX_FORMATS.keys()
    for format, bits in BITS.items():
        matrix = Matrix(64, 256, format)
        assert matrix.nbytes * 8 == 64 * 256 * bits
        assert Matrix.num_bytes(64, 256, format) == matrix.nbytes + 64
        assert (matrix.shape, len(matrix), matrix.format) == ((64, 256), 64, format)
        assert repr(matrix) == f"Matrix(64, 256, {format!r})"
        assert not matrix.to_float32().any()


F16 = np.ones((2, 2), np.float16)
ONE = np.ones((1, 64), np.float32)
MISTAKES = [
    (lambda m: Matrix(0, 1, "f32"), ValueError, "rows: expected"),
    (lambda m: Matrix(1, 2**62, "q8_0"), ValueError, r"rows, columns: expected less than 2\*\*58 weights"),
    (lambda m: Matrix(2**64, 1, "f32"), ValueError, "rows: expected an int <= 9223372036854775807"),
    (lambda m: Matrix(1, 10**5000, "q4_0"), ValueError, "columns: expected an int <= .*, got one beyond 100 bits"),
    (lambda m: m.part(2**64, 16), ValueError, "row: expected an int <= 9223372036854775807"),
    (lambda m: m.part(0, 2**64), ValueError, "count: expected an int <= 9223372036854775807"),
    (lambda m: m.put(2**64, np.ones((1, 64))), ValueError, "row: expected an int <= 9223372036854775807"),
    (lambda m: Matrix(1, 1, "q5"), ValueError, "format: expected one of f32, .*, got 'q5'"),
    (lambda m: Matrix(16, 64, "f32", memory=np.zeros(4000, np.uint8)), ValueError, "memory: expected 4160 bytes"),
    (lambda m: Matrix(16, 64, "f32", memory=bytes(9999)), TypeError, "memory: expected"),
    (lambda m: m.put(2, np.ones((1, 64))), ValueError, r"row: expected rows of \(2, 64\)"),
    (lambda m: m.put(0, np.ones((1, 63))), ValueError, r"row: expected rows of \(2, 64\)"),
    (lambda m: m.put(-1, np.ones((1, 64))), ValueError, "row: expected"),
    (lambda m: m.put(0, np.full((1, 64), 70000)), ValueError, "values: expected finite numbers up to 65504, got 70000"),
    (lambda m: m.put(0, np.full((1, 64), np.nan)), ValueError, "values: expected finite numbers"),
    (lambda m: m.put_words(0, np.ones((1, 64), np.uint16)), ValueError, "words: expected a matrix of floats, got q4_1"),
    (lambda m: m.put_codes(0, np.full((1, 64), 16, np.uint8), F16[:1], F16[:1]), ValueError, "codes: expected 0 to 15"),
    (lambda m: m.put_codes(0, np.ones((1, 64), np.int8), F16[:1], F16[:1]), ValueError, "codes: expected uint8"),
    (lambda m: m.put_codes(0, np.ones((1, 64), np.uint8), F16, F16), ValueError, r"scales: expected float16 \(1, 2\)"),
    (lambda m: m.put_codes(0, np.ones((1, 64), np.uint8), F16[:1], None), TypeError, "minima: expected"),
    (lambda m: m.put_codes(0, np.ones((1, 64), np.uint8), F16[:1], F16[:1], ONE), ValueError, "units: expected none"),
    (lambda m: m.multiply(np.ones((1, 63), np.float32)), ValueError, r"x: expected \(n, 64\), got \(1, 63\)"),
    (lambda m: m.multiply(ONE, activations="int4"), ValueError, "activations: expected one of int8, exact, bf16, got"),
    (lambda m: m.multiply(np.ones((1, 64), np.float32), np.ones(3, np.float32)), ValueError, r"bias: expected \(2,\)"),
    *(
        (lambda m, out=out: m.multiply(ONE, out=out), ValueError, r"out: expected C-contiguous, writeable float32 of ")
        for out in (
            np.ones((1, 3), np.float32),
            np.ones((2, 1), np.float32).T[:, ::-1],
            np.ones((1, 2)),
            np.broadcast_to(np.float32(0), (1, 2)),
            [[1.0, 1.0]],
        )
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=[match for _, _, match in MISTAKES])
def test_mistakes(mistake, rng):
    """Each has its message, and leaves the matrix as it was."""
    call, error, match = mistake
    matrix = matrix_of(normal(rng, 2, 64), "q4_1")
    before = matrix.to_float32()
    with pytest.raises(error, match=match):
        call(matrix)
    np.testing.assert_array_equal(matrix.to_float32(), before)


def test_minima_of_a_format_without():
    with pytest.raises(ValueError, match="minima: expected none for q8_0"):
        Matrix(1, 64, "q8_0").put_codes(0, np.ones((1, 64), np.int8), F16[:1], F16[:1])
    with pytest.raises(ValueError, match="codes: expected a matrix of a packed format, got f32"):
        Matrix(1, 64, "f32").codes(0)


WRONG_PARTS = [
    ("q6_k", {"codes": 64}, "codes: expected 0 to 63, got 64"),
    ("q5_0", {"codes": 32}, "codes: expected 0 to 31, got 32"),
    ("q3_k", {"codes": 8}, "codes: expected 0 to 7, got 8"),
    ("q2_k", {"codes": 4}, "codes: expected 0 to 3, got 4"),
    ("q2_k", {"scales": 16}, "scales: expected 0 to 15, got 16"),
    ("q2_k", {"minima": 16}, "minima: expected 0 to 15, got 16"),
    ("mxfp4", {"scales": 255}, "scales: expected 0 to 254, got 255"),
    ("nvfp4", {"scales": 127}, "scales: expected 0 to 126, got 127"),
    ("nvfp4", {"units": np.inf}, "units: expected finite numbers, got inf"),
    ("q4_k", {"units": 70000}, "units: expected finite numbers of float16, got 70000"),
    ("q4_k", {"units": 0.1}, "units: expected finite numbers of float16, got 0.1"),
    ("iq4_xs", {"units": np.nan}, "units: expected finite numbers, got nan"),
]


@pytest.mark.parametrize(("format", "wrong", "match"), WRONG_PARTS)
def test_parts_that_a_format_does_not_have(rng, format, wrong, match):
    """One number that is none, in the last place of a part: refused, and the matrix stays as it was."""
    matrix = filled(rng, 5, 300, format)
    before = matrix.to_float32()
    parts = dict(zip(("codes", "scales", "minima", "units"), random_parts(rng, format, 5, 300)[0], strict=True))
    for name in ("scales", "minima", "units"):
        if parts[name] is not None:
            with pytest.raises(ValueError, match=rf"{name}: expected \w+ \(5, "):
                matrix.put_codes(0, **(parts | {name: parts[name][:, 1:]}))
    for name, value in wrong.items():
        parts[name].reshape(-1)[-1] = value
    with pytest.raises(ValueError, match=match):
        matrix.put_codes(0, **parts)
    np.testing.assert_array_equal(matrix.to_float32(), before)


@pytest.mark.parametrize("format", [name for name in PACKED if name not in QUANTISED])
def test_formats_that_floats_do_not_become(rng, format):
    matrix = filled(rng, 3, 70, format)
    before = matrix.to_float32()
    with pytest.raises(ValueError, match=f"values: expected codes for {format}, see `put_codes`, got floats"):
        matrix.put(0, normal(rng, 3, 70))
    np.testing.assert_array_equal(matrix.to_float32(), before)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_every_scale_of_8_bits(format):
    """Products with 1 are the weights, whatever the exponent: also those below the least normal float."""
    top = {"mxfp4": 253, "nvfp4": 127}[format]  # from there on 12 times the scale is no float
    codes, scales = np.tile(np.arange(16, dtype=np.uint8), (top, 2)), np.arange(top, dtype=np.uint8)[:, None]
    scales = np.repeat(scales, 32 // MATRIX_FORMATS[format].channels, axis=1)
    units = np.ones((top, 1), np.float32) if format == "nvfp4" else None
    matrix = Matrix(top, 32, format)
    matrix.put_codes(0, codes, scales, None, units)
    want = values_of(format, codes, scales, None, units)
    np.testing.assert_array_equal(matrix.to_float32(), want)
    for k in (1, 7, 10):
        x = np.zeros((1, 32), np.float32)
        x[0, k] = 1
        found = matrix.multiply(x)[0]
        np.testing.assert_allclose(found, want[:, k], rtol=2.0**-21, atol=2.0**-148)


@pytest.mark.parametrize("format", MATRIX_FORMATS)
@pytest.mark.parametrize("n", [1, 3, 7, 20, 70])
def test_a_product_is_added(rng, format, n):
    """The product is added to `out`, then the bias: the bits of the two sums."""
    for rows, columns in ((16, 256), (50, 64), (33, 100), (32, 600)):
        matrix, x = filled(rng, rows, columns, format), normal(rng, n, columns)
        before, bias = normal(rng, n, rows), normal(rng, rows)
        for one in (None, bias):
            out = before.copy()
            assert matrix.multiply(x, one, out=out, add=True) is out
            want = before + matrix.multiply(x) + (0 if one is None else one)
            np.testing.assert_array_equal(out, want)
    with pytest.raises(ValueError, match=r"^out: expected an array to add to, got None$"):
        matrix.multiply(x, add=True)


@pytest.mark.parametrize("format", MATRIX_FORMATS)
def test_results_over_what_is_read(rng, format):
    """Refused, and nothing is written; next to it they are written."""
    n, rows, columns = 3, 32, 64
    buffer = rng.standard_normal(n * rows + n * columns + rows).astype(np.float32)
    out, rest = buffer[: n * rows].reshape(n, rows), buffer[n * rows :]
    x, bias = rest[: n * columns].reshape(n, columns), rest[n * columns :]
    matrix = filled(rng, rows, columns, format)
    want = matrix.multiply(x, bias)
    assert matrix.multiply(x, bias, out=out) is out
    np.testing.assert_array_equal(out, want)
    before = buffer.copy()
    for name, begin in (("x", n * rows - 1), ("x", 0), ("bias", n * rows)):
        over = buffer[begin : begin + n * columns].reshape(n, columns) if name == "x" else x
        other = bias if name == "x" else buffer[n * rows - rows : n * rows]
        with pytest.raises(ValueError, match=f"^out: expected memory apart from {name}, got the same memory$"):
            matrix.multiply(over, other, out=out)
    np.testing.assert_array_equal(buffer, before)
    memory = np.zeros(Matrix.num_bytes(rows, columns, format), np.uint8)
    matrix = Matrix(rows, columns, format, memory=memory)
    inside = memory[-4 * rows :].view(np.float32).reshape(1, rows)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from the weights, got the same memory$"):
        matrix.multiply(np.ones((1, columns), np.float32), out=inside)
    assert not memory.any()
