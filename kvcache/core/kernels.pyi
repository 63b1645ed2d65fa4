from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

class Format(NamedTuple):
    name: str
    bits: int
    quantised: bool
    fitted: bool
    largest: str

FORMATS: dict[str, Format]

class Layout:
    def __init__(
        self,
        block_size: int,
        num_heads: int,
        head_dim: int,
        key_format: str = "f32",
        value_format: str = "f32",
        rotate_keys: bool = False,
        rotate_values: bool = False,
    ) -> None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def key_head_bytes(self) -> int: ...
    @property
    def value_head_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

def simd_level() -> str: ...
def simd_levels() -> tuple[str, ...]: ...
def use_simd(level: str) -> AbstractContextManager[None]: ...
def get_num_threads() -> int: ...
def set_num_threads(n: int) -> None: ...

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]
_Runs = Sequence[tuple[int, int, int]] | npt.NDArray[np.int32]

def _run_items(count: int, num_threads: int, work: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]: ...
def _write(
    layout: Layout, arena: _Bytes, runs: _Runs, keys: _Floats | None, values: _Floats | None
) -> None: ...
def _read(
    layout: Layout, arena: _Bytes, runs: _Runs, keys: _Floats | None, values: _Floats | None
) -> None: ...
def _check(x: _Floats, format: str) -> int: ...
def _copy(
    layout: Layout, arena: _Bytes, src_block: int, src_slot: int, dst_block: int, dst_slot: int, count: int
) -> None: ...
def _clear(layout: Layout, arena: _Bytes, block: int, slot: int, count: int) -> None: ...
def _attend(
    layout: Layout,
    arena: _Bytes,
    sequences: Iterable[tuple[_Runs, int, int]],
    queries: _Floats,
    scale: float,
    *,
    sink_queries: _Floats | None = None,
    out: _Floats | None = None,
    scores: _Floats | None = None,
    lse: _Floats | None = None,
    hidden_tokens: int = 0,
    threads: int = 1,
    scratch: Callable[[int], _Bytes] | None = None,
) -> Any: ...
