from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.kernels.kernels import Layout

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Runs = Sequence[tuple[int, int, int]] | npt.NDArray[np.int32]

def run_items(count: int, num_threads: int, work: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]: ...
def write(
    layout: Layout,
    arena: _Bytes,
    runs: _Runs,
    keys: _Floats | None,
    values: _Floats | None,
    centres: _Floats | None = None,
    factors: _Floats | None = None,
    threads: int = 1,
) -> None: ...
def read(
    layout: Layout,
    arena: _Bytes,
    runs: _Runs,
    keys: _Floats | None,
    values: _Floats | None,
    centres: _Floats | None = None,
) -> None: ...
def check(x: _Floats, format: str) -> int: ...
def copy(
    layout: Layout, arena: _Bytes, src_block: int, src_slot: int, dst_block: int, dst_slot: int, count: int
) -> None: ...
def clear(layout: Layout, arena: _Bytes, block: int, slot: int, count: int) -> None: ...
def attend(
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
    starts: Sequence[int] | None = None,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    sinks: _Floats | None = None,
    whole: bool = False,
    ahead: int = 0,
    tree: npt.NDArray[np.int64] | None = None,
    threads: int = 1,
    scratch: Callable[[int], _Bytes] | None = None,
    centres: _Floats | None = None,
    residuals: Sequence[_Runs] | None = None,
    residual_layout: Layout | None = None,
    residual_arena: _Bytes | None = None,
) -> Any: ...
