"""Blocks that several holders share: their bytes, the references on each, and one lock for all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.block_pool import BlockPool
from kvcache.core.kvrows import KvRows
from kvcache.core.locks import CallLock
from kvcache.core.rowformat import RowFormats
from kvcache.core.store import BlockStore
from kvcache.errors import BlockNotFoundError, OutOfMemoryError
from kvcache.support.arguments import as_indices, as_stored

__all__ = ["PagedBlocks"]

Int32 = npt.NDArray[np.int32]
_FLOAT32 = np.dtype(np.float32)


class PagedBlocks:
    """A store of blocks, a pool that counts the references on each, and one lock for both.

    Args:
        store: where K and V lie.
        formats: of K and V, where they are written in Python.

    Attributes:
        holders: what holds references on the blocks (sequences, prefix caches), each a function that counts them,
            `() -> int32 (num_blocks,)`.
        reserves: what keeps records of the blocks (prefix caches), each a function that makes room for the records of
            its argument's number of blocks before the pool grows; MemoryError: nothing has changed.
        idle: the prefix caches, each a function that counts the blocks which it alone holds.
    """

    def __init__(self, store: BlockStore, formats: RowFormats | None = None) -> None:
        self.store, self.formats = store, formats or RowFormats("f32", "f32")
        self.pool = BlockPool(store.num_blocks)
        if store.spill is not None:
            store.spill.refer(self.pool)
        self.lock = CallLock()
        self._shapes = (None, store.num_heads, store.head_dim), (None, store.num_heads, store.value_head_dim)
        self.holders: list[Callable[[], Int32]] = []
        self.reserves: list[Callable[[int], None]] = []
        self.idle: list[Callable[[], int]] = []

    def as_ids(self, block_ids: npt.ArrayLike, name: str = "block_ids") -> Int32:
        """Block ids as int32 `(n,)`.

        Raises:
            TypeError, ValueError: not integers in one dimension.
            BlockNotFoundError: no such block.
        """
        ids = as_indices(block_ids, name)
        outside = ids[(ids < 0) | (ids >= self.pool.num_blocks)]
        if len(outside):
            raise BlockNotFoundError(int(outside[0]))
        return ids.astype(np.int32)

    def as_rows(self, keys: npt.ArrayLike, values: npt.ArrayLike | None) -> KvRows:
        """K and V `(n, num_heads, head_dim)` as they are, or as a `Format` keeps them. V of latent rows is None.

        Raises:
            TypeError, ValueError: not such arrays of floats; whatever a `Format` raises.
        """
        shape, value_shape = self._shapes
        if self.store.latent:
            return self._latent_rows(keys, values)
        if not self.formats.fingerprint:
            own = type(keys) is np.ndarray and keys.dtype is _FLOAT32 and keys.shape[1:] == shape[1:]
            if own and type(values) is np.ndarray and values.dtype is _FLOAT32 and values.shape[1:] == value_shape[1:]:
                return KvRows(np.asarray(keys), values)  # as a network has them, there is nothing to convert
            return self.as_given(keys, values)
        rows = KvRows(
            as_stored(self.formats.rows(0, keys, shape, "keys"), shape, "keys"),
            as_stored(self.formats.rows(1, values, value_shape, "values"), value_shape, "values"),
        )
        rows.given = self.as_given(keys, values)
        return rows

    def _latent_rows(self, keys: npt.ArrayLike, values: npt.ArrayLike | None) -> KvRows:
        if values is not None:
            raise ValueError("values: expected None of a cache of latent rows, whose V is in its keys, got rows")
        shape, dim = self._shapes[0], self.store.value_head_dim
        given = as_stored(keys, shape, "keys")
        if not self.formats.fingerprint:
            return KvRows(given, given[..., :dim])
        stored = as_stored(self.formats.rows(0, keys, shape, "keys"), shape, "keys")
        rows = KvRows(stored, stored[..., :dim])
        rows.given = KvRows(given, given[..., :dim])
        return rows

    def as_given(self, keys: npt.ArrayLike, values: npt.ArrayLike | None) -> KvRows:
        """`as_rows` without a `Format`."""
        shape, value_shape = self._shapes
        return KvRows(as_stored(keys, shape, "keys"), as_stored(values, value_shape, "values"))

    def copy(self, sources: npt.ArrayLike, targets: npt.ArrayLike) -> None:
        """See `PagedKvCache.copy_blocks`."""
        src, dst = self.as_ids(sources, "sources"), self.as_ids(targets, "targets")
        if len(src) != len(dst):
            raise ValueError(f"targets: expected {len(src)} blocks, as many as sources, got {len(dst)}")
        with self.lock:
            self.store.copy_blocks(self.pool.in_use(src), self.pool.in_use(dst))

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call; if it lacks blocks, its error counts those that prefix caches could give back."""
        try:
            call(*arguments)
        except OutOfMemoryError as error:
            if self.idle and error.unit == "blocks":
                with self.lock:
                    error.idle_of_each = tuple(filter(None, (count() for count in self.idle)))
            raise

    # What follows is called with the lock held.

    def references(self) -> Int32:
        """References on each block, int32 `(num_blocks,)`, as the holders count them."""
        held = np.zeros(self.pool.num_blocks, np.int32)
        for count in self.holders:
            held += count()
        return held

    def check(self) -> None:
        """Verify that the pool is sound and has the references that the holders count.

        Raises:
            AssertionError: naming what is wrong.
        """
        self.pool.check()
        if self.store.spill is not None:
            self.store.spill.check()
        wrong = np.flatnonzero(self.references() != self.pool.ref_counts())
        assert not len(wrong), f"references held on blocks {wrong.tolist()} differ from their counts"
