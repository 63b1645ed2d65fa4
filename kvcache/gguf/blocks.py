"""The tensor types of ggml: how blocks of weights are packed, unpacked with NumPy.

A quantised row is a sequence of blocks. Each block holds 32 or 256 values; every group of 32 (Q6_K and Q2_K: 16) has
a scale, and in some types a minimum:

    value = scale * (code - centre) + minimum

In IQ4_NL, IQ4_XS and MXFP4 the 4 bits of a value are its place in a table of codes. Block layouts are those of
ggml-common.h; Q4_K and Q5_K share 12 bytes of 6-bit scales and minima (`_six_bits`).
`values` equals `gguf.quants.dequantize` bit for bit where scales are finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.support.arguments import short

__all__ = [
    "CODED", "GROUP", "LOADABLE", "TYPES", "TensorType", "codes", "mxfp4_codes", "mxfp4_scales", "row_bytes", "values",
]

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]

GROUP = 32  # values per scale of `codes`
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


class _Unpacked(NamedTuple):
    """Blocks `(n,)` unpacked: codes `(n, groups, values)`; scales and minima `(n, groups)`, minima perhaps None."""

    codes: NDArray[Any]
    scales: NDArray[Any]
    minima: NDArray[Any] | None = None


def _nibbles(packed: UInt8, run: int) -> UInt8:
    """4-bit codes `(n, bytes / run, 2 * run)`: of each run of bytes first the low halves, then the high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    both = np.concatenate([runs & 15, runs >> 4], axis=2)
    return both.reshape(len(packed), -1, 2 * run)


def _fifth_bits(packed: UInt8) -> UInt8:
    """The high bit of 32 codes, as 16 `(n, 1, 32)`: one bit per code, lowest bit first."""
    bits: UInt8 = np.unpackbits(packed, axis=1, bitorder="little")
    return (bits << np.uint8(4))[:, None]


