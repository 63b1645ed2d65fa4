"""Which sequences of a `PagedKvCache` leave when blocks run short, and which of them stay whatever happens."""

from __future__ import annotations

from math import isnan
from typing import TypeVar

from kvcache.core.arguments import as_integer, as_number
from kvcache.core.store import BlockStore
from kvcache.errors import InvalidOperationError
from kvcache.eviction import EvictionStrategy
from kvcache.paged.reports import SeqId
from kvcache.paged.seq_ids import as_seq_id
from kvcache.paged.sequence_calls import PagedSequences

__all__ = ["EvictableSequences"]

Self = TypeVar("Self", bound="EvictableSequences")


class EvictableSequences(PagedSequences):
    """Sequences in the order in which they leave. Nothing is evicted by itself.

    Args:
        strategy: who leaves first.
        threshold: share of blocks in use from which `needs_eviction` is true, clamped to [0, 1].
    """

    def __init__(self, store: BlockStore, strategy: EvictionStrategy, threshold: float) -> None:
        super().__init__(store)
        self.with_eviction_strategy(strategy)
        self.with_eviction_threshold(threshold)

    def with_eviction_strategy(self: Self, strategy: EvictionStrategy) -> Self:
        """Choose who leaves first; returns the cache."""
        if not isinstance(strategy, EvictionStrategy):
            raise TypeError(f"expected an EvictionStrategy, got {type(strategy).__name__}")
        with self._lock:
            self._table.rank_by(strategy)
        return self

    def with_eviction_threshold(self: Self, threshold: float) -> Self:
        """Set the share of blocks in use from which `needs_eviction` is true, clamped to [0, 1]; returns the cache.

        Raises:
            ValueError: NaN.
        """
        share = as_number(threshold, "threshold")
        if isnan(share):
            raise ValueError("expected a threshold between 0 and 1, got nan")
        self._threshold = min(1.0, max(0.0, share))
        return self

    @property
    def eviction_strategy(self) -> EvictionStrategy:
        """Who leaves first."""
        return self._table.strategy

    @property
    def eviction_threshold(self) -> float:
        """The share of blocks in use from which `needs_eviction` is true."""
        return self._threshold

    @property
    def needs_eviction(self) -> bool:
        """Whether `utilization` has reached the threshold; nothing is evicted by itself."""
        return self.utilization >= self._threshold

    def set_priority(self, seq_id: int, priority: int) -> None:
        """Under `EvictionStrategy.Priority(levels)` the lowest leaves first.

        Raises:
            SequenceNotFoundError: no such sequence.
            ValueError: negative, or not below `levels` where the strategy names them.
        """
        seq_id, priority = as_seq_id(seq_id), as_integer(priority, "priority")
        with self._lock:
            levels = self.eviction_strategy.levels
            if priority < 0 or (levels is not None and priority >= levels):
                raise ValueError(f"expected a priority in [0, {levels or 'any'}), got {priority}")
            self._table.set_priority(seq_id, priority)

    def pin(self, seq_id: int) -> None:
        """Never evict this sequence until it was unpinned as often as pinned.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        seq_id = as_seq_id(seq_id)
        with self._lock:
            self._table.pin(seq_id)

    def unpin(self, seq_id: int) -> None:
        """Take back one `pin`.

        Raises:
            SequenceNotFoundError: no such sequence.
            InvalidOperationError: it is not pinned.
        """
        seq_id = as_seq_id(seq_id)
        with self._lock:
            self._table.unpin(seq_id)

    def select_eviction_target(self) -> SeqId | None:
        """The sequence that `evict` would take; None when there is none that is not pinned."""
        with self._lock:
            seq_id = self._table.victim()
            return None if seq_id is None else SeqId(seq_id)

    def evict(self) -> SeqId:
        """Free the eviction target and return its id.

        Raises:
            InvalidOperationError: there is no sequence that may leave.
        """
        with self._lock:
            seq_id = self._table.evict()
            if seq_id is None:
                raise InvalidOperationError("no sequence to evict")
            return SeqId(seq_id)

    def evict_to_threshold(self, target_util: float) -> list[SeqId]:
        """Evict until `utilization` is at most `target_util`; the ids that left, in order.

        Sequences whose blocks are all shared free nothing and are passed over until nothing else is left;
        pinned ones stay always, so the target may be missed.

        Raises:
            ValueError: NaN.
        """
        share = as_number(target_util, "target_util")
        if isnan(share):
            raise ValueError("expected a utilization, got nan")
        with self._lock:
            return list(map(SeqId, self._table.evict_to(share).tolist()))
