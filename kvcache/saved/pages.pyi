from typing import Any

import numpy as np
import numpy.typing as npt

def read_pages(
    fd: int,
    offsets: npt.NDArray[np.int64],
    pages: list[list[npt.NDArray[Any]]],
    checksums: npt.NDArray[np.uint32],
) -> npt.NDArray[np.bool_]: ...