def _six_bits(packed: UInt8) -> tuple[UInt8, UInt8]:
    """Scales and minima `(n, 8)` of 6 bits from 12 bytes.

    Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 minima 0 to 3, each in its lower 6 bits; the upper 2 bits are the
    upper bits of scales and minima 4 to 7, whose lower 4 bits are the low and the high halves of bytes 8 to 11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _q8_0(block: NDArray[Any]) -> _Unpacked:
    return _Unpacked(block["codes"][:, None], block["d"][:, None])


def _q4_0(block: NDArray[Any]) -> _Unpacked:
    return _Unpacked(_nibbles(block["codes"], 16), block["d"][:, None])


def _q4_1(block: NDArray[Any]) -> _Unpacked:
    scales, minima = block["d"][:, None].astype(np.float32), block["m"][:, None].astype(np.float32)
    return _Unpacked(_nibbles(block["codes"], 16), scales, minima)


def _q5_0(block: NDArray[Any]) -> _Unpacked:
    raised = _nibbles(block["codes"], 16) | _fifth_bits(block["high"])
    return _Unpacked(raised.view(np.int8) - np.int8(16), block["d"][:, None])


def _q5_1(block: NDArray[Any]) -> _Unpacked:
    scales, minima = block["d"][:, None].astype(np.float32), block["m"][:, None].astype(np.float32)
    return _Unpacked(_nibbles(block["codes"], 16) | _fifth_bits(block["high"]), scales, minima)


def _k_scales(block: NDArray[Any]) -> tuple[Float32, Float32]:
    """Scales and minima of the groups of Q4_K and Q5_K: exact in float32, 11 bits times 6."""
    scales, minima = _six_bits(block["scales"])
    return block["d"][:, None].astype(np.float32) * scales, -(block["m"][:, None].astype(np.float32) * minima)


def _q4_k(block: NDArray[Any]) -> _Unpacked:
    return _Unpacked(_nibbles(block["codes"], 32).reshape(-1, 8, 32), *_k_scales(block))


def _q5_k(block: NDArray[Any]) -> _Unpacked:
    # Bit i of the 32 bytes is the high bit of group i.
    high = block["high"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _Unpacked(_nibbles(block["codes"], 32).reshape(-1, 8, 32) | high << 4, *_k_scales(block))


def _q6_k(block: NDArray[Any]) -> _Unpacked:
    # Two halves of 128 values: 64 bytes of low 4 bits, and 32 bytes with the upper 2 bits of 4 times 32 values.
    low = _nibbles(block["codes"], 64).reshape(-1, 2, 4, 32)
    high = block["high"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    centred = (low | high << 4).view(np.int8) - np.int8(32)
    return _Unpacked(centred.reshape(-1, 16, 16), block["d"][:, None].astype(np.float32) * block["scales"])


def _pairs(packed: UInt8) -> NDArray[Any]:
    """2-bit codes `(n, 16, 16)` of 256 values: 4 times 32 in each of two runs of 32 bytes, the lowest bits first."""
    codes = packed.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return codes.reshape(-1, 16, 16)


def _q2_k(block: NDArray[Any]) -> _Unpacked:
    scales, minima = block["scales"] & 15, block["scales"] >> 4
    d, m = (block[name][:, None].astype(np.float32) for name in ("d", "m"))
    return _Unpacked(_pairs(block["codes"]), d * scales, -(m * minima))


def _q3_k_parts(block: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """16 scales of 6 bits `(n, 16)`, -32 to 31, and codes of 3 bits `(n, 16, 16)`, -4 to 3."""
    low, high = block["scales"][:, :8], block["scales"][:, None, 8:]
    high = (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (np.concatenate([low & 15, low >> 4], axis=1) | high << 4).view(np.int8) - np.int8(32)
    # Bit i of the 32 bytes belongs to the i-th run of 32 values; where it is 0, 4 is subtracted.
    kept = block["high"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _pairs(block["codes"]).view(np.int8) - (kept.reshape(-1, 16, 16) ^ 1).view(np.int8) * np.int8(4)
    return scales, codes


def _q3_k(block: NDArray[Any]) -> _Unpacked:
    scales, codes = _q3_k_parts(block)
    return _Unpacked(codes, block["d"][:, None].astype(np.float32) * scales)


def _q3_k_codes(block: NDArray[Any]) -> _Unpacked:
    """Codes times scales, as codes of 8 bits under one scale: negated, since -128 to 124 fit and 128 does not."""
    scales, codes = _q3_k_parts(block)
    products = (-(scales[..., None].astype(np.int16) * codes)).astype(np.int8)
    return _Unpacked(products.reshape(-1, 8, 32), np.repeat(-block["d"][:, None], 8, axis=1))


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # of 4-bit floats, twice the value


def _iq4_nl(block: NDArray[Any]) -> _Unpacked:
    return _Unpacked(_IQ4[_nibbles(block["codes"], 16)], block["d"][:, None])


def _iq4_xs(block: NDArray[Any]) -> _Unpacked:
    low = np.stack([block["low"] & 15, block["low"] >> 4], axis=2).reshape(-1, 8)
    high = (block["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    return _Unpacked(_IQ4[_nibbles(block["codes"], 16)], block["d"][:, None].astype(np.float32) * scales)


def mxfp4_scales(exponents: UInt8) -> Float32:
    """Half the scales of MXFP4, `2**(exponent - 128)`: codes are twice the values. The exponent 255 is no number."""
    halves: Float32 = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    halves[exponents == 255] = np.nan
    return halves


def _mxfp4(block: NDArray[Any]) -> _Unpacked:
    return _Unpacked(_FP4[_nibbles(block["codes"], 16)], mxfp4_scales(block["e"][:, None]))


def _mxfp4_codes(block: NDArray[Any]) -> _Unpacked:
    return _Unpacked(*mxfp4_codes(_nibbles(block["codes"], 16)[:, 0], block["e"]))


_LEAST_HALF = np.float32(2.0**-24)  # the least positive number of float16


def mxfp4_codes(nibbles: UInt8, exponents: UInt8) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Codes and scales of float16 for groups of 4-bit floats.

    Without loss for scales from 2**-23 (groups whose largest weight is 7e-7 or more) to 2**16. Codes under a smaller
    scale are rounded to multiples of 2**-24. A larger one becomes infinity, which is no weight.

    Args:
        nibbles: `(..., 32)`, in the order of the values.
        exponents: `(...)`, of the groups.
    """
    found, scales = _FP4[nibbles], mxfp4_scales(exponents)
    scales[~found.any(axis=-1)] = 0  # a group of zeros may have any scale
    small = (scales < _LEAST_HALF) & (scales > 0)
    if small.any():
        found[small] = np.rint(found[small] * (scales[small] / _LEAST_HALF)[..., None])
        scales[small] = _LEAST_HALF
    with np.errstate(over="ignore"):
        return found, scales.astype(np.float16)


class _Layout(NamedTuple):
    block: np.dtype[Any]
    unpack: Callable[[NDArray[Any]], _Unpacked]
    centre: int = 0  # subtracted from unsigned codes
    codes: Callable[[NDArray[Any]], _Unpacked] | None = None  # for `codes`, if it is not `unpack`


def _layout(fields: list[Any], *rest: Any) -> _Layout:
    return _Layout(np.dtype(fields), *rest)


