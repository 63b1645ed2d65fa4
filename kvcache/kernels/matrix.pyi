from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float16 = npt.NDArray[np.float16]

class MatrixFormat(NamedTuple):
    name: str
    bits: int
    packed: bool
    has_minima: bool
    zero: int
    channels: int
    scales: str
    record: int
    has_units: bool
    numbers: tuple[int, ...] | None
    quantises: bool

ACTIVATIONS: tuple[str, ...]
MATRIX_FORMATS: dict[str, MatrixFormat]

def checked_activations(activations: str) -> str: ...

class Matrix:
    format: str
    scratch_bytes: int
    def __init__(self, rows: int, columns: int, format: str, memory: npt.NDArray[np.uint8] | None = None) -> None: ...
    @staticmethod
    def num_bytes(rows: int, columns: int, format: str) -> int: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    def spans(self) -> list[tuple[int, int]]: ...
    def __len__(self) -> int: ...
    def put(self, row: int, values: Float32) -> None: ...
    def put_words(self, row: int, words: npt.NDArray[Any]) -> None: ...
    def put_codes(
        self,
        row: int,
        codes: npt.NDArray[Any],
        scales: npt.NDArray[Any],
        minima: npt.NDArray[Any] | None = None,
        units: Float32 | None = None,
    ) -> None: ...
    def codes(
        self, row: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None, Float32 | None]: ...
    def multiply_tensors(
        self, x: Any, outs: Iterable[Any], bias: Float32 | None = None, *, activations: str = "int8"
    ) -> None: ...
    def part(self, row: int, count: int) -> Matrix: ...
    def __getitem__(self, rows: npt.NDArray[Any]) -> Float32: ...
    def to_float32(self) -> Float32: ...
    def multiply(
        self,
        x: Float32,
        bias: Float32 | None = None,
        *,
        activations: str = "int8",
        out: Float32 | None = None,
        add: bool = False,
    ) -> Float32: ...
