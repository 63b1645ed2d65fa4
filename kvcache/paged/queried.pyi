from typing import TypeVar

import numpy as np
import numpy.typing as npt

Self = TypeVar("Self", bound="QueriedSequences")
Int64 = npt.NDArray[np.int64]

class QueriedSequences:
    ids: npt.NDArray[np.uint64]
    lens: Int64 | None
    shown: Int64 | None
    starts: Int64 | None
    parents: Int64 | None
    firsts: Int64 | None
    tokens: npt.NDArray[np.int32] | None
    def __init__(
        self,
        seq_ids: npt.ArrayLike,
        query_lens: npt.ArrayLike | None = None,
        context_lens: npt.ArrayLike | None = None,
        starts: npt.ArrayLike | None = None,
        mask: npt.ArrayLike | None = None,
        tokens: npt.ArrayLike | None = None,
        firsts: npt.ArrayLike | None = None,
    ) -> None: ...
    def kept(self: Self) -> Self: ...
