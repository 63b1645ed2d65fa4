from typing import Any

import numpy as np
from numpy.typing import NDArray

def as_tokens(tokens: Any) -> NDArray[np.uint32]: ...
