"""Rows of K and V by slot, plain or packed.

`PlainRows` are NumPy arrays of f32 or f16, `[layer, slot, kv_dim]`; consecutive f32 rows are returned as views.
`PackedRows` lie in a `BlockStore`, where K or V or both are quantised, head by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import CallLock
from kvcache.core.runs import runs_of
from kvcache.core.store import BlockStore
from kvcache.kernels.kernels import FORMATS
from kvcache.saved.snapshot import Arena
from kvcache.support.huge_pages import span_of

__all__ = ["BLOCK_SIZE", "PackedRows", "PlainRows", "Rows", "rows_of"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


# Slots per block: at 64 no block needs padding, so a slot costs its packed rows and not a byte more; and whole
# tiles of 16 tokens are packed and unpacked at once.
BLOCK_SIZE = 64


class PlainRows:
    """Rows in f32, or rounded to f16.

    Attributes:
        num_layers, kv_dim: shape of one token's K, and of its V.
        slot_bytes: bytes of K and V of one slot in all layers.
    """

    def __init__(self, num_layers: int, kv_dim: int, key_dtype: str, value_dtype: str) -> None:
        self.num_layers, self.kv_dim = num_layers, kv_dim
        self._names = (key_dtype, value_dtype)
        self._sides = [np.empty((num_layers, 0, kv_dim), f"f{FORMATS[name].bits // 8}") for name in self._names]
        self.slot_bytes = num_layers * kv_dim * sum(rows.itemsize for rows in self._sides)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not."""
        return sum(rows.nbytes for rows in self._sides)

    def spans(self) -> list[tuple[int, int]]:
        """Addresses and bytes of the memory."""
        return [span_of(rows) for rows in self._sides]

    def grow(self, num_slots: int) -> None:
        """Make room for at least `num_slots` slots. MemoryError: nothing has changed."""
        if num_slots <= self._sides[0].shape[1]:
            return  # an earlier call, which was interrupted, has grown them
        grown = [np.empty((self.num_layers, num_slots, self.kv_dim), rows.dtype) for rows in self._sides]
        for new, old in zip(grown, self._sides, strict=True):
            new[:, : old.shape[1]] = old
        self._sides = grown

    def check_values(self, keys: Float32, values: Float32) -> None:
        """ValueError unless every value of rows `(n, kv_dim)` can be stored."""
        for what, name, rows, side in zip(("keys", "values"), self._names, (keys, values), self._sides, strict=True):
            bad = rows[~(np.abs(rows) <= np.finfo(side.dtype).max)]  # NaN fails the comparison as well
            if bad.size:
                most = FORMATS[name].largest
                raise ValueError(f"{what}: expected finite values that {name} can hold, up to {most}, got {bad[0]}")

    def write(self, slots: Int32, keys: list[Float32], values: list[Float32]) -> None:
        """Store rows `(len(slots), kv_dim)` of every layer."""
        for rows, layers in zip(self._sides, (keys, values), strict=True):
            for layer, new in enumerate(layers):
                rows[layer, slots] = new

    def arena(self) -> Arena:
        """The layout of a page of rows in a saved cache."""
        return Arena(
            self.num_layers, 1, self.kv_dim, self.kv_dim, *self._names, False, False, "rows", BLOCK_SIZE,
            self.slot_bytes * BLOCK_SIZE,
        )

    def page(self) -> PlainPage:
        """A page of zeros, to fill."""
        return PlainPage(self)

    def view(self, side: int, layer: int, slots: Int32) -> Float32 | None:
        """The rows at `slots` as a view, float32 `(len(slots) * kv_dim,)`; None unless they are consecutive."""
        rows = self._sides[side]
        if rows.dtype != np.float32 or not len(slots) or (np.diff(slots) != 1).any():
            return None
        return rows[layer, slots[0] : slots[-1] + 1].reshape(-1)

    def read(self, side: int, layer: int, slots: Int32) -> Float32:
        """The rows at `slots`, K at side 0 and V at side 1, float32 `(len(slots) * kv_dim,)`, a copy."""
        rows: Float32 = self._sides[side][layer].take(slots, axis=0).reshape(-1).astype(np.float32, copy=False)
        return rows