_D, _M, _SCALES = ("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12)
_LAYOUTS = {
    "Q8_0": _layout([_D, ("codes", "i1", 32)], _q8_0),
    "Q4_0": _layout([_D, ("codes", "u1", 16)], _q4_0, 8),
    "Q4_1": _layout([_D, _M, ("codes", "u1", 16)], _q4_1),
    "Q5_0": _layout([_D, ("high", "u1", 4), ("codes", "u1", 16)], _q5_0),
    "Q5_1": _layout([_D, _M, ("high", "u1", 4), ("codes", "u1", 16)], _q5_1),
    "Q4_K": _layout([_D, _M, _SCALES, ("codes", "u1", 128)], _q4_k),
    "Q5_K": _layout([_D, _M, _SCALES, ("high", "u1", 32), ("codes", "u1", 128)], _q5_k),
    "Q6_K": _layout([("codes", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _D], _q6_k),
    "Q2_K": _layout([("scales", "u1", 16), ("codes", "u1", 64), _D, _M], _q2_k),
    "Q3_K": _layout([("high", "u1", 32), ("codes", "u1", 64), _SCALES, _D], _q3_k, 0, _q3_k_codes),
    "IQ4_NL": _layout([_D, ("codes", "u1", 16)], _iq4_nl),
    "IQ4_XS": _layout([_D, ("high", "<u2"), ("low", "u1", 4), ("codes", "u1", 128)], _iq4_xs),
    "MXFP4": _layout([("e", "u1"), ("codes", "u1", 16)], _mxfp4, 0, _mxfp4_codes),
}
LOADABLE = ("F32", "F16", "BF16", *_LAYOUTS)  # the types of `values`
_SIGNED = ("Q8_0", "Q5_0", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4")  # codes are int8
_PAIRED = ("Q4_1", "Q4_K")  # groups have minima
CODED = (*_SIGNED, "Q4_0", *_PAIRED)  # the types of `codes`


def values(kind: str, raw: UInt8, columns: int) -> Float32:
    """Rows of a tensor as float32 `(rows, columns)`.

    Args:
        kind: one of `LOADABLE`.
        raw: the stored rows, uint8 `(rows, row_bytes(kind, columns))`, C-contiguous.
        columns: values per row, a multiple of the block's values.
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
    layout = _LAYOUTS[kind]
    for piece, rows in _pieces(raw, out):
        with np.errstate(invalid="ignore", over="ignore"):  # scales of a damaged file
            found = layout.unpack(piece.reshape(-1).view(layout.block))
            groups = rows.reshape(found.codes.shape)
            np.subtract(found.codes, layout.centre, out=groups, dtype=np.float32, casting="unsafe")
            groups *= found.scales[..., None].astype(np.float32, copy=False)
            if found.minima is not None:
                groups += found.minima[..., None]
    return out


def codes(kind: str, raw: UInt8, columns: int) -> tuple[NDArray[Any], NDArray[Any], Float32 | None]:
    """Rows of a tensor as they are quantised: `(codes, scales, minima)`, in groups of 32 along the row.

    | kind | codes `(rows, columns)` | scales, minima `(rows, columns / 32)` | value |
    |---|---|---|---|
    | Q8_0 | int8 | float16, None | scale * code |
    | Q5_0 | int8, -16 to 15 | float16, None | scale * code |
    | Q3_K | int8, -128 to 124 | float16, None; the same for 8 groups | scale * code |
    | IQ4_NL | int8, of a table | float16, None | scale * code |
    | IQ4_XS | int8, of a table | float32, None | scale * code |
    | MXFP4 | int8, twice a 4-bit float | float16, None; see `mxfp4_codes` | scale * code |
    | Q4_0 | uint8, 0 to 15 | float16, None | scale * (code - 8) |
    | Q4_1, Q4_K | uint8, 0 to 15 | float32, float32 | scale * code + minimum |

    The formulas in float32 give the result of `values`, bit for bit but for the signs of zeros in Q3_K and the
    smallest scales of MXFP4. Arguments are those of `values`; `kind` is one of `CODED`.
    """
    _check(kind, raw, columns, CODED)
    layout, rows = _LAYOUTS[kind], len(raw)
    paired = kind in _PAIRED
    out = np.empty((rows, columns), np.int8 if kind in _SIGNED else np.uint8)
    scales = np.empty((rows, columns // GROUP), np.float32 if paired or kind == "IQ4_XS" else np.float16)
    minima = np.empty(scales.shape, np.float32) if paired else None
    first = 0
    for piece, filled in _pieces(raw, out):
        with np.errstate(invalid="ignore"):  # scales of a damaged file
            found = (layout.codes or layout.unpack)(piece.reshape(-1).view(layout.block))
        band = slice(first, first + len(piece))
        filled.reshape(found.codes.shape)[...] = found.codes
        scales[band] = found.scales.reshape(len(piece), -1)
        if minima is not None and found.minima is not None:
            minima[band] = found.minima.reshape(len(piece), -1)
        first += len(piece)
    return out, scales, minima


def _check(kind: str, raw: UInt8, columns: int, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise ValueError(f"kind: expected one of {', '.join(known)}, got {short(kind)}")
    block = _BY_NAME[kind]
    if columns < 1 or columns % block.values:
        raise ValueError(f"columns: expected a multiple of {block.values} for {kind}, got {columns}")
    expected = row_bytes(kind, columns)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != expected or not raw.flags.c_contiguous:
        raise ValueError(f"raw: expected contiguous uint8 (any, {expected}), got {raw.dtype} {raw.shape}")


def _pieces(raw: UInt8, out: NDArray[Any]) -> Any:
    """Pairs of some rows of both: scratch memory does not grow with the tensor."""
    count = max(1, _PIECE_VALUES // out.shape[1])
    for first in range(0, len(raw), count):
        yield raw[first : first + count], out[first : first + count]
