"""What a `PrefixCache` tells servers: what was evicted, and how much of each namespace is cached."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

from kvcache.prefix.cached_blocks import Evicted

if TYPE_CHECKING:
    from kvcache.prefix.blocks import PrefixCache

__all__ = ["namespace_tokens", "watch_evictions"]


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