class PlainPage:
    """64 slots of `PlainRows` as they lie in a file.

    Attributes:
        buffers: K, then V, each `(num_layers, 64, kv_dim)`.
    """

    def __init__(self, rows: PlainRows) -> None:
        shape = (rows.num_layers, BLOCK_SIZE, rows.kv_dim)
        self._rows = rows
        self.buffers: list[npt.NDArray[Any]] = [np.zeros(shape, side.dtype) for side in rows._sides]

    def copy_from(self, slots: Int32) -> None:
        """Fill the first slots with the rows at `slots`, bit for bit."""
        for side, page in zip(self._rows._sides, self.buffers, strict=True):
            page[:, : len(slots)] = side[:, slots]

    def copy_to(self, slots: Int32, places: npt.NDArray[Any]) -> None:
        """Copy the slots `places` of the page to `slots`, bit for bit."""
        for side, page in zip(self._rows._sides, self.buffers, strict=True):
            side[:, slots] = page[:, places]


class PackedRows:
    """Rows that a `BlockStore` packs, each cut into heads of `head_dim` channels.

    Growing adds a store and moves nothing, so no row is packed twice and memory is mapped only as the cache grows.
    Since sizes double, there are few stores.

    Args:
        num_heads, head_dim, rotate: see `BlockStore`.

    Raises:
        ValueError: a setting that `BlockStore` does not support.

    Attributes: those of `PlainRows`.
    """

    def __init__(
        self, num_layers: int, num_heads: int, head_dim: int, key_dtype: str, value_dtype: str, rotate: bool | str
    ) -> None:
        self.num_layers, self.kv_dim = num_layers, num_heads * head_dim
        self._shape = (-1, num_heads, head_dim)
        self._settings = (BLOCK_SIZE, num_heads, head_dim, key_dtype, value_dtype, rotate)
        self._empty = BlockStore(num_layers, 0, *self._settings)
        self._stores: list[tuple[int, BlockStore]] = []  # with the first slot of each
        # A write packs whole tiles again, with neighbouring rows that states may be reading.
        self._lock = CallLock(level=0)
        self.slot_bytes = self._empty.block_bytes // BLOCK_SIZE

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not."""
        return sum(store.nbytes for _, store in self._stores)

    def spans(self) -> list[tuple[int, int]]:
        """Addresses and bytes of the memory."""
        return [store.span for _, store in self._stores]

    def grow(self, num_slots: int) -> None:
        """Make room for at least `num_slots` slots. MemoryError: nothing has changed."""
        first, store = self._stores[-1] if self._stores else (0, self._empty)
        end = first + store.num_blocks * BLOCK_SIZE
        blocks = -(-(num_slots - end) // BLOCK_SIZE)
        if blocks > 0:
            store = BlockStore(self.num_layers, blocks, *self._settings)
            with self._lock:
                self._stores.append((end, store))

    def check_values(self, keys: Float32, values: Float32) -> None:
        """ValueError unless every value of rows `(n, kv_dim)` can be stored."""
        self._empty.check_values(keys.reshape(self._shape), values.reshape(self._shape))

    def write(self, slots: Int32, keys: list[Float32], values: list[Float32]) -> None:
        """Store rows `(len(slots), kv_dim)` of every layer."""
        with self._lock:
            for where, store, runs in self._parts(slots):
                for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
                    store.write(layer, runs, k[where].reshape(self._shape), v[where].reshape(self._shape))

    def arena(self) -> Arena:
        """The layout of a page of rows in a saved cache: a block."""
        store, (_, _, _, key_dtype, value_dtype, _) = self._empty, self._settings
        return Arena(
            self.num_layers, store.num_heads, store.head_dim, store.value_head_dim, key_dtype, value_dtype,
            *store.rotated, "blocks", BLOCK_SIZE, store.block_bytes,
        )

    def page(self) -> PackedPage:
        """A page of zeros, to fill."""
        return PackedPage(self)

    def view(self, side: int, layer: int, slots: Int32) -> None:
        """None: packed rows have no view as floats."""

    def read(self, side: int, layer: int, slots: Int32) -> Float32:
        """The rows at `slots`, K at side 0 and V at side 1, float32 `(len(slots) * kv_dim,)`, unpacked."""
        out = np.empty((len(slots), self.kv_dim), np.float32)
        with self._lock:
            for where, store, runs in self._parts(slots):
                out[where] = store.read_side(layer, runs, side).reshape(-1, self.kv_dim)
        return out.reshape(-1)

    def _parts(self, slots: Int32) -> Iterator[tuple[npt.NDArray[np.intp], BlockStore, npt.NDArray[Any]]]:
        """Store by store: which of `slots` it has, itself, and their runs."""
        for where, first, store in self._shares(slots):
            yield where, store, runs_of(slots[where] - first, BLOCK_SIZE)

    def _shares(self, slots: Int32) -> Iterator[tuple[npt.NDArray[np.intp], int, BlockStore]]:
        """Store by store: which of `slots` it has, in ascending order, its first slot, and itself."""
        for first, store in self._stores:
            where = np.flatnonzero((slots >= first) & (slots < first + store.num_blocks * BLOCK_SIZE))
            if len(where):
                # Neighbours share a tile: in the order of slots, each tile is packed once.
                yield where[np.argsort(slots[where])], first, store


class PackedPage:
    """64 slots of `PackedRows` as they lie in a file: a block.

    Attributes:
        buffers: its bytes, layer by layer.
    """

    def __init__(self, rows: PackedRows) -> None:
        self._rows, self._store = rows, BlockStore(rows.num_layers, 1, *rows._settings)
        self.buffers: list[npt.NDArray[Any]] = list(self._store.overwrite(0))

    def copy_from(self, slots: Int32) -> None:
        """Fill the first slots with the rows at `slots`, bit for bit."""
        with self._rows._lock:
            for where, first, store in self._rows._shares(slots):
                self._store.move_slots(_moves(slots[where] - first, where), store)

    def copy_to(self, slots: Int32, places: npt.NDArray[Any]) -> None:
        """Copy the slots `places` of the page to `slots`, bit for bit."""
        with self._rows._lock:
            for where, first, store in self._rows._shares(slots):
                store.move_slots(_moves(places[where], slots[where] - first), self._store)


def _moves(sources: npt.NDArray[Any], targets: npt.NDArray[Any]) -> Int32:
    """Copies between slots as few moves of `BlockStore`: slots consecutive on both sides, in one block, are one."""
    pairs = np.stack([sources, targets]).astype(np.int64)
    new = (np.diff(pairs, axis=1) != 1).any(axis=0) | (pairs[:, 1:] % BLOCK_SIZE == 0).any(axis=0)
    starts = np.flatnonzero(np.concatenate([[True], new]))
    counts = np.diff(np.append(starts, pairs.shape[1]))
    (source, target) = pairs[:, starts]
    moves = [source // BLOCK_SIZE, source % BLOCK_SIZE, target // BLOCK_SIZE, target % BLOCK_SIZE, counts]
    return np.stack(moves, axis=1).astype(np.int32)


Rows = PlainRows | PackedRows


def rows_of(
    num_layers: int, kv_dim: int, key_dtype: str, value_dtype: str, rotate: bool | str, head_dim: int | None
) -> Rows:
    """Rows of the given formats: plain ones if neither is quantised.

    Args:
        head_dim: channels per head, a divisor of kv_dim; None: the whole row is one head.

    Raises:
        ValueError: a row that cannot be cut like this, or a setting that `BlockStore` does not support.
    """
    if head_dim is not None and kv_dim % head_dim:
        raise ValueError(f"head_dim: expected a divisor of kv_dim {kv_dim}, got {head_dim}")
    if not (FORMATS[key_dtype].quantised or FORMATS[value_dtype].quantised):
        return PlainRows(num_layers, kv_dim, key_dtype, value_dtype)
    if head_dim is None and (kv_dim % 8 or kv_dim > 512):
        raise ValueError(
            f"head_dim: expected an int, since rows of {kv_dim} floats are not one head of a multiple of 8 channels, "
            f"at most 512, got None for {key_dtype} and {value_dtype}"
        )
    head_dim = head_dim or kv_dim
    return PackedRows(num_layers, kv_dim // head_dim, head_dim, key_dtype, value_dtype, rotate)
