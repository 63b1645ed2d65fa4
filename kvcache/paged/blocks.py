"""The blocks of a `PagedKvCache`: their shape, how many there are, what they cost, and who holds them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_indices
from kvcache.core.locks import CallLock
from kvcache.core.pool import BlockPool
from kvcache.core.store import BlockStore
from kvcache.errors import BlockNotFoundError

__all__ = ["PagedBlocks"]

Int32 = npt.NDArray[np.int32]


class PagedBlocks:
    """A store of blocks, a pool that counts the references on each, and one lock for both.

    Args:
        store: where K and V lie.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._pool = BlockPool(store.num_blocks)
        self._lock = CallLock()
        # Who holds references on the blocks (sequences, prefix caches), each a function -> int32 (num_blocks,).
        self._holders: list[Callable[[], Int32]] = []

    # -- shape ----------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self._store.num_layers

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return self._store.num_heads

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self._store.head_dim

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._store.block_size

    @property
    def key_dtype(self) -> str:
        """Storage format of K."""
        return self._store.key_dtype

    @property
    def value_dtype(self) -> str:
        """Storage format of V."""
        return self._store.value_dtype

    # -- how many, how large --------------------------------------------------------------------------------

    @property
    def total_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    @property
    def free_block_count(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free

    @property
    def used_block_count(self) -> int:
        """Blocks that somebody holds; a shared block counts once."""
        return self._pool.num_used

    @property
    def utilization(self) -> float:
        """Used blocks over all blocks; 0.0 for a cache without blocks."""
        return self._pool.num_used / self._pool.num_blocks if self._pool.num_blocks else 0.0

    @property
    def block_memory_bytes(self) -> int:
        """Bytes of K and V of one block in all layers."""
        return self._store.block_bytes

    @property
    def total_memory_bytes(self) -> int:
        """Bytes of K and V of all blocks."""
        return self._store.nbytes

    @property
    def used_memory_bytes(self) -> int:
        """Bytes of K and V of the blocks in use."""
        return self._store.block_bytes * self._pool.num_used

    # -- what is in them, who holds them --------------------------------------------------------------------

    def copy_blocks(self, sources: npt.ArrayLike, targets: npt.ArrayLike) -> None:
        """Copy the K and V of whole blocks, all layers, in order; sequences and references stay as they are.

        Raises:
            ValueError: not as many targets as sources.
            BlockNotFoundError: a block is not in use.
        """
        src, dst = self._block_ids(sources), self._block_ids(targets)
        if len(src) != len(dst):
            raise ValueError(f"expected as many targets as sources, {len(src)}, got {len(dst)}")
        with self._lock:
            self._store.copy_blocks(self._pool.in_use(src), self._pool.in_use(dst))

    def reference_counts(self, block_ids: npt.ArrayLike) -> Int32:
        """How many sequences and prefix caches hold each of these blocks, int32 `(n,)`; 0 where it is free.

        Raises:
            TypeError, ValueError: not integers in one dimension.
            BlockNotFoundError: no such block.
        """
        ids = self._block_ids(block_ids)
        with self._lock:
            return self._pool.ref_counts()[ids]

    def check(self) -> None:
        """Verify that the pool is sound and each block has as many references as its holders say.

        Raises:
            AssertionError: naming what is wrong.
        """
        with self._lock:
            self._check()

    def _block_ids(self, block_ids: npt.ArrayLike) -> Int32:
        ids = as_indices(block_ids, "block ids")
        outside = ids[(ids < 0) | (ids >= self._pool.num_blocks)]
        if len(outside):
            raise BlockNotFoundError(int(outside[0]))
        return ids.astype(np.int32)

    # What follows is called with the lock held.

    def _check(self) -> None:
        self._pool.check()
        wrong = np.flatnonzero(self._references() != self._pool.ref_counts())
        assert not len(wrong), f"references held on blocks {wrong.tolist()} differ from their counts"

    def _recount(self) -> None:
        """Count references anew from who holds them."""
        self._pool.recount(self._references())

    def _references(self) -> Int32:
        held = np.zeros(self._pool.num_blocks, np.int32)
        for holder in self._holders:
            held += holder()
        return held
