from typing import Any

import numpy.typing as npt

from kvcache.core.locks import CallLock
from kvcache.core.store import BlockStore
from kvcache.paged.tables import BlockTables

class SequenceAttention:
    def __init__(self, lock: CallLock, store: BlockStore, table: BlockTables) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def over(
        self,
        layer: int,
        queries: npt.ArrayLike,
        seq_ids: npt.ArrayLike,
        query_lens: npt.ArrayLike | None,
        scale: float | None,
        sink_queries: npt.ArrayLike | None,
        out: Any,
        return_scores: bool | str,
        context_lens: npt.ArrayLike | None,
        return_lse: bool,
        window: int | None,
        softcap: float | None,
        sinks: npt.ArrayLike | None,
        starts: npt.ArrayLike | None,
        causal: bool,
        mask: npt.ArrayLike | None,
        skip_tokens: int,
    ) -> Any: ...
