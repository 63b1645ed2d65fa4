"""Eviction of sequences, which callers start: the methods of `PagedKvCache` about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvcache.core.arguments import as_integer, as_share
from kvcache.eviction import EvictionStrategy
from kvcache.paged.reports import SeqId
from kvcache.paged.seq_ids import as_seq_id

if TYPE_CHECKING:
    from kvcache.paged.cache import PagedKvCache

__all__ = [
    "evict",
    "evict_to_threshold",
    "pin",
    "select_eviction_target",
    "set_priority",
    "unpin",
    "with_eviction_strategy",
    "with_eviction_threshold",
]

Self = TypeVar("Self", bound="PagedKvCache")


def with_eviction_strategy(cache: Self, strategy: EvictionStrategy) -> Self:
    """Choose which sequence is evicted first; returns the cache."""
    if not isinstance(strategy, EvictionStrategy):
        raise TypeError(f"strategy: expected an EvictionStrategy, got {type(strategy).__name__}")
    cache._evictor.order_by(strategy)
    return cache


def with_eviction_threshold(cache: Self, threshold: float) -> Self:
    """Set the share of blocks in use from which `needs_eviction` is true, clamped to [0, 1]; returns the cache."""
    cache._threshold = min(1.0, max(0.0, as_share(threshold, "threshold")))
    return cache


def set_priority(cache: PagedKvCache, seq_id: int, priority: int) -> None:
    """Set a priority in [0, levels): under `EvictionStrategy.Priority(levels)` the lowest is evicted first."""
    cache._evictor.set_priority(as_seq_id(seq_id), as_integer(priority, "priority"))


def pin(cache: PagedKvCache, seq_id: int) -> None:
    """Never evict this sequence until it was unpinned as often as pinned."""
    cache._evictor.pin(as_seq_id(seq_id))


def unpin(cache: PagedKvCache, seq_id: int) -> None:
    """Undo one `pin`; InvalidOperationError if the sequence is not pinned."""
    cache._evictor.unpin(as_seq_id(seq_id))


def select_eviction_target(cache: PagedKvCache) -> SeqId | None:
    """The sequence that `evict` would take; None when there is none that is not pinned."""
    seq_id = cache._evictor.victim()
    return None if seq_id is None else SeqId(seq_id)


def evict(cache: PagedKvCache) -> SeqId:
    """Free the eviction target and return its id; InvalidOperationError if all sequences are pinned."""
    return SeqId(cache._evictor.evict())


def evict_to_threshold(cache: PagedKvCache, target_util: float) -> list[SeqId]:
    """Evict until `utilization` is at most `target_util`; the evicted ids, in order.

    Sequences whose blocks are all shared would free nothing and are evicted last. Pinned ones always stay, so the
    utilization may remain above the target.
    """
    return list(map(SeqId, cache._evictor.evict_to(as_share(target_util, "target_util")).tolist()))
