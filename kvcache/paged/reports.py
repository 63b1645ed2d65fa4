"""What `PagedKvCache` reports: snapshots of a sequence, of the counters, of block tables; its text forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.core.strip import strip
from kvcache.paged.tables import BlockTables

if TYPE_CHECKING:
    from kvcache.paged.cache import PagedKvCache

__all__ = [
    "BlockId", "CacheStats", "CsrBlockTable", "SeqId", "SequenceInfo", "as_html", "describe", "describe_settings",
]  # fmt: skip

Int32 = npt.NDArray[np.int32]


class SeqId(int):
    """The id of a sequence, in [0, 2**64): an int whose text form is `S<n>`. Any int serves as an argument."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"S{int(self)}"

    def __repr__(self) -> str:
        return f"SeqId({int(self)})"


class BlockId(int):
    """The id of a block, in [0, num_blocks): an int whose text form is `B<n>`. Any int serves as an argument."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"B{int(self)}"

    def __repr__(self) -> str:
        return f"BlockId({int(self)})"


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A snapshot of one sequence.

    Attributes:
        seq_id: its id.
        num_tokens: tokens alive.
        next_position: position of the next token in the text; differs from `num_tokens` once tokens were evicted.
        block_ids: its blocks in the order of the text.
        last_access: the cache's recency counter when it was last touched.
        access_count: times it was touched.
        priority: see `EvictionStrategy.Priority`.
    """

    seq_id: SeqId
    num_tokens: int
    next_position: int
    block_ids: tuple[BlockId, ...]
    last_access: int
    access_count: int
    priority: int

    @classmethod
    def of(cls, table: BlockTables, seq_id: int) -> SequenceInfo | None:
        """What a table says of a sequence; None without such a sequence."""
        if seq_id not in table:
            return None
        num_tokens, next_position, last_access, access_count, priority, _, _ = table.info(seq_id)
        blocks = tuple(map(BlockId, table.blocks(seq_id).tolist()))
        return cls(SeqId(seq_id), num_tokens, next_position, blocks, last_access, access_count, priority)

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence, shared ones included."""
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of the cache's counters.

    Attributes:
        total_allocations: times a free block was taken.
        total_frees: blocks whose last reference was dropped.
        total_evictions: sequences evicted.
        total_forks: forks made.
        peak_blocks_used: most blocks in use at once.
        bookkeeping_bytes: memory of block tables, pool and eviction order, beside the K and V.
    """

    total_allocations: int
    total_frees: int
    total_evictions: int
    total_forks: int
    peak_blocks_used: int
    bookkeeping_bytes: int = 0


class CsrBlockTable(NamedTuple):
    """Block tables of several sequences as CSR arrays, int32: sequence i has `block_ids[indptr[i]:indptr[i+1]]`.

    `last_block_len[i]` is where its tokens end in its last block, 0 for a sequence without blocks.
    """

    indptr: Int32
    block_ids: Int32
    last_block_len: Int32


def describe(cache: PagedKvCache) -> str:
    """A cache as text of several lines."""
    stats = cache.stats()
    return (
        f"PagedKvCache\n"
        f"  strategy: {cache.eviction_strategy}, block size: {cache.block_size}\n"
        f"  blocks: {cache.used_block_count}/{cache.total_blocks} used ({100 * cache.utilization:.1f}%)\n"
        f"  memory: {cache.used_memory_bytes / 1e6:.2f}/{cache.total_memory_bytes / 1e6:.2f} MB\n"
        f"  sequences: {cache.num_sequences}\n"
        f"  allocs: {stats.total_allocations}, frees: {stats.total_frees}, "
        f"evictions: {stats.total_evictions}, forks: {stats.total_forks}"
    )


def describe_settings(cache: PagedKvCache) -> str:
    """A cache as text of one line."""
    return (
        f"PagedKvCache(num_blocks={cache.total_blocks}, block_size={cache.block_size}, num_heads={cache.num_heads}, "
        f"head_dim={cache.head_dim}, num_layers={cache.num_layers}, key_dtype={cache.key_dtype!r}, "
        f"value_dtype={cache.value_dtype!r}, eviction_strategy={cache.eviction_strategy}, "
        f"used_blocks={cache.used_block_count}, num_sequences={cache.num_sequences})"
    )


def as_html(cache: PagedKvCache) -> str:
    """The blocks of a cache as a strip: free, used by one, shared by several."""
    counts = cache.reference_counts(np.arange(cache.total_blocks))
    return strip(describe_settings(cache), ("free", "used", "shared"), np.minimum(counts, 2))
