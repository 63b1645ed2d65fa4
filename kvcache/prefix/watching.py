"""What servers ask of a `PrefixCache`: what was evicted, what is cached and free, and the end of all sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

from kvcache.prefix.cached_blocks import Evicted

if TYPE_CHECKING:
    from kvcache.prefix.blocks import PrefixCache

__all__ = ["close_sessions", "namespace_tokens", "num_free_and_idle", "watch_evictions"]


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
        held = [(space.name, len(index.trie.all_values(root))) for space, root in index.spaces.in_use()]
    return {name: count * cache.block_size for name, count in held}


def num_free_and_idle(cache: PrefixCache) -> tuple[int, int]:
    """How many blocks of the pool are free, and how many `idle_blocks` there are, at one time."""
    with cache._lock:
        idle = cache._cached.num_idle()
        return cache._pool.num_free, idle


def close_sessions(cache: PrefixCache) -> None:
    """Close every session, those included that an error took from their callers: for an owner who opens them all."""
    with cache._lock:
        cache._slots.release_dropped(kept=True)
