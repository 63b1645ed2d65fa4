import numpy as np
import numpy.typing as npt

_Float32 = npt.NDArray[np.float32]

def blend(out_a: _Float32, out_b: _Float32, log_odds: _Float32) -> _Float32: ...
