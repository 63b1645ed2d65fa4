import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32: ...
def swiglu(x: Float32) -> Float32: ...
