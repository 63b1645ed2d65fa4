from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.attention_call import AttentionCall
from kvcache.core.locks import CallLock
from kvcache.core.store import BlockStore
from kvcache.paged.queried import QueriedSequences
from kvcache.paged.tables import BlockTables

class SequenceAttention:
    def __init__(self, lock: CallLock, store: BlockStore, table: BlockTables) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def over(
        self,
        layer: int,
        queries: npt.ArrayLike,
        sequences: QueriedSequences,
        call: AttentionCall,
        out: Any = None,
        sink_queries: npt.ArrayLike | None = None,
        chosen: npt.NDArray[np.int32] | None = None,
    ) -> Any: ...
    def choose(
        self, layer: int, queries: npt.ArrayLike, weights: npt.ArrayLike, sequences: QueriedSequences, most: int,
        always: bool,
    ) -> npt.NDArray[np.int32] | None: ...
