"""`PrefixCacheStats`: a frozen snapshot of the counters of a `PrefixCache`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

__all__ = ["PrefixCacheStats"]


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """A snapshot of the counters.

    Attributes:
        hit_rate: `hit_tokens` over `lookup_tokens`, 0.0 before the first lookup.
        cached_blocks, capacity_blocks: blocks in the cache, and how many it may hold.
        memory_bytes: bytes of K and V of the blocks in the cache.
        total_hits: blocks found.
        total_misses: lookups that stopped before the prompt's last full block.
        total_evictions: blocks evicted.
        hit_tokens, lookup_tokens: tokens found, of the prompts asked for. Blocks that match in part count with the
            tokens that match, if the lookup was a session, which can use them.
        miss_reasons: why lookups stopped. "evicted": the next block was cached before. "namespace": another namespace
            has it. "shorter_than_block": a cached block begins with the same tokens, but differs before its end; or
            the prompt is shorter than a block, which is no miss. "no_shared_prefix": none of these.
        bookkeeping_bytes: memory of the index beside the K and V: tokens, trie, a record per block, and a hash of
            each of the blocks evicted last.
        exact: whether no file of another version of bits was loaded: a text then has the bits of one without hits.
    """

    hit_rate: float
    cached_blocks: int
    capacity_blocks: int
    memory_bytes: int
    total_hits: int
    total_misses: int
    total_evictions: int
    hit_tokens: int
    lookup_tokens: int
    miss_reasons: Mapping[str, int]
    bookkeeping_bytes: int = 0
    exact: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "miss_reasons", MappingProxyType(dict(self.miss_reasons)))

    def _content(self) -> dict[str, Any]:
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return content | {"miss_reasons": dict(self.miss_reasons)}  # a mapping proxy is not pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self._content().values())

    def __repr__(self) -> str:
        return f"PrefixCacheStats({', '.join(f'{name}={value!r}' for name, value in self._content().items())})"
