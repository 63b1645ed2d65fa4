"""The tensor types of ggml: how blocks of weights are packed, and the parts of rows that a `Matrix` keeps of them.

A quantised row is a sequence of blocks. Each block holds 32, 64 or 256 values; groups of 32 or 16 of them have a scale,
and in some types a minimum. Block layouts are those of ggml-common.h; Q4_K and Q5_K share 12 bytes of 6-bit scales and
minima (`_six_bits`). A matrix keeps codes, scales and minima as they are: `values` equals `gguf.quants.dequantize` bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.gguf.grids import GRIDS
from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix
from kvcache.support.arguments import short

__all__ = ["FORMATS", "LOADABLE", "TYPES", "Parts", "TensorType", "parts", "row_bytes", "values"]

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]

_PIECE_VALUES = 1 << 18  # unpacked at a time: the scratch arrays stay in the second-level cache


class TensorType(NamedTuple):
    """A type of ggml: values and bytes per block (1 value for the plain types)."""

    name: str
    values: int
    bytes: int


# Ids as in a file's tensor list. Types that cannot be loaded are listed too: their size is needed to check a file.
TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}
_BY_NAME = {kind.name: kind for kind in TYPES.values()}


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of `columns` values, a multiple of the block's values."""
    block = _BY_NAME[kind]
    return columns // block.values * block.bytes


class Parts(NamedTuple):
    """Rows as `Matrix.put_codes` takes them."""

    codes: NDArray[Any]
    scales: NDArray[Any]
    minima: NDArray[Any] | None = None
    units: Float32 | None = None


