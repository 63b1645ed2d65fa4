"""One list of entries: which tokens it keeps, in which slots, and attention over them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.core.attention_call import AttentionCall
from kvcache.core.block_attention import Attention
from kvcache.core.runs import runs_of
from kvcache.core.store import BlockStore
from kvcache.eviction import Rule
from kvcache.lists.kept_tokens import KeptTokens

__all__ = ["BLOCK_SIZE", "TokenList"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

# Slots per block: a multiple of the 16 tokens of a tile, and large enough that a long list has few runs.
BLOCK_SIZE = 64


class TokenList:
    """The entries of one layer, in text order, in its own store.

    Args:
        num_slots: maximum number of entries.
        num_heads, head_dim, key_dtype, value_dtype, rotate: as of `BlockStore`.
        by_score: whether the lowest score is evicted first.

    A `Rule` gives the maximum number of entries and the protected ones. `CacheManager` checks all arguments.
    """

    def __init__(
        self,
        num_slots: int,
        num_heads: int,
        head_dim: int,
        key_dtype: str,
        value_dtype: str,
        rotate: bool | str,
        by_score: bool,
    ) -> None:
        num_blocks = -(-num_slots // BLOCK_SIZE)
        self.store = BlockStore(1, num_blocks, BLOCK_SIZE, num_heads, head_dim, key_dtype, value_dtype, rotate)
        self._attention = Attention(self.store)
        self.kept = KeptTokens(by_score)

    def __len__(self) -> int:
        return self.kept.size

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not, and of the entries."""
        return self.store.nbytes + self.kept.nbytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch that attention keeps from call to call."""
        return self._attention.nbytes

    def append(self, keys: Float32, values: Float32, rule: Rule) -> None:
        """Add rows `(n, num_heads, head_dim)`; each is followed by the evictions it makes necessary.

        Raises:
            ValueError: numbers that the format cannot hold.
            MemoryError: no memory; nothing has changed.
        """
        self.store.check_values(keys, values)
        self.kept.append_to(self.store, keys, values, *rule)

    def read(self, indices: Int64) -> tuple[Float32, Float32]:
        """`(keys, values)` of entries in range, float32 `(n, num_heads, head_dim)` each."""
        slots = self.kept.slots()[indices]
        if len(slots) < 2 or (np.diff(slots) > 0).all():
            return self.store.read(0, runs_of(slots, BLOCK_SIZE))
        # Read in slot order, so that each tile is unpacked once.
        order = np.argsort(slots)
        keys, values = np.empty((2, len(slots), self.store.num_heads, self.store.head_dim), np.float32)
        keys[order], values[order] = self.store.read(0, runs_of(slots[order], BLOCK_SIZE))
        return keys, values

    def attend(
        self, queries: Float32, scale: float, scores: Float32 | None, softcap: float | None, sinks: Float32 | None
    ) -> Float32:
        """softmax(q K^T scale) V, causal; the last query has the position of the last entry.

        Args:
            queries: `(n, num_query_heads, head_dim)`, n at most `len(self)`.
            scores: float32 `(len(self),)`, filled with each entry's attention mass; or None.
            softcap, sinks: as of `PagedKvCache.attention`.
        """
        # Softmax does not depend on the order: entries that all queries see are read in slot order, the rest in text
        # order.
        order = self.kept.reading_order(max(len(queries) - 1, 0))
        runs = runs_of(order, BLOCK_SIZE)
        call = AttentionCall(scale, softcap=softcap, sinks=sinks, return_scores=scores is not None)
        if scores is None:
            out: Float32 = self._attention.over_runs(0, runs, queries, call)
            return out
        out, mass = self._attention.over_runs(0, runs, queries, call)
        by_slot = np.empty(self.kept.slots_used, np.float32)
        by_slot[order] = mass
        np.take(by_slot, self.kept.slots(), out=scores)
        return out

    def check(self, rule: Rule) -> None:
        """Verify every invariant of a list under `rule`; AssertionError names the broken one."""
        self.kept.check()
        assert self.kept.size <= rule.limit, f"{self.kept.size} entries, at most {rule.limit}"
        room = self.store.num_blocks * BLOCK_SIZE
        assert self.kept.slots_used <= room, f"{self.kept.slots_used} slots used of {room}"
