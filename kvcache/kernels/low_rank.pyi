from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.kernels.matrix import Matrix

Float32 = npt.NDArray[np.float32]

class LowRankPair:
    a: Matrix
    b: Matrix
    scale: float
    column: int
    def __init__(self, a: Matrix, b: Matrix, scale: float, column: int = 0) -> None: ...
    @property
    def nbytes(self) -> int: ...

def add_low_rank(x: Float32, out: Float32, spans: Iterable[tuple[Any, Any, Iterable[LowRankPair]]]) -> None: ...
