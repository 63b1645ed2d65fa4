from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.kernels.matrix import Matrix

def multiply_groups(
    matrices: Iterable[Matrix],
    counts: npt.ArrayLike,
    x: Any,
    out: Any,
    biases: Iterable[npt.NDArray[np.float32] | None] | None = None,
    *,
    activations: str = "int8",
) -> None: ...
