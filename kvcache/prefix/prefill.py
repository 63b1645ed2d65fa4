"""`PrefixAwarePrefill`: the three calls that a request makes on a `PrefixCache`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from kvcache.prefix.cache_session import CacheSession
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.prefix.prefix_stats import PrefixCacheStats

__all__ = ["PrefixAwarePrefill"]


class PrefixAwarePrefill:
    """The three steps of a prefill with a prefix cache: prepare, store what was computed, release.

    Attributes:
        cache: the `PrefixCache`.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    def prepare(self, tokens: Any, namespace: Hashable = None) -> tuple[CacheSession, int]:
        """`(session, uncached_start)`: a session on the cached blocks of the prompt, and the first token to compute."""
        session = self.cache.open_session(tokens, namespace)
        return session, session.matched_prefix_len

    def store_blocks(self, tokens: Any, uncached_start: int, pairs: Sequence[Any], namespace: Hashable = None) -> int:
        """Cache `(keys, values)` of the blocks from `uncached_start` on; how many of them are cached now."""
        return self.cache.store(tokens, uncached_start, pairs, namespace)

    def release_session(self, session: CacheSession) -> None:
        """Release a session; dropping it does the same."""
        self.cache.close_session(session)

    def stats(self) -> PrefixCacheStats:
        """The cache's counters now."""
        return self.cache.stats()

    def __repr__(self) -> str:
        return f"PrefixAwarePrefill({self.cache!r})"
