"""The text forms of a `PagedKvCache`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.core.rowformat import name_of
from kvcache.support.strip import strip

if TYPE_CHECKING:
    from kvcache.paged.cache import PagedKvCache

__all__ = ["as_html", "describe", "describe_settings"]


def describe(cache: PagedKvCache) -> str:
    """A cache as text of several lines."""
    stats = cache.stats()
    return (
        f"PagedKvCache\n"
        f"  strategy: {cache.eviction_strategy}, block size: {cache.block_size}\n"
        f"  blocks: {cache.used_block_count}/{cache.total_blocks} used ({100 * cache.utilization:.1f}%)\n"
        f"  memory: {cache.used_memory_bytes / 1e6:.2f}/{cache.total_memory_bytes / 1e6:.2f} MB\n"
        f"  sequences: {cache.num_sequences}\n"
        f"  allocs: {stats.total_allocations}, frees: {stats.total_frees}, "
        f"evictions: {stats.total_evictions}, forks: {stats.total_forks}"
    )


def describe_settings(cache: PagedKvCache) -> str:
    """A cache as text of one line."""
    apart = f", value_head_dim={cache.value_head_dim}" if cache.value_head_dim != cache.head_dim else ""
    sizes = f"num_heads={cache.num_heads}, head_dim={cache.head_dim}{apart}"
    if cache.latent is not None:
        sizes = f"latent={cache.latent}"
    separate = ", separate_layers=True" if cache.separate_layers else ""
    key, value = (
        repr(dtype) if own is None else name_of(own)
        for dtype, own in zip((cache.key_dtype, cache.value_dtype), cache.formats.pair, strict=True)
    )
    return (
        f"PagedKvCache(num_blocks={cache.total_blocks}, block_size={cache.block_size}, {sizes}, "
        f"num_layers={cache.num_layers}{separate}, "
        f"key_dtype={key}, value_dtype={value}, eviction_strategy={cache.eviction_strategy}, "
        f"used_blocks={cache.used_block_count}, num_sequences={cache.num_sequences})"
    )


def as_html(cache: PagedKvCache) -> str:
    """The blocks of a cache as a strip: free, used by one, shared by several."""
    counts = cache.reference_counts(np.arange(cache.total_blocks))
    return strip(describe_settings(cache), ("free", "used", "shared"), np.minimum(counts, 2))
