from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.kernels.matrix import Matrix

Float32 = npt.NDArray[np.float32]

class LowRankProduct:
    a: Matrix
    parts: tuple[tuple[Matrix, float, int], ...]
    def __init__(self, a: Matrix, parts: Iterable[tuple[Matrix, float, int]]) -> None: ...
    @property
    def nbytes(self) -> int: ...

def add_low_rank(x: Float32, out: Float32, spans: Iterable[tuple[Any, Any, LowRankProduct]]) -> None: ...
