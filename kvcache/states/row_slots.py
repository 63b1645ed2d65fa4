"""`RowSlots`: slots that grow, each with the rows of one token: the memory behind `PrefixKvCache`."""

from __future__ import annotations

from kvcache.core.block_pool import BlockPool
from kvcache.core.locks import CallLock
from kvcache.prefix.index.slots import Claim, Slots
from kvcache.states.token_rows import Rows

__all__ = ["RowSlots"]


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
            self.reserve(wanted)
            self.pool.grow(wanted)
        return self.take(count)
