"""The reports of a `PagedKvCache`: ids, snapshots of a sequence and of the counters, block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.core.block_pool import BlockPool
from kvcache.core.store import BlockStore
from kvcache.paged.tables import BlockTables
from kvcache.support.spill_file import bytes_on_disk

__all__ = ["BlockId", "CacheStats", "CsrBlockTable", "SeqId", "SequenceInfo", "SpillStats"]

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
        """The snapshot of a sequence of a table; None: there is no such sequence."""
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

    @classmethod
    def of(cls, pool: BlockPool, table: BlockTables, store: BlockStore, evictions: int) -> CacheStats:
        """The counters of the parts of a cache."""
        size = pool.nbytes + table.nbytes + store.bookkeeping
        return cls(pool.total_allocations, pool.total_frees, evictions, table.forks, pool.peak_used, size)


class SpillStats(NamedTuple):
    """Counters of a cache that spills: where its blocks lie, and how much was read and written since it was made.

    Attributes:
        folder: of the file.
        memory_bytes: bytes of blocks in memory now, in whole pages of the system.
        max_memory_bytes: the most, but for what a running call needs beyond.
        file_bytes: what the file takes on its disk now.
        holds: times that attention has needed blocks of a layer, in pieces of 1,024 tokens, or chosen by a query for a
            KV head.
        held: blocks of a layer in them.
        waits: how many of these times waited for the file.
        reads, read_bytes: blocks of a layer that were read from the file, and bytes in whole slots of it; those that
            were read ahead included.
        reads_ahead: how many were read before they were needed.
        writes, written_bytes: the same of what was written.
        faults: how often something could not be read as it was written.
        read_seconds: of all requests that read, many of them at once.
    """

    folder: str
    memory_bytes: int
    max_memory_bytes: int
    file_bytes: int
    holds: int
    held: int
    waits: int
    reads: int
    read_bytes: int
    reads_ahead: int
    writes: int
    written_bytes: int
    faults: int
    read_seconds: float

    @classmethod
    def of(cls, store: BlockStore) -> SpillStats:
        """The report of a store that spills."""
        spill = store.spill
        assert spill is not None
        found = spill.stats()
        names = {
            "holds": "holds", "held": "held_units", "waits": "waits", "reads": "read_units", "read_bytes": "read_bytes",
            "reads_ahead": "ahead_units", "writes": "written_units", "written_bytes": "written_bytes",
            "faults": "faults",
        }
        counts = {name: int(found[own]) for name, own in names.items()}
        return cls(
            folder=spill.folder, memory_bytes=int(found["resident"]), max_memory_bytes=spill.limit,
            file_bytes=bytes_on_disk(spill.fd), read_seconds=found["read_seconds"], **counts,
        )


class CsrBlockTable(NamedTuple):
    """Block tables of several sequences as CSR arrays, int32: sequence i has `indices[indptr[i]:indptr[i+1]]`.

    `last_page_len[i]` is where its tokens end in its last block, 0 for a sequence without blocks. Names and layout are
    those of FlashInfer; `block_ids` and `last_block_len` are other names of the last two.
    """

    indptr: Int32
    indices: Int32
    last_page_len: Int32

    @property
    def block_ids(self) -> Int32:
        """`indices`."""
        return self.indices

    @property
    def last_block_len(self) -> Int32:
        """`last_page_len`."""
        return self.last_page_len
