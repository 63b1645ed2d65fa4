import numpy as np
import numpy.typing as npt

def zeros(size: int) -> npt.NDArray[np.uint8]: ...
