"""Rows times weights through NumPy's BLAS: the memory order of a matrix, and the choice of product.

Decoding multiplies one row at a time, and its speed is that of reading the weights. Three things decide how fast BLAS
reads them, measured with OpenBLAS 0.3.31 and matrices of 512 to 4096 channels that are in no CPU cache:

- memory order: a matrix with more outputs than inputs is read twice as fast by columns, one with fewer outputs 1.5
  times as fast by rows;
- huge pages: they make it another quarter faster. Only large allocations get them (NumPy asks for huge pages from 4 MiB
  on), so all matrices of a network share one allocation;
- the product: up to six rows are fastest one by one, since a matrix product of few rows takes 2 to 5 times as long.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["empty_matrices", "linear"]

Float32 = NDArray[np.float32]

_LINE = 16  # floats in a cache line; every matrix starts at one
_FEW_ROWS = 6  # up to this many rows are multiplied one by one
_SOME_ROWS = 64  # up to this many rows, a row-major matrix is faster as the left factor


def empty_matrices(shapes: Iterable[tuple[int, int]]) -> list[Float32]:
    """Uninitialised matrices `(out, in)` in one allocation: column-major if `out > in`, else row-major."""
    shapes = list(shapes)
    sizes = [-(-rows * columns // _LINE) * _LINE for rows, columns in shapes]
    memory = np.empty(sum(sizes) + _LINE, np.float32)
    first = -memory.ctypes.data // memory.itemsize % _LINE
    matrices = []
    for (rows, columns), size in zip(shapes, sizes, strict=True):
        flat = memory[first : first + rows * columns]
        matrices.append(flat.reshape(columns, rows).T if rows > columns else flat.reshape(rows, columns))
        first += size
    return matrices


def linear(x: Float32, weight: Float32, bias: Float32 | None = None) -> Float32:
    """`x` `(n, in)` times `weight` `(out, in)` transposed, plus `bias` `(out,)`: a new `(n, out)` array."""
    rows = len(x)
    out: Float32
    if rows == 1:
        out = np.dot(weight, x[0])[None]
    elif rows <= _FEW_ROWS:
        out = np.empty((rows, len(weight)), np.float32)
        for row in range(rows):
            np.dot(weight, x[row], out=out[row])
    elif rows <= _SOME_ROWS and weight.flags.c_contiguous:
        out = np.ascontiguousarray((weight @ x.T).T)
    else:
        out = x @ weight.T
    if bias is not None:
        out += bias
    return out
