"""The block types of ggml, compared with the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from kvcache.gguf import blocks

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]

# Where a block has float16 scales, in bytes from its start.
SCALES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "IQ4_NL": [0], "IQ4_XS": [0],
}


def random_rows(rng, kind, rows, columns):
    """Random bytes, with finite scales of all sizes and signs."""
    raw = rng.integers(0, 256, (rows, blocks.row_bytes(kind, columns)), dtype=np.uint8)
    if kind in SCALES:
        each = raw.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])
        for at in SCALES[kind]:
            scales = rng.integers(0, 0x7C00, len(each), dtype=np.uint16) | rng.integers(0, 2, len(each)) << 15
            each[:, at : at + 2] = scales.astype("<u2").view(np.uint8).reshape(-1, 2)
    elif kind == "MXFP4":  # scales from 2**-23 to 2**16, those that float16 has
        each = raw.reshape(-1, 17)
        each[:, 0] = rng.integers(104, 144, len(each))
    else:
        raw.view(np.uint8)[:, 1::2] &= 0xBF  # no infinity and no NaN
    return raw


def expected(kind, raw):
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (3, 512), (301, 768), (17, 2048)])
@pytest.mark.parametrize("kind", blocks.LOADABLE)
def test_values(rng, monkeypatch, kind, rows, columns):
    """Bit for bit, in pieces of a few rows and in one."""
    raw = random_rows(rng, kind, rows, columns)
    for piece in (1, 5 * columns, 1 << 20):
        monkeypatch.setattr(blocks, "_PIECE_VALUES", piece)
        found = blocks.values(kind, raw, columns)
        assert found.dtype == np.float32
        assert found.shape == (rows, columns)
        np.testing.assert_array_equal(found.view(np.uint32), expected(kind, raw).view(np.uint32))


@pytest.mark.parametrize("columns", [256, 1280])
@pytest.mark.parametrize("rows", [0, 1, 7, 99])
@pytest.mark.parametrize("kind", blocks.CODED)
def test_codes(rng, monkeypatch, kind, rows, columns):
    """The documented formula over codes, scales and minima gives the values, bit for bit."""
    monkeypatch.setattr(blocks, "_PIECE_VALUES", 2048)
    raw = random_rows(rng, kind, rows, columns)
    codes, scales, minima = blocks.codes(kind, raw, columns)
    assert codes.shape == (rows, columns)
    assert scales.shape == (rows, columns // 32)
    signed = {"Q8_0": 127, "Q5_0": 15, "Q3_K": 124, "IQ4_NL": 113, "IQ4_XS": 113, "MXFP4": 12}
    assert codes.dtype == (np.int8 if kind in signed else np.uint8)
    if rows:
        assert codes.max() <= signed.get(kind, 15)
    if rows > 7:
        assert codes.max() == signed.get(kind, 15)
        least = {"Q8_0": -128, "Q5_0": -16, "Q3_K": -128, "IQ4_NL": -127, "IQ4_XS": -127, "MXFP4": -12}
        assert codes.min() == least.get(kind, 0)
    centred = codes.astype(np.float32) - (8 if kind == "Q4_0" else 0)
    found = centred.reshape(rows, columns // 32, 32) * scales.astype(np.float32)[..., None]
    if kind in ("Q4_1", "Q4_K"):
        assert scales.dtype == minima.dtype == np.float32
        found = found + minima[..., None]
    else:
        assert scales.dtype == (np.float32 if kind == "IQ4_XS" else np.float16)
        assert minima is None
    np.testing.assert_array_equal(found.reshape(rows, columns), blocks.values(kind, raw, columns))


def test_scales_of_mxfp4_that_no_half_has():
    """Every exponent: as the package reads it; with codes, rounded to multiples of 2**-24 where it is smaller."""
    exponents = np.arange(255, dtype=np.uint8)
    raw = np.empty((255, 17), np.uint8)
    raw[:, 0], raw[:, 1:] = exponents, np.arange(16, dtype=np.uint8) * 17
    found = blocks.values("MXFP4", raw, 32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found.view(np.uint32), expected("MXFP4", raw).view(np.uint32))
    codes, scales, minima = blocks.codes("MXFP4", raw, 32)
    kept = codes[:144] * scales[:144].astype(np.float32)
    assert minima is None
    np.testing.assert_array_equal(kept[104:], found[104:144])
    assert 0 < np.abs(kept[:104] - found[:104]).max() <= 2.0**-25
    assert np.isinf(scales[144:]).all()
    raw[:, 1:] = 0x80  # zeros of both signs: they may have any scale
    codes, scales, _ = blocks.codes("MXFP4", raw, 32)
    assert not codes.any()
    assert not scales.any()
    raw[:, 0] = 255
    assert np.isnan(blocks.values("MXFP4", raw, 32)).all()
    raw[:, 1] = 1
    assert np.isnan(blocks.codes("MXFP4", raw, 32)[1].astype(np.float32)).all()


@pytest.mark.parametrize("kind", [kind for kind in blocks.LOADABLE if kind not in ("F32", "F16", "BF16", "MXFP4")])
def test_infinite_scales_are_no_warning(rng, recwarn, kind):
    raw = np.full((2, blocks.row_bytes(kind, 256)), 0x7C, np.uint8)
    assert not np.isfinite(blocks.values(kind, raw, 256)).all()
    if kind in blocks.CODED:
        blocks.codes(kind, raw, 256)
    assert not recwarn.list


def test_sizes_of_all_types():
    """Sizes are equal to those of the gguf package, for types that cannot be loaded too."""
    package = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert package.items() <= {number: tuple(kind) for number, kind in blocks.TYPES.items()}.items()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: blocks.values("IQ3_S", np.zeros((1, 110), np.uint8), 256), "kind: expected one of F32, .* 'IQ3_S'"),
        (lambda: blocks.codes("Q6_K", np.zeros((1, 210), np.uint8), 256), "kind: expected one of Q8_0, .*, got 'Q6_K'"),
        (lambda: blocks.values("Q8_0", np.zeros((1, 34), np.uint8), 33), "columns: expected a multiple of 32 for Q8_0"),
        (lambda: blocks.values("Q8_0", np.zeros((1, 34), np.uint8), 0), "columns: expected a multiple of 32 for Q8_0"),
        (lambda: blocks.values("Q8_0", np.zeros((1, 34), np.int8), 32), r"raw: expected contiguous uint8 \(any, 34\)"),
        (lambda: blocks.values("Q8_0", np.zeros((1, 35), np.uint8), 32), r"raw: expected .*, got uint8 \(1, 35\)"),
        (lambda: blocks.values("Q8_0", np.zeros((2, 68), np.uint8)[:, ::2], 32), r"raw: expected contiguous uint8"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
