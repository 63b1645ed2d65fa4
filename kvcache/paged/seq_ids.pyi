from typing import Any

import numpy as np
from numpy.typing import NDArray

def as_seq_ids(ids: Any, name: str = "seq_ids") -> NDArray[np.uint64]: ...
def as_seq_id(seq_id: Any, name: str = "seq_id") -> int: ...
