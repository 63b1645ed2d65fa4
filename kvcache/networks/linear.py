"""The matrices of a network: one allocation for all, and several that multiply the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.fresh import zeros
from kvcache.kernels.matrix import Matrix
from kvcache.support.arguments import as_indices, as_integer, is_integer

__all__ = ["MatrixStack", "empty_matrices", "stacked"]

Float32 = NDArray[np.float32]


class MatrixStack:
    """Matrices of equal `columns` above each other, used like one `Matrix`: a checkpoint may store them differently.

    Attributes:
        parts: the matrices, from the first row on.
    """

    def __init__(self, parts: Sequence[Matrix]) -> None:
        self.parts = tuple(parts)
        self._stops = np.cumsum([len(part) for part in self.parts])

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, columns)`."""
        return int(self._stops[-1]), self.parts[0].shape[1]

    @property
    def format(self) -> str:
        """The formats of the parts, in order."""
        return "+".join(part.format for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def spans(self) -> list[tuple[int, int]]:
        """Addresses and bytes of the panels."""
        return [span for part in self.parts for span in part.spans()]

    @property
    def scratch_bytes(self) -> int:
        """The most bytes that a product of one part has taken so far."""
        return max(part.scratch_bytes for part in self.parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | NDArray[np.int64]) -> Float32:
        """As `Matrix.__getitem__`."""
        rows = as_indices([as_integer(rows, "rows")] if is_integer(rows) else rows, "rows")
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if len(wrong):
            raise IndexError(f"rows: expected 0 to {len(self) - 1}, got {wrong[0]}")
        out = np.empty((len(rows), self.shape[1]), np.float32)
        of = np.searchsorted(self._stops, rows, side="right")
        for i, part in enumerate(self.parts):
            out[of == i] = part[rows[of == i] - (self._stops[i] - len(part))]
        return out

    def to_float32(self) -> Float32:
        """All weights as a float32 array `(rows, columns)`."""
        return np.concatenate([part.to_float32() for part in self.parts])

    def multiply(
        self, x: Float32, bias: Float32 | None = None, *, activations: str = "int8", out: Float32 | None = None,
        add: bool = False,
    ) -> Float32:
        """Multiply as `Matrix.multiply` does."""
        if add and out is None:
            raise ValueError("out: expected an array to add to, got None")
        product = np.concatenate([part.multiply(x, activations=activations) for part in self.parts], axis=1)
        if out is None:
            out = product
        elif add:
            out += product
        else:
            out[...] = product
        if bias is not None:
            out += bias
        return out


def stacked(parts: Sequence[Matrix]) -> Matrix | MatrixStack:
    """One or more matrices above each other."""
    return parts[0] if len(parts) == 1 else MatrixStack(parts)


def empty_matrices(shapes: Iterable[tuple[int, int, str]]) -> list[Matrix]:
    """Matrices of zeros, `(rows, columns, format)` each, in one allocation: only large ones get huge pages.

    Raises:
        OutOfMemoryError: the system refuses the memory (in bytes).
    """
    shapes = list(shapes)
    sizes = [Matrix.num_bytes(*shape) for shape in shapes]
    memory = zeros(sum(sizes))
    stops = np.cumsum(sizes, dtype=np.int64).tolist()
    return [
        Matrix(*shape, memory=memory[stop - size : stop])
        for shape, size, stop in zip(shapes, sizes, stops, strict=True)
    ]
