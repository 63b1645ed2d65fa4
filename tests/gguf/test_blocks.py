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
    "Q6_K": [208],
}  # fmt: skip


def random_rows(rng, kind, rows, columns):
    """Random bytes, with finite scales of all sizes and signs."""
    raw = rng.integers(0, 256, (rows, blocks.row_bytes(kind, columns)), dtype=np.uint8)
    if kind in SCALES:
        each = raw.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])
        for at in SCALES[kind]:
            scales = rng.integers(0, 0x7C00, len(each), dtype=np.uint16) | rng.integers(0, 2, len(each)) << 15
            each[:, at : at + 2] = scales.astype("<u2").view(np.uint8).reshape(-1, 2)
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
    assert codes.dtype == (np.int8 if kind in ("Q8_0", "Q5_0") else np.uint8)
    if rows and kind != "Q8_0":
        assert (codes.min(), codes.max()) == ((-16, 15) if kind == "Q5_0" else (0, 15))
    centred = codes.astype(np.float32) - (8 if kind == "Q4_0" else 0)
    found = centred.reshape(rows, columns // 32, 32) * scales.astype(np.float32)[..., None]
    if kind in ("Q4_1", "Q4_K"):
        assert scales.dtype == minima.dtype == np.float32
        found = found + minima[..., None]
    else:
        assert scales.dtype == np.float16
        assert minima is None
    np.testing.assert_array_equal(found.reshape(rows, columns), blocks.values(kind, raw, columns))


@pytest.mark.parametrize("kind", [kind for kind in blocks.LOADABLE if kind not in ("F32", "F16", "BF16")])
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
        (lambda: blocks.values("Q2_K", np.zeros((1, 84), np.uint8), 256), "kind: expected one of F32, .*, got 'Q2_K'"),
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
