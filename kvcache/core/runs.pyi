from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Runs = npt.NDArray[np.void]

RUN: np.dtype[Any]

def runs_of(slots: Int32, block_size: int, out: Runs | None = None) -> Runs: ...
