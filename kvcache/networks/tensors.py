"""The tensors of a checkpoint of any kind, as loaders see them: names, and rows as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix

__all__ = ["StoredRows", "Tensors", "require", "some_tensors"]

Float32 = NDArray[np.float32]

_FEW = 4  # maximum number of names in a message


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows of a tensor in one of the formats of `Matrix`.

    Attributes:
        format: "f32", "f16" or "bf16": `values` are float32, or 16-bit words. Packed: `values` are codes.
        values: `(n, columns)`.
        scales, minima, units: of a packed format, as `Matrix.put_codes` takes them, but for the dtype of scales in
            float16, which may be float32.
    """

    format: str
    values: NDArray[Any]
    scales: NDArray[Any] | None = None
    minima: NDArray[Any] | None = None
    units: Float32 | None = None

    def taken(self, rows: NDArray[np.int64]) -> StoredRows:
        """Some of the rows, in this order."""
        scales, minima = (None if part is None else part[rows] for part in (self.scales, self.minima))
        return StoredRows(self.format, self.values[rows], scales, minima)

    def put_into(self, matrix: Matrix, row: int) -> None:
        """Set rows of `matrix` from `row` on: bit for bit if it has the same format, else by way of float32.

        Raises:
            ValueError: a number is not finite, or larger than f16 holds, where the format cannot keep it.
        """
        if matrix.format != self.format:
            matrix.put(row, self.to_float32())
        elif self.scales is None:
            matrix.put_words(row, self.values)
        elif MATRIX_FORMATS[self.format].scales == "halves":
            minima = None if self.minima is None else _halves(self.minima, "minima")
            matrix.put_codes(row, self.values, _halves(self.scales, "scales"), minima)
        else:
            matrix.put_codes(row, self.values, self.scales, self.minima, self.units)

    def rows(self, chosen: slice) -> StoredRows:
        """Some of the rows."""

        def of(part: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if part is None else np.ascontiguousarray(part[chosen])

        values = np.ascontiguousarray(self.values[chosen])
        return StoredRows(self.format, values, of(self.scales), of(self.minima), of(self.units))

    def to_float32(self) -> Float32:
        """The values, float32 `(n, columns)`."""
        if self.format == "bf16":  # the upper half of a float32
            found: Float32 = np.left_shift(self.values, 16, dtype=np.uint32).view(np.float32)
            return found
        if self.format == "f16":
            return self.values.view(np.float16).astype(np.float32)
        if self.scales is None:
            return np.asarray(self.values, np.float32)
        columns, line = self.values.shape[1], MATRIX_FORMATS[self.format]
        if (line.scales != "halves" or line.numbers) and len(self.values):
            matrix = Matrix(len(self.values), columns, self.format)
            self.put_into(matrix, 0)
            return matrix.to_float32()
        codes = self.values.astype(np.float32) - np.float32(0 if line.bits == 8 else line.zero)
        out: Float32 = codes * np.repeat(self.scales.astype(np.float32), 32, axis=1)[:, :columns]
        if self.minima is not None:
            out += np.repeat(self.minima.astype(np.float32), 32, axis=1)[:, :columns]
        return out


def _halves(values: NDArray[Any], name: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16, copy=False)
    if not np.isfinite(halves).all():
        raise ValueError(f"{name}: expected finite numbers up to 65504, got {values[~np.isfinite(halves)][0]}")
    return halves


class Tensors(Protocol):
    """The tensors of an open checkpoint by their Hugging Face names."""

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""

    def require(self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = ...) -> None:
        """Raise CheckpointError unless the checkpoint has exactly these tensors, with these shapes and a known dtype.

        Args:
            expected: names and shapes. The check stops after a few missing ones: a hostile configuration may ask
                for billions.
            optional: whether a tensor of this name may be present too. Any other tensor is an error: it is a weight
                that the network would ignore, such as a bias that the configuration does not mention.
        """

    def read(self, name: str) -> Float32:
        """A vector as a new float32 array."""

    def format(self, name: str) -> str:
        """The format of `Matrix` that keeps a tensor with the least loss: none, if the file's own is among them."""

    def rows(self, name: str, first: int, stop: int) -> StoredRows:
        """Rows of a matrix as they are stored."""


def require(
    found: Mapping[str, Any],
    path: Path,
    dtypes: tuple[str, ...],
    expected: Iterable[tuple[str, tuple[int, ...]]],
    optional: Callable[[str], bool],
) -> None:
    """Check as `Tensors.require` does, for the tensors `found` (names to their `shape` and `dtype`) in `path`."""
    left = set(found)
    missing: list[str] = []
    for name, shape in expected:
        if name not in left:
            missing.append(name)
            if len(missing) > _FEW:
                break
            continue
        left.remove(name)
        info = found[name]
        if info.shape != shape:
            raise CheckpointError(f"{path}: {name}: expected shape {shape}, got {info.shape}")
        if info.dtype not in dtypes:
            listed = f"{', '.join(dtypes[:-1])} or {dtypes[-1]}"
            raise CheckpointError(f"{path}: {name}: expected {listed}, got {info.dtype}")
    if missing:
        raise CheckpointError(f"{path}: expected {some_tensors(missing)}, got none")
    unexpected = sorted(name for name in left if not optional(name))
    if unexpected:
        raise CheckpointError(f"{path}: expected no others, got {some_tensors(unexpected)}")


def some_tensors(names: list[str]) -> str:
    """The first few names, for a message."""
    listed = ", ".join(f"{name:.100}" for name in names[:_FEW])
    return f"the tensors {listed}{' and more' if len(names) > _FEW else ''}"
