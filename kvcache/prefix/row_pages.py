"""Pages of `Rows` as they lie in a file: 64 slots each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcache.core.store import BlockStore

if TYPE_CHECKING:
    from kvcache.prefix.rows import PackedRows, PlainRows

__all__ = ["BLOCK_SIZE", "PackedPage", "PlainPage"]

Int32 = npt.NDArray[np.int32]

# Slots per block: at 64 no block needs padding, so a slot costs its packed rows and not a byte more; and whole
# tiles of 16 tokens are packed and unpacked at once.
BLOCK_SIZE = 64


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
