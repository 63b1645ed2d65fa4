from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import CallLock
from kvcache.core.runs import Runs
from kvcache.core.store import BlockStore
from kvcache.paged.table import SequenceTable

Float32 = npt.NDArray[np.float32]

class Attention:
    def __init__(self, store: BlockStore) -> None: ...
    def over_runs(
        self,
        layer: int,
        runs: Runs,
        queries: npt.ArrayLike,
        scale: float | None = None,
        out: Float32 | None = None,
        return_scores: bool = False,
    ) -> Any: ...
    def over_sequences(
        self,
        lock: CallLock,
        table: SequenceTable,
        layer: int,
        queries: npt.ArrayLike,
        seq_ids: npt.ArrayLike,
        query_lens: npt.ArrayLike | None,
        scale: float | None,
        sink_queries: npt.ArrayLike | None,
        out: Float32 | None,
        return_scores: bool,
        context_lens: npt.ArrayLike | None = None,
        return_lse: bool = False,
    ) -> Any: ...
