"""kvcache: the KV-cache engine for LLM inference on CPUs.

Paged blocks with copy-on-write, exact prefix reuse, token eviction and attention straight over the blocks.
"""

from kvcache._kernels import get_num_threads, set_num_threads, simd_level, simd_levels, use_simd
from kvcache.errors import (
    BlockNotFoundError,
    InvalidOperationError,
    KvCacheError,
    OutOfMemoryError,
    SequenceNotFoundError,
    SnapshotError,
)
from kvcache.eviction import EvictionStrategy
from kvcache.handle import BlockTable, CacheHandleStats, Device, KvCacheHandle
from kvcache.paged import PagedKvCache
from kvcache.paged_handle import PagedKvCacheHandle
from kvcache.paged_info import BlockId, CacheStats, CsrBlockTable, SeqId, SequenceInfo

__version__ = "0.1.0"

__all__ = [
    "BlockId",
    "BlockNotFoundError",
    "BlockTable",
    "CacheHandleStats",
    "CacheStats",
    "CsrBlockTable",
    "Device",
    "EvictionStrategy",
    "InvalidOperationError",
    "KvCacheError",
    "KvCacheHandle",
    "OutOfMemoryError",
    "PagedKvCache",
    "PagedKvCacheHandle",
    "SeqId",
    "SequenceInfo",
    "SequenceNotFoundError",
    "SnapshotError",
    "get_num_threads",
    "set_num_threads",
    "simd_level",
    "simd_levels",
    "use_simd",
]
