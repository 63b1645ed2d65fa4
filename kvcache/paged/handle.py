"""The handle of a sequence in a `PagedKvCache`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcache.errors import InvalidOperationError
from kvcache.handle import BlockTable, CacheHandleStats, Device, KvCacheHandle, LiveBlockTable
from kvcache.paged.reports import SequenceInfo
from kvcache.support.arguments import as_integer
from kvcache.support.copies import refuse_copies

if TYPE_CHECKING:
    from kvcache.paged.cache import PagedKvCache
    from kvcache.paged.sequences import PagedSequences
    from kvcache.paged.tables import BlockTables

__all__ = ["PagedKvCacheHandle"]

Float32 = npt.NDArray[np.float32]


class PagedKvCacheHandle(KvCacheHandle):
    """A handle on one sequence of a `PagedKvCache`; made by `PagedKvCache.handle`.

    Every access of a sequence that was freed or evicted raises `InvalidOperationError`.
    """

    def __init__(
        self, cache: PagedKvCache, sequences: PagedSequences, table: BlockTables, seq_id: int, uid: int
    ) -> None:
        self._cache, self._sequences, self._table = cache, sequences, table
        self._seq_id, self._uid = seq_id, uid

    def _sequence(self) -> SequenceInfo:
        info = self._cache.get_sequence(self._seq_id) if self.is_valid else None
        if info is None or not self.is_valid:  # another one may have got the id in between
            raise InvalidOperationError(f"sequence {self._seq_id} of this handle was freed or evicted")
        return info

    @property
    def block_table(self) -> BlockTable:
        info = self._sequence()
        table = BlockTable(self._cache.block_size)
        table.add_blocks(info.block_ids)
        table.sequence_length = info.num_tokens
        return table

    def block_table_mut(self) -> LiveBlockTable:
        """The live table; a longer `sequence_length` is an `append`, a shorter one a `truncate`."""
        self._sequence()
        return LiveBlockTable(self._cache.block_size, lambda: self.block_table, self._resize)

    def _resize(self, num_tokens: int) -> None:
        self._sequences.resize(self._seq_id, as_integer(num_tokens, "num_tokens"), self._uid)

    def as_any(self) -> PagedKvCacheHandle:
        return self

    @property
    def device(self) -> Device:
        return Device.CPU

    @property
    def num_layers(self) -> int:
        return self._cache.num_layers

    @property
    def num_heads(self) -> int:
        return self._cache.num_heads

    @property
    def head_dim(self) -> int:
        return self._cache.head_dim

    @property
    def value_head_dim(self) -> int:
        """Channels per head of V."""
        return self._cache.value_head_dim

    def key_cache(self, layer: int) -> Float32:
        return self.kv_cache(layer)[0]

    def value_cache(self, layer: int) -> Float32:
        return self.kv_cache(layer)[1]

    def kv_cache(self, layer: int) -> tuple[Float32, Float32]:
        return self._sequences.read(as_integer(layer, "layer"), self._seq_id, 0, None, self._uid)

    def clone_handle(self) -> PagedKvCacheHandle:
        self._sequence()
        return PagedKvCacheHandle(self._cache, self._sequences, self._table, self._seq_id, self._uid)

    def stats(self) -> CacheHandleStats:
        info = self._sequence()
        slots = info.num_blocks * self._cache.block_size
        return CacheHandleStats(
            memory_bytes=info.num_blocks * self._cache.block_memory_bytes,
            blocks_allocated=info.num_blocks,
            tokens_stored=info.num_tokens,
            utilization=info.num_tokens / slots if slots else 0.0,
            last_access=info.last_access,
        )

    @property
    def is_valid(self) -> bool:
        return self._table.uid(self._seq_id) == self._uid

    @property
    def cache_id(self) -> str:
        return f"paged-{self._seq_id}-{self._uid}"

    @property
    def num_tokens(self) -> int:
        return self._sequence().num_tokens

    __reduce_ex__ = refuse_copies("`clone_handle` gives another handle")

    def __repr__(self) -> str:
        state = f"{self.num_tokens} tokens" if self.is_valid else "invalid"
        return f"PagedKvCacheHandle(seq_id={self._seq_id}, {state})"
