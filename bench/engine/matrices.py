"""Matrices of one format for the benches of products."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.ceilings import huge_array
from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix

__all__ = ["Products"]

Float32 = npt.NDArray[np.float32]


class Products:
    """Matrices of one format, and products of `n` rows with one after another.

    Args:
        cold_bytes: together they take so much at least, so that no cache has the next one. 0: one matrix alone.
    """

    def __init__(self, format: str, shape: tuple[int, int], cold_bytes: int) -> None:
        rng = np.random.default_rng(0)
        first = Matrix(*shape, format)
        if MATRIX_FORMATS[format].quantises:
            first.put(0, rng.standard_normal(shape, np.float32))
        else:
            first.put_codes(0, *_random_parts(rng, first))
        size = Matrix.num_bytes(*shape, format)
        memory = huge_array(size * (max(2, -(-cold_bytes // size)) if cold_bytes else 1))
        self.matrices = [
            Matrix(*shape, format, memory=memory[at : at + size]) for at in range(0, len(memory) - size + 1, size)
        ]
        rows = np.random.default_rng(1).standard_normal(shape, np.float32)
        for matrix in self.matrices:
            if MATRIX_FORMATS[format].packed:
                self._copy(first, matrix)
            else:
                matrix.put(0, rows)
        self.nbytes, self._turn = first.nbytes, 0

    @staticmethod
    def _copy(source: Matrix, target: Matrix) -> None:
        """The codes of 64 rows again and again: products take the same time whatever they are."""
        count = min(64, len(source))
        stored = zip(*(source.codes(row) for row in range(count)), strict=True)
        parts = [None if part[0] is None else np.stack(part) for part in stored]
        for row in range(0, len(target), count):
            part = slice(0, min(count, len(target) - row))
            target.put_codes(row, *(None if each is None else each[part] for each in parts))

    def run(self, x: Float32, activations: str = "int8") -> None:
        """One product with the next matrix."""
        self._turn = (self._turn + 1) % len(self.matrices)
        self.matrices[self._turn].multiply(x, activations=activations)


def _random_parts(rng: np.random.Generator, matrix: Matrix) -> list[npt.NDArray[Any] | None]:
    """Random codes for a matrix that no floats become: its scales are all the same."""
    line, rows = MATRIX_FORMATS[matrix.format], len(matrix)
    codes, *others = matrix.codes(0)
    same = [None if other is None else np.full((rows, *other.shape), 7, other.dtype) for other in others]
    if line.scales == "e8m0" and same[0] is not None:
        same[0] += 110  # 2**-11
    return [rng.integers(0, 1 << line.bits, (rows, len(codes))).astype(codes.dtype), *same]
