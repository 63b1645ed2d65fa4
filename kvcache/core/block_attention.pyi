from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.attention_call import AttentionCall
from kvcache.core.runs import Runs
from kvcache.core.store import BlockStore

Float32 = npt.NDArray[np.float32]

class Attention:
    def __init__(self, store: BlockStore) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def over_runs(
        self,
        layer: int,
        runs: Runs,
        queries: npt.ArrayLike,
        call: AttentionCall,
        out: Float32 | None = None,
    ) -> Any: ...
