"""`RowSlots`: slots that grow, each with the rows of one token: the memory behind `PrefixKvCache`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import CallLock
from kvcache.core.pool import BlockPool
from kvcache.prefix.live import CachedKvState
from kvcache.prefix.rows import Rows
from kvcache.prefix.slots import Claim, Slots

__all__ = ["LeasedState", "RowSlots"]

Float32 = npt.NDArray[np.float32]


class RowSlots(Slots):
    """A slot is K and V of one token in all layers.

    Attributes:
        rows: what lies in the slots.
    """

    def __init__(self, rows: Rows, lock: CallLock) -> None:
        super().__init__([BlockPool(0)], lock=lock)
        self.rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        """`(num_layers, kv_dim)`."""
        return self.rows.num_layers, self.rows.kv_dim

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that entries name or states show."""
        return self.pool.num_used * self.rows.slot_bytes

    def take_rows(self, count: int, max_bytes: int) -> Claim:
        """`count` slots, consecutive where possible; their number doubles as needed, up to what `max_bytes` allow.

        Raises:
            MemoryError: the system refuses the memory; nothing has changed.
        """
        used, total = self.pool.num_used + count, self.pool.num_blocks
        if used > total:
            wanted = min(max(2 * total, used, 64), max(max_bytes // self.rows.slot_bytes, used))
            self.rows.grow(wanted)
            self.grow(wanted)
        return self.take(count)


class LeasedState(CachedKvState):
    """A state that shows claimed slots; its rows are read when they are asked for."""

    def __init__(self, claim: Claim) -> None:
        assert isinstance(claim.slots, RowSlots)
        self._claim, self._rows, self._seq_len = claim, claim.slots.rows, len(claim)
        claim.keep()

    @property
    def num_layers(self) -> int:
        return self._rows.num_layers

    @property
    def kv_dim(self) -> int:
        return self._rows.kv_dim

    @property
    def keys(self) -> list[Float32]:
        return self._read(0)

    @property
    def values(self) -> list[Float32]:
        return self._read(1)

    def __reduce__(self) -> tuple[type[CachedKvState], tuple[list[Float32], list[Float32], int]]:
        return CachedKvState, (self.keys, self.values, self.seq_len)

    def _read(self, side: int) -> list[Float32]:
        """Read-only: views that keep the claim where the rows lie there as float32 together, else copies."""
        layers, slots, rows = [], self._claim.pages, self._rows
        for layer in range(self.num_layers):
            view = rows.view(side, layer, slots)
            layers.append(rows.read(side, layer, slots) if view is None else np.asarray(_View(view, self._claim)))
            layers[-1].flags.writeable = False
        return layers


class _View:
    """An array that keeps its claim: NumPy holds on to the object that an interface came from."""

    def __init__(self, array: Float32, claim: Claim) -> None:
        self.array: Any = array
        self.claim = claim
        self.__array_interface__ = array.__array_interface__
