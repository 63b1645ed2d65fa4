"""How quantised matrices are packed in the tensors of a folder, and rows of them as `Matrix` takes them.

A class or function for each way. Each checks shapes and dtypes when it is called, and reads later, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.quantisation import Quantisation
from kvcache.networks.tensors import StoredRows

__all__ = [
    "Blocks", "Floats", "MatrixTensors", "PackedMatrix", "SmallFloats", "awq_of", "bytes_of", "gptq_of", "packed_of",
]

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]

_GROUP = 32  # channels per scale in a matrix
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # of the nibbles of a word, by column


class PackedMatrix(Protocol):
    """A quantised matrix, or several of one shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str: ...
    def rows(self, first: int, stop: int) -> StoredRows: ...


class MatrixTensors:
    """Checked reads of the tensors of one matrix; errors name folder and tensor."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self.name = checkpoint, name
        self.shape = checkpoint.info(name).shape

    def fail(self, name: str, expected: str, found: Any) -> NoReturn:
        raise CheckpointError(f"{self._checkpoint.directory}: {name}: expected {expected}, got {found}")

    def main(self, dtype: str, rank: int) -> None:
        """Raise CheckpointError unless the main tensor has this dtype and rank."""
        dtype_found, shape = self._checkpoint.info(self.name)[:2]
        if dtype_found != dtype or len(shape) != rank or 0 in shape:
            self.fail(self.name, f"{dtype} of {rank} axes", f"{dtype_found} {shape}")

    def has(self, name: str) -> bool:
        return name in self._checkpoint

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of another tensor; raises CheckpointError without it."""
        if name not in self._checkpoint:
            self.fail(name, f"a tensor beside {self.name}", "none")
        return self._checkpoint.info(name).shape

    def rows(self, first: int, stop: int, name: str | None = None) -> NDArray[Any]:
        """Rows of the main tensor, or of another one that is checked already."""
        return self._checkpoint.stored(name or self.name, first, stop)

    def dtype_of(self, name: str) -> str:
        """The dtype of another tensor; raises CheckpointError without it."""
        self.shape_of(name)
        return self._checkpoint.info(name).dtype

    def words(self, name: str, shape: tuple[int, ...], *dtypes: str) -> Callable[[], NDArray[Any]]:
        """Check another tensor of whole numbers, by default of I32. The result reads it."""
        self._check(name, dtypes or ("I32",), (shape,))
        return lambda: self._checkpoint.stored(name, 0, math.prod(shape[:-1])).reshape(shape)

    def floats(self, name: str, *shapes: tuple[int, ...]) -> Callable[[], Float32]:
        """Check another tensor of floats, which has one of these shapes. The result reads it."""
        self._check(name, self._checkpoint.dtypes, shapes)
        return lambda: self._checkpoint.read(name)

    def _check(self, name: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
        shape, dtype = self.shape_of(name), self.dtype_of(name)
        if dtype not in dtypes or shape not in shapes:
            expected = f"{' or '.join(dtypes)} {' or '.join(map(str, dict.fromkeys(shapes)))}"
            self.fail(name, expected, f"{dtype} {shape}")


class Blocks:
    """Groups of 32 4-bit floats: a byte holds two neighbours, the first in its lower half."""

    format = "mxfp4"

    def __init__(self, tensors: MatrixTensors) -> None:
        tensors.main("U8", 4)
        *outer, groups, size = tensors.shape
        if size != _GROUP // 2:
            tensors.fail(tensors.name, f"blocks of {_GROUP // 2} bytes", tensors.shape)
        self._tensors, self._groups, self._scales = tensors, groups, f"{tensors.name.removesuffix('blocks')}scales"
        tensors.words(self._scales, (*outer, groups), "U8")
        self.shape = (*outer, groups * _GROUP)

    def rows(self, first: int, stop: int) -> StoredRows:
        packed = self._tensors.rows(first * self._groups, stop * self._groups)
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(stop - first, -1)
        return StoredRows(self.format, nibbles, self._tensors.rows(first, stop, self._scales))


class SmallFloats:
    """4-bit floats, two neighbours in a byte, the first in its lower half; scales of 8-bit floats, U8 of 32 channels
    (mxfp4) or F8_E4M3 of 16 (nvfp4). The latter have a factor for all of the matrix: `weight_scale_2`, or
    `weight_global_scale`, which divides.
    """

    def __init__(self, tensors: MatrixTensors, stem: str) -> None:
        tensors.main("U8", 2)
        self._tensors, (rows, size) = tensors, tensors.shape
        self.shape, self._scales = (rows, 2 * size), f"{stem}.weight_scale"
        self.format = "mxfp4" if tensors.dtype_of(self._scales) in ("U8", "F8_E8M0") else "nvfp4"
        channels = 32 if self.format == "mxfp4" else 16
        if 2 * size % channels:
            tensors.fail(tensors.name, f"a multiple of {channels} channels", 2 * size)
        dtypes = ("U8", "F8_E8M0") if self.format == "mxfp4" else ("F8_E4M3",)
        tensors.words(self._scales, (rows, 2 * size // channels), *dtypes)
        self._factor, self._divides = None, tensors.has(f"{stem}.weight_global_scale")
        if self.format == "nvfp4":
            name = f"{stem}.{'weight_global_scale' if self._divides else 'weight_scale_2'}"
            self._factor = tensors.floats(name, (), (1,))

    def rows(self, first: int, stop: int) -> StoredRows:
        packed, units = self._tensors.rows(first, stop), None
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(stop - first, -1)
        if self._factor is not None:
            with np.errstate(divide="ignore"):  # the matrix refuses what is not finite
                factor = np.float32(1) / self._factor() if self._divides else self._factor()
            units = np.full((stop - first, -(-self.shape[1] // 256)), factor, np.float32)
        scales = self._tensors.rows(first, stop, self._scales).view(np.uint8)
        return StoredRows(self.format, nibbles, scales, units=units)


def _e4m3() -> Float32:
    """The value of each byte of F8_E4M3: a sign, 4 bits of exponent, 3 of mantissa; 127 and 255 are no numbers."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    sizes: NDArray[np.float64] = np.ldexp(np.where(exponent, 8.0 + mantissa, mantissa), np.maximum(exponent, 1) - 10)
    sizes[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -sizes, sizes).astype(np.float32)


_E4M3 = _e4m3()


class Floats:
    """8-bit floats with a scale of the whole matrix, of each row, or of each block."""

    format = "f16"

    def __init__(self, tensors: MatrixTensors, stem: str, block: tuple[int, int]) -> None:
        tensors.main("F8_E4M3", 2)
        self._tensors, self._block, (rows, columns) = tensors, block, tensors.shape
        name = f"{stem}.weight_scale_inv" if tensors.has(f"{stem}.weight_scale_inv") else f"{stem}.weight_scale"
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        self._scales = tensors.floats(name, (), (1,), (1, 1), (rows, 1), blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensors.shape

    def rows(self, first: int, stop: int) -> StoredRows:
        scales, (rows, columns) = self._scales(), self.shape
        scales = scales.reshape(1, 1) if scales.size == 1 else scales
        height, width = self._block
        if scales.shape in ((1, 1), (rows, 1)):
            height, width = rows // len(scales), columns
        chosen = np.repeat(scales[np.arange(first, stop) // height], width, axis=1)[:, :columns]
        return StoredRows("f32", _E4M3[self._tensors.rows(first, stop)] * chosen)


class _Grouped:
    """Whole numbers `(out, in)` of 4 or 8 bits: `scale * (code - zero)`, one of each for a group along a row.

    Args:
        tensors: of the matrix.
        shape: `(out, in)`.
        bits: 4 or 8.
        groups: of a row.
        codes: `codes(first, stop)` reads those of some rows, uint8 `(stop - first, in)`.
        scales, zeros: read `(out, groups)`, float32 and uint8; zeros may be None: half of the range.
    """

    def __init__(
        self, tensors: MatrixTensors, shape: tuple[int, int], bits: int, groups: int,
        codes: Callable[[int, int], UInt8], scales: Callable[[], Float32], zeros: Callable[[], UInt8] | None = None,
    ) -> None:
        if groups > 1 and shape[1] % (groups * _GROUP):
            tensors.fail(tensors.name, f"groups of a multiple of {_GROUP} channels", f"{groups} groups of {shape[1]}")
        if zeros is not None and bits == 8:
            tensors.fail(tensors.name, "8 bits without zeros", "zeros beside it")
        self.shape, self.format = shape, "q8_0" if bits == 8 else "q4_0" if zeros is None else "q4_1"
        self._repeat = shape[1] // groups // _GROUP if groups > 1 else -(-shape[1] // _GROUP)
        self._codes, self._scales, self._zeros = codes, scales, zeros
        self._held: tuple[Float32, Float32 | None] | None = None  # scales and minima, from the first row to the last

    def rows(self, first: int, stop: int) -> StoredRows:
        if self._held is None:
            read = self._scales()
            self._held = read, None if self._zeros is None else -(read * self._zeros())
        scales, minima = self._held
        if stop >= self.shape[0]:
            self._held = None
        codes = self._codes(first, stop)
        wide = np.repeat(scales[first:stop], self._repeat, axis=1)
        if self.format == "q8_0":
            return StoredRows(self.format, (codes ^ np.uint8(128)).view(np.int8), wide)
        wide_minima = None if minima is None else np.repeat(minima[first:stop], self._repeat, axis=1)
        return StoredRows(self.format, codes, wide, wide_minima)


def _if_all(
    tensors: MatrixTensors, name: str, zero: int, zeros: Callable[[], NDArray[Any]], scales: Callable[[], Float32],
    more: int = 0,
) -> Callable[[], Float32]:
    """`scales`, but CheckpointError unless all `zeros` of the tensor `name` are `zero`, or all are `zero + more`."""

    def checked() -> Float32:
        found = zeros()
        if not any((found == each).all() for each in (zero, zero + more)):
            tensors.fail(name, f"zeros of {zero}, those of symmetric numbers", "others")
        return scales()

    return checked


def _unpacked(words: NDArray[np.int32], bits: int, axis: int) -> UInt8:
    """The codes in 32-bit words, the lowest bits first, as more elements of an axis."""
    moved = np.moveaxis(words.view(np.uint32), axis, -1)
    codes = np.empty((*moved.shape, 32 // bits), np.uint8)
    for i in range(32 // bits):
        codes[..., i] = moved >> np.uint32(i * bits) & np.uint32((1 << bits) - 1)
    return np.moveaxis(codes.reshape(*moved.shape[:-1], -1), -1, axis)


def _row_scales(tensors: MatrixTensors, name: str, rows: int) -> tuple[Callable[[], Float32], int]:
    """Scales of a matrix, of its rows or of groups along them: `(a function that reads (rows, groups), groups)`."""
    shape = tensors.shape_of(name)
    whole = shape in ((), (1,), (1, 1))
    groups = shape[1] if len(shape) == 2 and not whole else 1
    read = tensors.floats(name, shape if whole else (rows, max(groups, 1)))
    return (lambda: np.broadcast_to(read().reshape(1, 1), (rows, 1))) if whole else read, groups


def bytes_of(tensors: MatrixTensors, stem: str) -> _Grouped:
    """8-bit integers as they are; zeros, if there are any, have to be 0."""
    tensors.main("I8", 2)
    rows, columns = tensors.shape
    scales, groups = _row_scales(tensors, f"{stem}.weight_scale", rows)
    name = f"{stem}.weight_zero_point"
    if tensors.has(name):
        scales = _if_all(tensors, name, 0, tensors.words(name, tensors.shape_of(f"{stem}.weight_scale"), "I8"), scales)

    def codes(first: int, stop: int) -> UInt8:
        found: UInt8 = tensors.rows(first, stop).view(np.uint8) ^ np.uint8(128)
        return found

    return _Grouped(tensors, (rows, columns), 8, groups, codes, scales)


def packed_of(tensors: MatrixTensors, stem: str) -> _Grouped:
    """Words along each row, with codes that are half of the range larger than the numbers, as are the zeros."""
    tensors.main("I32", 2)
    rows, words = tensors.shape
    shape = tuple(int(size) for size in tensors.words(f"{stem}.weight_shape", (2,), "I64")())
    bits = words * 32 // max(shape[1], 1)
    if shape[0] != rows or shape[1] * bits != words * 32 or bits not in (4, 8):
        tensors.fail(f"{stem}.weight_shape", f"the shape of {rows} rows of {words} words of 4 or 8 bits", shape)
    read, groups = _row_scales(tensors, f"{stem}.weight_scale", rows)
    scales, zeros = _in_order(tensors, f"{stem}.weight_g_idx", shape[1], groups, read), None
    if tensors.has(f"{stem}.weight_zero_point"):
        stored = tensors.words(f"{stem}.weight_zero_point", (-(-rows * bits // 32), groups))
        zeros = lambda: _unpacked(stored(), bits, 0)[:rows]  # noqa: E731

    def codes(first: int, stop: int) -> UInt8:
        return _unpacked(tensors.rows(first, stop), bits, 1)

    return _Grouped(tensors, (rows, shape[1]), bits, groups, codes, scales, zeros)


def _in_order(
    tensors: MatrixTensors, name: str, columns: int, groups: int, scales: Callable[[], Float32]
) -> Callable[[], Float32]:
    """`scales`, but CheckpointError unless the channels are in the order of their groups, as `name` says."""
    if not tensors.has(name):
        return scales
    stored = tensors.words(name, (columns,))

    def checked() -> Float32:
        if columns % groups or not np.array_equal(stored(), np.arange(columns) // (columns // groups)):
            tensors.fail(name, "channels in the order of their groups", "another order (desc_act)")
        return scales()

    return checked


class _Columns:
    """The codes of a matrix that is stored `(in, out)`, whole: rows are columns of the file.

    They are read at the first row of a matrix and forgotten after its last.
    """

    def __init__(self, read: Callable[[], UInt8], rows: int) -> None:
        self._read, self._rows = read, rows
        self._codes: UInt8 | None = None

    def __call__(self, first: int, stop: int) -> UInt8:
        codes = np.ascontiguousarray(self._read().T) if self._codes is None else self._codes
        self._codes = codes if stop < self._rows else None
        return codes[first:stop]


def gptq_of(tensors: MatrixTensors, stem: str, quantisation: Quantisation) -> _Grouped:
    """Words along the input channels; the zeros are along the outputs, less 1 in the older version."""
    tensors.main("I32", 2)
    bits, (words, rows) = quantisation.bits, tensors.shape
    columns, name = words * 32 // bits, f"{stem}.qzeros"
    groups = _groups(tensors, quantisation, columns)
    read = tensors.floats(f"{stem}.scales", (groups, rows))
    packed = tensors.words(name, (groups, rows * bits // 32))
    less, mask = np.uint8(quantisation.zeros_less_one), np.uint8((1 << bits) - 1)
    codes = _Columns(lambda: _unpacked(tensors.rows(0, words), bits, 0), rows)
    scales = _in_order(tensors, f"{stem}.g_idx", columns, groups, lambda: read().T)

    def zeros() -> UInt8:
        found: UInt8 = (_unpacked(packed(), bits, 1) + less & mask).T
        return found

    if not quantisation.symmetric:
        return _Grouped(tensors, (rows, columns), bits, groups, codes, scales, zeros)
    # Folders of the older version may store the zeros of symmetric numbers as the newer one does.
    scales = _if_all(tensors, name, 1 << bits - 1, zeros, scales, quantisation.zeros_less_one)
    return _Grouped(tensors, (rows, columns), bits, groups, codes, scales)


def awq_of(tensors: MatrixTensors, stem: str, quantisation: Quantisation) -> _Grouped:
    """Words along the outputs, whose nibbles are in an order of their own."""
    tensors.main("I32", 2)
    columns, words = tensors.shape
    rows, groups = words * 8, _groups(tensors, quantisation, columns)
    scales = tensors.floats(f"{stem}.scales", (groups, rows))
    zeros = tensors.words(f"{stem}.qzeros", (groups, words))
    codes = _Columns(lambda: _awq_codes(tensors.rows(0, columns)), rows)
    return _Grouped(
        tensors, (rows, columns), 4, groups, codes, lambda: scales().T, lambda: _awq_codes(zeros()).T
    )


def _awq_codes(words: NDArray[np.int32]) -> UInt8:
    codes = _unpacked(words, 4, 1)
    return codes.reshape(len(codes), -1, 8)[..., _AWQ_ORDER].reshape(codes.shape)


def _groups(tensors: MatrixTensors, quantisation: Quantisation, columns: int) -> int:
    size = quantisation.group_size if quantisation.group_size > 0 else columns
    if columns % size:
        tensors.fail(tensors.name, f"a multiple of {size} channels, the group size", columns)
    return columns // size
