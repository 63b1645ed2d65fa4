from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache._pool import BlockPool
from kvcache._records import SequenceRecords

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Runs = npt.NDArray[np.void]

RUN: np.dtype[Any]

class SequenceRows(SequenceRecords):
    num_copies: int
    def __init__(self, pool: BlockPool, block_size: int) -> None: ...
    def runs(self, seq_id: int) -> Runs: ...
    def run_positions(self, seq_id: int) -> Int64: ...
    def blocks(self, seq_id: int) -> Int32: ...
    def take_copies(self) -> tuple[Int32, Int32]: ...
    def references(self) -> Int32: ...
