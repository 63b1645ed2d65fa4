from typing import Any

import numpy as np
import numpy.typing as npt

def bfloat16_words(x: Any) -> npt.NDArray[np.uint16] | None: ...
def writeable(x: Any) -> npt.NDArray[np.float32] | None: ...
