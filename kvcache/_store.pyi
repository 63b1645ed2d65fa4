from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache._batch import BatchTable
from kvcache._sequences import Runs
from kvcache._table import SequenceTable

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

FORMATS: dict[str, int]

class BlockStore:
    num_layers: int
    num_blocks: int
    key_dtype: str
    value_dtype: str
    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        key_dtype: str = "f32",
        value_dtype: str = "f32",
        rotate: bool | str = "auto",
    ) -> None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bookkeeping(self) -> int: ...
    @property
    def rotated(self) -> tuple[bool, bool]: ...
    def represent(self, keys: Float32, values: Float32) -> None: ...
    def write(self, layer: int, runs: Runs, keys: Float32, values: Float32) -> None: ...
    def read(self, layer: int, runs: Runs) -> tuple[Float32, Float32]: ...
    def read_side(self, layer: int, runs: Runs, side: int) -> Float32: ...
    def attend(
        self,
        layer: int,
        runs: Runs,
        queries: npt.ArrayLike,
        scale: float | None = None,
        out: Float32 | None = None,
        return_scores: bool = False,
    ) -> Any: ...
    def copy_blocks(self, sources: Int32, targets: Int32) -> None: ...
    def move_slots(self, moves: Int32, source: BlockStore | None = None) -> None: ...
    def same_layout(self, other: BlockStore) -> bool: ...
    def raw(self, layer: int) -> npt.NDArray[np.uint8]: ...
    def overwrite(self, block: int) -> list[npt.NDArray[np.uint8]]: ...
    def write_sequence(
        self, table: SequenceTable, layer: int, seq_id: int, start: int, keys: Float32, values: Float32
    ) -> None: ...
    def write_batch(
        self, table: SequenceTable, layer: int, seq_ids: UInt64, keys: Float32, values: Float32
    ) -> None: ...
    def read_sequence(
        self, table: SequenceTable, layer: int, seq_id: int, start: int, stop: int
    ) -> tuple[Float32, Float32]: ...
    def attend_sequences(
        self,
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
    def carry_out(self, table: SequenceTable) -> None: ...
    def hand_out(self, table: SequenceTable, seq_id: int, count: int) -> None: ...
    def hand_out_batch(self, table: BatchTable, n: int, counts: Int64 | None = None) -> None: ...
