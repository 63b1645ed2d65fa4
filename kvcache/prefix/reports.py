"""What a `PrefixCache` reports: its memory and counters, the cached blocks, and, for servers, what leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcache.core.strip import strip
from kvcache.prefix.cached_blocks import Evicted
from kvcache.prefix.files import fetch_all
from kvcache.prefix.sessions import PrefixCacheStats

if TYPE_CHECKING:
    from kvcache.prefix.blocks import PrefixCache

__all__ = [
    "as_html", "block_ids", "memory", "namespace_tokens", "num_free_and_idle", "references", "stats", "watch_evictions",
]  # fmt: skip


def block_ids(cache: PrefixCache) -> list[int]:
    """The cached blocks, ascending."""
    with cache._lock:
        fetch_all(cache._index)
        return [int(block) for block in cache._slots.records()["named"].nonzero()[0]]


def references(cache: PrefixCache) -> npt.NDArray[np.int32]:
    """References that this cache holds on each block of the pool, int32 `(num_blocks,)`."""
    with cache._lock:
        return cache._slots.counts(references=True)


def memory(cache: PrefixCache) -> dict[str, int]:
    """Bytes: "kv" of all blocks of the pool, "bookkeeping" of the index and the pool's records, and "scratch": 0.

    Over the blocks of a `PagedKvCache` "kv" is 0: `memory` of that cache counts them.
    """
    with cache._lock:
        return cache._cached.memory()


def stats(cache: PrefixCache) -> PrefixCacheStats:
    """The counters now."""
    with cache._lock:
        index = cache._index
        return PrefixCacheStats(
            cache.hit_rate, len(cache), cache.capacity, cache.memory_bytes, index.hits, index.misses, index.evictions,
            index.hit_tokens, index.lookup_tokens, index.reasons, cache._cached.memory()["bookkeeping"],
        )  # fmt: skip


def as_html(cache: PrefixCache) -> str:
    """The blocks as a strip: those that may still be cached, cached ones, and those that sessions hold."""
    with cache._lock:
        held = cache._slots.counts() > 0
        cached = int(np.count_nonzero((cache._slots.records()["named"] != 0) & ~held))
    in_use = int(np.count_nonzero(held))
    states = np.repeat([0, 1, 2], [max(0, cache.capacity - cached - in_use), cached, in_use])
    return strip(repr(cache), ("free", "cached", "in use"), states)


def watch_evictions(cache: PrefixCache) -> deque[Evicted]:
    """What is evicted from now on, in this order; the caller takes it out."""
    with cache._lock:
        if cache._cached.evicted is None:
            cache._cached.evicted = deque()
        return cache._cached.evicted


def namespace_tokens(cache: PrefixCache) -> dict[Hashable, int]:
    """How many tokens of each namespace are cached; takes time in proportion to their blocks."""
    with cache._lock:
        index = cache._index
        held = [(space.name, len(index.trie.all_values(space.root))) for space in index.spaces()]
    return {name: count * cache.block_size for name, count in held}


def num_free_and_idle(cache: PrefixCache) -> tuple[int, int]:
    """How many blocks of the pool are free, and how many `idle_blocks` there are, at one time."""
    with cache._lock:
        idle = cache._cached.num_idle()
        return cache._pool.num_free, idle
