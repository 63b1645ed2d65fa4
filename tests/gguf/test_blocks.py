"""The block types of ggml, compared with the gguf package."""

from __future__ import annotations

import contextlib

import gguf
import numpy as np
import pytest
from matrices import values_of

from kvcache.gguf import blocks
from kvcache.kernels.matrix import MATRIX_FORMATS

pytestmark = pytest.mark.one_build

# Where a block has float16 scales, in bytes from its start.
SCALES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "IQ4_NL": [0], "IQ4_XS": [0], "Q2_0": [0],
    "IQ3_S": [0], "IQ3_XXS": [0], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ1_S": [0], "TQ1_0": [52],
    "TQ2_0": [64], "Q1_0": [0],
}
SIZES = {kind.name: kind.bytes for kind in blocks.TYPES.values()}
NO_FLOATS = [kind for kind in blocks.LOADABLE if kind not in ("F32", "F16", "BF16")]


def random_rows(rng, kind, rows, columns):
    """Random bytes, with finite scales of all sizes and signs."""
    raw = rng.integers(0, 256, (rows, blocks.row_bytes(kind, columns)), dtype=np.uint8)
    if kind in SCALES:
        each = raw.reshape(-1, SIZES[kind])
        for at in SCALES[kind]:
            scales = rng.integers(0, 0x7C00, len(each), dtype=np.uint16) | rng.integers(0, 2, len(each)) << 15
            each[:, at : at + 2] = scales.astype("<u2").view(np.uint8).reshape(-1, 2)
    elif kind == "MXFP4":  # 2**127 is too large for the largest values
        raw.reshape(-1, 17)[:, 0] = rng.integers(0, 253, raw.size // 17)
    elif kind == "NVFP4":
        raw.reshape(-1, 36)[:, :4] = rng.integers(0, 128, (raw.size // 36, 4))
    else:
        raw.view(np.uint8)[:, 1::2] &= 0xBF  # no infinity and no NaN
    return raw


def expected(kind, raw):
    """As the package reads them. It has no Q2_0: 64 codes of 2 bits, counted from -1, behind a scale; and no Q1_0: 128
    bits behind a scale, 1 for it and 0 for minus it."""
    if kind == "Q1_0":
        each = raw.reshape(-1, 18)
        scales, bits = each[:, :2].copy().view("<f2").astype(np.float32), each[:, 2:, None] >> np.arange(8) & 1
        return np.where(bits.reshape(len(each), 128), scales, -scales).reshape(len(raw), -1)
    if kind != "Q2_0":
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    each = raw.reshape(-1, 18)
    codes = np.stack([each[:, 2:] >> bit & 3 for bit in (0, 2, 4, 6)], axis=-1).reshape(len(each), 64)
    scales = each[:, :2].copy().view("<f2").astype(np.float32)
    return (scales * (codes.astype(np.float32) - 1)).reshape(len(raw), -1)


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
@pytest.mark.parametrize("kind", NO_FLOATS)
def test_parts(rng, kind, rows, columns):
    """The parts, by the definition of their format, are the values of the package; every code occurs."""
    raw, line = random_rows(rng, kind, rows, columns), MATRIX_FORMATS[blocks.FORMATS[kind]]
    found = blocks.parts(kind, raw, columns)
    assert found.codes.shape == (rows, columns)
    assert found.scales.shape == (rows, columns // line.channels)
    assert (found.minima is not None) == line.has_minima
    assert (found.units is not None) == line.has_units
    if rows > 7:
        few = {"Q2_0": 4, "TQ2_0": 4, "TQ1_0": 3, "Q1_0": 2, "IQ1_S": 6, "IQ1_M": 6}
        codes = few.get(kind) or (6 if line.name == "iq2" else 1 << line.bits)
        assert len(np.unique(found.codes)) == codes
    if rows:
        np.testing.assert_array_equal(values_of(line.name, *found), expected(kind, raw))


@pytest.mark.parametrize(
    ("kind", "at", "byte"),
    [
        ("Q6_K", 209, 0x7C), ("Q4_K", 1, 0x7C), ("Q2_K", 83, 0xFC), ("IQ4_XS", 1, 0x7E), ("MXFP4", 0, 255),
        ("NVFP4", 3, 255),
    ],
)
def test_scales_that_are_no_numbers(rng, kind, at, byte):
    """Refused by the matrix, and no warning on the way."""
    raw = random_rows(rng, kind, 2, 256)
    raw[1, at] = byte
    with pytest.raises(ValueError, match=r"^(units: expected finite numbers|scales: expected 0 to)"):
        blocks.values(kind, raw, 256)


def test_a_scale_of_nvfp4_that_is_no_number(rng):
    """127 counts as 0, as in ggml."""
    raw = random_rows(rng, "NVFP4", 1, 256)
    raw[0, 2] = 127
    assert not blocks.values("NVFP4", raw, 256)[0, 32:48].any()


@pytest.mark.parametrize("kind", NO_FLOATS)
def test_infinite_scales_are_no_warning(rng, recwarn, kind):
    raw = np.full((2, blocks.row_bytes(kind, 256)), 0xFC if kind == "IQ1_M" else 0x7C, np.uint8)
    with contextlib.suppress(ValueError):
        assert not np.isfinite(blocks.values(kind, raw, 256)).all() or kind in ("MXFP4", "NVFP4")
    assert not recwarn.list


def test_sizes_of_all_types():
    """Sizes are equal to those of the gguf package, for types that cannot be loaded too."""
    package = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert package.items() <= {number: tuple(kind) for number, kind in blocks.TYPES.items()}.items()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: blocks.values("Q8_1", np.zeros((1, 40), np.uint8), 32), "kind: expected one of F32, .* 'Q8_1'"),
        (lambda: blocks.parts("F16", np.zeros((1, 512), np.uint8), 256), "kind: expected one of Q8_0, .*, got 'F16'"),
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
