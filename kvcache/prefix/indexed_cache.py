"""`IndexedCache`: what both prefix caches report of their index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from kvcache.prefix.index.prefix_index import PrefixIndex

__all__ = ["IndexedCache"]

Self = TypeVar("Self", bound="IndexedCache")


class IndexedCache(ABC):
    """A cache over a `PrefixIndex`, whose items are blocks or entries.

    `close`, or `with`, closes the file that `load` reads from.
    """

    @property
    @abstractmethod
    def _index(self) -> PrefixIndex:
        """The index of what is cached now."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""

    def close(self) -> None:
        """Forget everything, as `clear`: a file that was loaded is closed. The cache may be used again."""
        self.clear()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cached."""
        return len(self) == 0

    @property
    def hits(self) -> int:
        """Blocks found by a `PrefixCache`; lookups of a `PrefixKvCache` that found something."""
        return self._index.hits

    @property
    def misses(self) -> int:
        """Lookups that ended before the prompt's last full block; of a `PrefixKvCache`, those that found nothing."""
        return self._index.misses

    @property
    def hit_tokens(self) -> int:
        """Tokens found by all lookups. A session counts the first tokens of its tail block, `lookup` full blocks."""
        return self._index.hit_tokens

    @property
    def lookup_tokens(self) -> int:
        """Tokens of all prompts that were looked up."""
        return self._index.lookup_tokens

    @property
    def hit_rate(self) -> float:
        """`hit_tokens` over `lookup_tokens`; 0.0 before the first lookup."""
        return self.hit_tokens / max(self.lookup_tokens, 1)

    @property
    def evictions(self) -> int:
        """Blocks evicted by a `PrefixCache`; entries evicted by a `PrefixKvCache`."""
        return self._index.evictions