def _nibbles(packed: UInt8, run: int) -> UInt8:
    """4-bit codes `(n, values)`: of each run of bytes first the low halves, then the high ones."""
    count, size = packed.shape
    runs = packed.reshape(count, size // run, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(count, 2 * size)


def _fifth_bits(packed: UInt8) -> UInt8:
    """The high bit of 32 codes, as 16 `(n, 32)`: one bit per code, lowest bit first."""
    bits: UInt8 = np.unpackbits(packed, axis=1, bitorder="little")
    return bits << np.uint8(4)


def _six_bits(packed: UInt8) -> tuple[UInt8, UInt8]:
    """Scales and minima `(n, 8)` of 6 bits from 12 bytes.

    Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 minima 0 to 3, each in its lower 6 bits; the upper 2 bits are the
    upper bits of scales and minima 4 to 7, whose lower 4 bits are the low and the high halves of bytes 8 to 11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _units(block: NDArray[Any]) -> Float32:
    """The unit of scales and that of minima, which the types subtract: `(n, 2)`."""
    return np.stack([block["d"], -block["m"]], axis=1).astype(np.float32)


def _unit(block: NDArray[Any], parts: int = 1) -> Float32:
    """The unit of scales, or one of `parts` parts of it: `(n,)`."""
    return _part(block["d"], parts)


def _part(units: NDArray[np.float16], parts: int) -> Float32:
    with np.errstate(invalid="ignore"):  # of a damaged file
        found: Float32 = units.astype(np.float32) / np.float32(parts)
    return found


def _q8_0(block: NDArray[Any]) -> Parts:
    return Parts(block["codes"], block["d"])


def _q4_0(block: NDArray[Any]) -> Parts:
    return Parts(_nibbles(block["codes"], 16), block["d"])


def _q4_1(block: NDArray[Any]) -> Parts:
    return Parts(_nibbles(block["codes"], 16), block["d"], block["m"])


def _q5_0(block: NDArray[Any]) -> Parts:
    return Parts(_nibbles(block["codes"], 16) | _fifth_bits(block["high"]), block["d"])


def _q5_1(block: NDArray[Any]) -> Parts:
    return Parts(_nibbles(block["codes"], 16) | _fifth_bits(block["high"]), block["d"], block["m"])


def _q4_k(block: NDArray[Any]) -> Parts:
    return Parts(_nibbles(block["codes"], 32), *_six_bits(block["scales"]), _units(block))


def _q5_k(block: NDArray[Any]) -> Parts:
    # Bit i of the 32 bytes is the high bit of group i.
    high = block["high"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _nibbles(block["codes"], 32).reshape(-1, 8, 32) | high << 4
    return Parts(codes, *_six_bits(block["scales"]), _units(block))


def _q6_k(block: NDArray[Any]) -> Parts:
    # Two halves of 128 values: 64 bytes of low 4 bits, and 32 bytes with the upper 2 bits of 4 times 32 values.
    low = _nibbles(block["codes"], 64).reshape(-1, 2, 4, 32)
    high = block["high"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return Parts(low | high << 4, block["scales"], None, _unit(block))


def _pairs(packed: UInt8) -> UInt8:
    """2-bit codes `(n, 8, 32)` of 256 values: 4 times 32 in each of two runs of 32 bytes, the lowest bits first."""
    codes = (packed.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 8, 32)
    return codes.astype(np.uint8, copy=False)


def _q2_k(block: NDArray[Any]) -> Parts:
    return Parts(_pairs(block["codes"]), block["scales"] & 15, block["scales"] >> 4, _units(block))


def _q3_k(block: NDArray[Any]) -> Parts:
    # 16 scales of 6 bits, counted from -32: the low halves of 8 bytes, the high ones, then 2 bits of each.
    low, pairs = block["scales"][:, :8], block["scales"][:, None, 8:]
    high = (pairs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (np.concatenate([low & 15, low >> 4], axis=1) | high << 4).view(np.int8) - np.int8(32)
    # Bit i of the 32 bytes belongs to the i-th run of 32 values.
    above = block["high"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Parts(_pairs(block["codes"]) | above << 2, scales, None, _unit(block))


def _q2_0(block: NDArray[Any]) -> Parts:
    """Codes of -1 to 2, as those of Q4_0."""
    codes = block["codes"][..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    return Parts(codes + np.uint8(7), np.repeat(block["d"], 2))


_THREES = np.array([1, 3, 9, 27, 81], np.uint8)


def _counted(codes: NDArray[Any], block: NDArray[Any], groups: int) -> Parts:
    """Codes from 0 on that are counted from -1, as those of Q4_0; the scale of a block for its groups."""
    return Parts(codes.astype(np.uint8) + np.uint8(7), np.repeat(block["d"], groups))


def _tq2_0(block: NDArray[Any]) -> Parts:
    return _counted(_pairs(block["codes"]), block, 8)


def _tq1_0(block: NDArray[Any]) -> Parts:
    """A byte has 5 digits of base 3, the highest first, as 256 / 243 of their number; the last 4 bytes have 4."""
    found = []
    for run, digits, packed in ((32, 5, block["codes"][:, :32]), (16, 5, block["codes"][:, 32:48]),
                                (4, 4, block["codes"][:, 48:])):
        left = packed.reshape(-1, 1, run) * _THREES[:digits, None]  # modulo 256
        found.append((left.astype(np.uint16) * 3 >> 8).reshape(-1, digits * run))
    return _counted(np.concatenate(found, axis=1), block, 8)


def _q1_0(block: NDArray[Any]) -> Parts:
    """A bit is a sign: the scale, or minus it."""
    return _counted(np.unpackbits(block["codes"], axis=1, bitorder="little") << 1, block, 4)


def _iq4_xs(block: NDArray[Any]) -> Parts:
    low = _nibbles(block["low"], 1)
    high = (block["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    return Parts(_nibbles(block["codes"], 16), scales, None, _unit(block))


def _mxfp4(block: NDArray[Any]) -> Parts:
    return Parts(_nibbles(block["codes"], 16), block["e"])


def _nvfp4(block: NDArray[Any]) -> Parts:
    scales = block["scales"]
    return Parts(_nibbles(block["codes"], 8), np.where(scales == 127, np.uint8(0), scales))  # as ggml reads no number


# The signs of 8 values in 7 bits: the eighth makes the number of minus signs even.
_SEVEN = np.array([i | i.bit_count() % 2 << 7 for i in range(128)], np.uint8)


def _signed(grid: str, places: NDArray[Any], signs: UInt8) -> UInt8:
    """Codes of IQ2 and IQ3: the values of a grid at `places`, and the bits of `signs`, the lowest first, as 8."""
    bits = np.unpackbits(signs.reshape(len(signs), 32), axis=1, bitorder="little")
    codes: UInt8 = GRIDS[grid][places].reshape(bits.shape) | bits << np.uint8(3)
    return codes


def _odd(scales: UInt8) -> NDArray[np.int8]:
    """Scales of 4 bits, of which 2 s + 1 are meant: two in a byte, the first in its lower half."""
    return (_nibbles(scales, 1) << 1 | 1).view(np.int8)


def _iq3_s(block: NDArray[Any]) -> Parts:
    places = block["codes"] | np.unpackbits(block["high"], axis=1, bitorder="little").astype(np.uint16) << 8
    return Parts(_signed("IQ3_S", places, block["signs"]), _odd(block["scales"]), None, _unit(block))


def _words(words: NDArray[np.uint32]) -> tuple[UInt8, NDArray[np.int8]]:
    """Signs `(n, words, 4)` and scales `(n, words)` of words with four times 7 bits and a scale of 4."""
    signs = _SEVEN[words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)]
    return signs, (words >> 28 << 1 | 1).astype(np.int8)


def _iq3_xxs(block: NDArray[Any]) -> Parts:
    signs, scales = _words(block["words"])
    return Parts(_signed("IQ3_XXS", block["codes"], signs), scales, None, _unit(block, 4))


def _iq2_xxs(block: NDArray[Any]) -> Parts:
    signs, scales = _words(block["words"][..., 1])
    places = np.ascontiguousarray(block["words"][..., 0]).view(np.uint8)
    return Parts(_signed("IQ2_XXS", places, signs), np.repeat(scales, 2, axis=1), None, _unit(block, 8))


def _iq2_xs(block: NDArray[Any]) -> Parts:
    codes = _signed("IQ2_XS", block["codes"] & 511, _SEVEN[block["codes"] >> 9])
    return Parts(codes, _odd(block["scales"]), None, _unit(block, 8))


def _iq2_s(block: NDArray[Any]) -> Parts:
    high = (block["high"][..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).astype(np.uint16)
    places = block["codes"] | high.reshape(-1, 32) << 8
    return Parts(_signed("IQ2_S", places, block["signs"]), _odd(block["scales"]), None, _unit(block, 8))


# The values of IQ1 in eighths, by whether one is taken away, and the value of its grid (-1, 0 or 1): 8 times that,
# and 1 more or less. As codes of Q6_K, which are counted from -32, and of IQ3_S, whose table has odd numbers up to
# 15, then minus these.
_AS_Q6_K = np.array([[25, 33, 41], [23, 31, 39]], np.uint8)
_AS_IQ3_S = np.array([[11, 0, 4], [12, 8, 3]], np.uint8)


def _iq1_s(block: NDArray[Any]) -> Parts:
    words = block["words"]  # each of 4 times 3 bits, a scale and a sign
    high = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    signs, scales = np.repeat(words >> 15, 4, axis=1)[..., None], (words >> 12 & 7) << 1 | 1
    codes = _AS_IQ3_S[signs, GRIDS["IQ1"][block["codes"] | high << 8]]
    return Parts(codes, scales.astype(np.int8), None, _unit(block, 8))


def _iq1_m(block: NDArray[Any]) -> Parts:
    words, halves = block["words"], _nibbles(block["high"], 1).astype(np.uint16)  # words of 4 scales
    scales = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    first, second, third, fourth = (words >> 12).T  # the upper 4 bits make up the unit
    units = (first | second << 4 | third << 8 | fourth << 12).view(np.float16)
    codes = _AS_Q6_K[halves[..., None] >> 3, GRIDS["IQ1"][block["codes"] | (halves & 7) << 8]]
    return Parts(codes, (scales << 1 | 1).astype(np.int8), None, _part(units, 8))


class _Layout(NamedTuple):
    format: str  # of `Matrix`
    block: np.dtype[Any]
    unpack: Callable[[NDArray[Any]], Parts]


def _layout(format: str, unpack: Callable[[NDArray[Any]], Parts], *fields: Any) -> _Layout:
    return _Layout(format, np.dtype(list(fields)), unpack)


_D, _M, _SCALES = ("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12)
_16, _128 = ("codes", "u1", 16), ("codes", "u1", 128)
_LAYOUTS = {
    "Q8_0": _layout("q8_0", _q8_0, _D, ("codes", "i1", 32)),
    "Q4_0": _layout("q4_0", _q4_0, _D, _16),
    "Q4_1": _layout("q4_1", _q4_1, _D, _M, _16),
    "Q5_0": _layout("q5_0", _q5_0, _D, ("high", "u1", 4), _16),
    "Q5_1": _layout("q5_1", _q5_1, _D, _M, ("high", "u1", 4), _16),
    "Q4_K": _layout("q4_k", _q4_k, _D, _M, _SCALES, _128),
    "Q5_K": _layout("q5_k", _q5_k, _D, _M, _SCALES, ("high", "u1", 32), _128),
    "Q6_K": _layout("q6_k", _q6_k, _128, ("high", "u1", 64), ("scales", "i1", 16), _D),
    "Q2_K": _layout("q2_k", _q2_k, ("scales", "u1", 16), ("codes", "u1", 64), _D, _M),
    "Q3_K": _layout("q3_k", _q3_k, ("high", "u1", 32), ("codes", "u1", 64), _SCALES, _D),
    "Q2_0": _layout("q4_0", _q2_0, _D, _16),
    "TQ2_0": _layout("q4_0", _tq2_0, ("codes", "u1", 64), _D),
    "TQ1_0": _layout("q4_0", _tq1_0, ("codes", "u1", 52), _D),
    "Q1_0": _layout("q4_0", _q1_0, _D, _16),
    "IQ4_NL": _layout("iq4_nl", _q4_0, _D, _16),
    "IQ4_XS": _layout("iq4_xs", _iq4_xs, _D, ("high", "<u2"), ("low", "u1", 4), _128),
    "IQ3_S": _layout(
        "iq3_s", _iq3_s, _D, ("codes", "u1", 64), ("high", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)
    ),
    "IQ3_XXS": _layout("iq3_xxs", _iq3_xxs, _D, ("codes", "u1", 64), ("words", "<u4", 8)),
    "IQ2_XXS": _layout("iq2", _iq2_xxs, _D, ("words", "<u4", (8, 2))),
    "IQ2_XS": _layout("iq2", _iq2_xs, _D, ("codes", "<u2", 32), ("scales", "u1", 8)),
    "IQ2_S": _layout(
        "iq2", _iq2_s, _D, ("codes", "u1", 32), ("signs", "u1", 32), ("high", "u1", 8), ("scales", "u1", 8)
    ),
    "IQ1_S": _layout("iq3_s", _iq1_s, _D, ("codes", "u1", 32), ("words", "<u2", 8)),
    "IQ1_M": _layout("q6_k", _iq1_m, ("codes", "u1", 32), ("high", "u1", 16), ("words", "<u2", 4)),
    "MXFP4": _layout("mxfp4", _mxfp4, ("e", "u1"), _16),
    "NVFP4": _layout("nvfp4", _nvfp4, ("scales", "u1", 4), ("codes", "u1", 32)),
}
# The format of `Matrix` that keeps each type without loss.
FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"} | {kind: layout.format for kind, layout in _LAYOUTS.items()}
LOADABLE = tuple(FORMATS)


def values(kind: str, raw: UInt8, columns: int) -> Float32:
    """Rows of a tensor as float32 `(rows, columns)`.

    Args:
        kind: one of `LOADABLE`.
        raw: the stored rows, uint8 `(rows, row_bytes(kind, columns))`, C-contiguous.
        columns: values per row, a multiple of the block's values.

    Raises:
        ValueError: other arguments; a scale that is no finite number, where the matrix refuses it.
    """
    _check(kind, raw, columns, LOADABLE)
    if kind == "F32":
        return raw.view("<f4").astype(np.float32, copy=False)
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    out = np.empty((len(raw), columns), np.float32)
    if kind == "BF16":  # the upper half of a float32
        np.left_shift(raw.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
        return out
    for first, piece in _pieces(raw, columns):
        matrix = Matrix(len(piece), columns, FORMATS[kind])
        matrix.put_codes(0, *parts(kind, piece, columns))
        out[first : first + len(piece)] = matrix.to_float32()
    return out


def parts(kind: str, raw: UInt8, columns: int) -> Parts:
    """Rows of a tensor as they are quantised: what `Matrix.put_codes` takes in the format that `FORMATS` says.

    Arguments are those of `values`; `kind` is no float.
    """
    _check(kind, raw, columns, tuple(_LAYOUTS))
    layout, rows = _LAYOUTS[kind], len(raw)
    line, records = MATRIX_FORMATS[layout.format], -(-columns // 256)
    found = layout.unpack(raw.reshape(-1).view(layout.block))
    units = np.ones((rows, records), np.float32) if line.has_units else None  # where a type has none
    if found.units is not None:
        units = found.units.reshape(rows, records, *found.units.shape[1:])
    scales, minima = (
        None if each is None else np.ascontiguousarray(each.reshape(rows, columns // line.channels))
        for each in (found.scales, found.minima)
    )
    assert scales is not None
    return Parts(np.ascontiguousarray(found.codes.reshape(rows, columns)), scales, minima, units)


def _check(kind: str, raw: UInt8, columns: int, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise ValueError(f"kind: expected one of {', '.join(known)}, got {short(kind)}")
    block = _BY_NAME[kind]
    if columns < 1 or columns % block.values:
        raise ValueError(f"columns: expected a multiple of {block.values} for {kind}, got {columns}")
    expected = row_bytes(kind, columns)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != expected or not raw.flags.c_contiguous:
        raise ValueError(f"raw: expected contiguous uint8 (any, {expected}), got {raw.dtype} {raw.shape}")


def _pieces(raw: UInt8, columns: int) -> Iterator[tuple[int, UInt8]]:
    """Some rows at a time, and which is the first: scratch memory does not grow with the tensor."""
    count = max(1, _PIECE_VALUES // columns)
    return ((first, raw[first : first + count]) for first in range(0, len(raw), count))
