"""`KvCacheHandle`: a view of one request's KV, the same interface for `PagedKvCache` and `KvCache`.

`PagedKvCache.handle` returns a handle on one sequence: a reference, never a copy, which shows the current tokens. It
becomes invalid when the sequence is freed, and stays invalid if another sequence gets the id or the blocks. A `KvCache`
is a handle itself, and always valid.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import InvalidOperationError
from kvcache.support.arguments import as_count, as_integer
from kvcache.support.copies import refuse_copies

__all__ = ["BlockTable", "CacheHandleStats", "Device", "KvCacheHandle", "LiveBlockTable"]

Float32 = npt.NDArray[np.float32]


class Device(enum.Enum):
    """The device of a cache."""

    CPU = "cpu"

    @property
    def is_gpu(self) -> bool:
        """False: the library runs on CPUs only."""
        return False

    def __str__(self) -> str:
        return self.value


@dataclass
class BlockTable:
    """The blocks of a sequence: their ids, and logical indices into them.

    Attributes:
        block_size: tokens per block.
        physical_blocks: block ids in text order.
        logical_to_physical: for each logical block, its index in `physical_blocks`.
        sequence_length: tokens stored.
    """

    block_size: int
    physical_blocks: list[int] = field(default_factory=list)
    logical_to_physical: list[int] = field(default_factory=list)
    sequence_length: int = 0

    def __post_init__(self) -> None:
        as_count(self.block_size, "block_size", 1)

    @staticmethod
    def blocks_needed_for_length(length: int, block_size: int) -> int:
        """ceil(length / block_size).

        Raises:
            ValueError: a negative length, or a block size below 1.
        """
        return -(-as_count(length, "length") // as_count(block_size, "block_size", 1))

    @property
    def num_blocks(self) -> int:
        """Blocks in the table."""
        return len(self.physical_blocks)

    @property
    def has_free_space(self) -> bool:
        """Whether one more token fits into the blocks."""
        return self.free_tokens > 0

    @property
    def free_tokens(self) -> int:
        """Tokens that still fit; 0 if the length exceeds the blocks."""
        return max(0, self.num_blocks * self.block_size - self.sequence_length)

    def add_blocks(self, ids: Iterable[int]) -> None:
        """Append block ids and their logical indices."""
        for block in [as_integer(each, "ids") for each in ids]:
            self.logical_to_physical.append(len(self.physical_blocks))
            self.physical_blocks.append(block)

    def extend_sequence(self, num_tokens: int) -> None:
        """Increase the length by `num_tokens`.

        Raises:
            ValueError: a negative count.
            InvalidOperationError: the table has too few blocks; the length is unchanged.
        """
        num_tokens = as_count(num_tokens, "num_tokens")
        need = self.blocks_needed_for_length(self.sequence_length + num_tokens, self.block_size)
        if need > self.num_blocks:
            raise InvalidOperationError(f"expected {need} blocks for the longer sequence, got {self.num_blocks}")
        self.sequence_length += num_tokens


class LiveBlockTable(BlockTable):
    """The live table of a sequence. Its length can be set; its blocks are chosen by the cache.

    Args:
        block_size: tokens per block.
        read: returns a snapshot of the current table.
        resize: sets the length of the sequence, or raises and changes nothing.
    """

    def __init__(self, block_size: int, read: Callable[[], BlockTable], resize: Callable[[int], None]) -> None:
        self.block_size = block_size
        self._read = read
        self._resize = resize

    __reduce_ex__ = refuse_copies("`block_table` is a copy of it")

    @property
    def physical_blocks(self) -> list[int]:  # type: ignore[override]
        return self._read().physical_blocks

    @property
    def logical_to_physical(self) -> list[int]:  # type: ignore[override]
        return self._read().logical_to_physical

    @property
    def sequence_length(self) -> int:
        return self._read().sequence_length

    @sequence_length.setter
    def sequence_length(self, num_tokens: int) -> None:
        num_tokens = as_integer(num_tokens, "sequence_length")
        if num_tokens != self.sequence_length:
            self._resize(num_tokens)

    def add_blocks(self, ids: Iterable[int]) -> None:
        """Raise InvalidOperationError: the cache allocates blocks when tokens need them."""
        raise InvalidOperationError("expected the cache to choose the blocks, set sequence_length instead")


@dataclass(frozen=True, slots=True)
class CacheHandleStats:
    """A snapshot of one handle.

    Attributes:
        memory_bytes: bytes of K and V in its blocks, all layers; a shared block counts in full.
        blocks_allocated: blocks of the sequence.
        tokens_stored: tokens stored, without evicted ones.
        utilization: tokens / (blocks * block_size), 0.0 without blocks.
        last_access: the cache's recency counter at the last access to the sequence.
    """

    memory_bytes: int
    blocks_allocated: int
    tokens_stored: int
    utilization: float
    last_access: int


class KvCacheHandle(ABC):
    """The interface of a handle: thirteen members to implement and two that are derived from them."""

    @property
    @abstractmethod
    def block_table(self) -> BlockTable:
        """A snapshot of the block table."""

    @abstractmethod
    def block_table_mut(self) -> BlockTable:
        """The live table: it shows every later change, and setting its length resizes the sequence."""

    @abstractmethod
    def as_any(self) -> Any:
        """The handle itself, for callers that need its concrete class."""

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device of the cache."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """Number of KV heads."""

    @property
    @abstractmethod
    def head_dim(self) -> int:
        """Channels per head."""

    @abstractmethod
    def key_cache(self, layer: int) -> Float32 | None:
        """K of one layer, float32 `(num_tokens, num_heads, head_dim)`."""

    @abstractmethod
    def value_cache(self, layer: int) -> Float32 | None:
        """V of one layer, as `key_cache`; of a `PagedKvCache` with `value_head_dim`, that many channels per head."""

    @abstractmethod
    def clone_handle(self) -> KvCacheHandle:
        """Another reference to the same data."""

    @abstractmethod
    def stats(self) -> CacheHandleStats:
        """A snapshot of the memory and tokens of this request."""

    @property
    @abstractmethod
    def is_valid(self) -> bool:
        """Whether the sequence still exists."""

    @property
    @abstractmethod
    def cache_id(self) -> str:
        """A name for this request's data that is never used for another request."""

    @property
    def num_tokens(self) -> int:
        """Tokens stored."""
        return self.block_table.sequence_length

    def kv_cache(self, layer: int) -> tuple[Float32 | None, Float32 | None]:
        """`(key_cache(layer), value_cache(layer))`."""
        return self.key_cache(layer), self.value_cache(layer)
