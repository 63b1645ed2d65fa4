"""kvcache: the KV-cache engine for LLM inference on CPUs.

Paged blocks with copy-on-write, exact prefix reuse, token eviction and attention straight over the blocks.
"""

# First of all: it says how threads wait, which libraries read when they are loaded.
from kvcache._threads import get_num_threads, set_num_threads, simd_level, simd_levels, use_simd
from kvcache.blocks import PrefixCache
from kvcache.blocks_info import CacheBlock, CacheSession, PrefixCacheStats
from kvcache.blocks_prefill import PrefixAwarePrefill
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.errors import (
    BlockNotFoundError,
    CheckpointError,
    InvalidOperationError,
    KvCacheError,
    OutOfMemoryError,
    SequenceNotFoundError,
    SnapshotError,
)
from kvcache.eviction import EvictionPolicy, EvictionStrategy
from kvcache.handle import BlockTable, CacheHandleStats, Device, KvCacheHandle
from kvcache.kv_cache import CachedKvState, KvCache, KvCacheAccess
from kvcache.manager import CacheManager
from kvcache.manager_config import KVCacheConfig
from kvcache.merging import merge_attention
from kvcache.paged import PagedKvCache
from kvcache.paged_handle import PagedKvCacheHandle
from kvcache.paged_info import BlockId, CacheStats, CsrBlockTable, SeqId, SequenceInfo
from kvcache.prefix import PrefixKvCache
from kvcache.prefix_info import PrefixCacheConfig, PrefixKvStats

__version__ = "0.1.0"

__all__ = [
    "BlockId",
    "BlockNotFoundError",
    "BlockTable",
    "CacheBlock",
    "CacheHandleStats",
    "CacheManager",
    "CacheSession",
    "CacheStats",
    "CachedKvState",
    "CheckpointError",
    "CsrBlockTable",
    "Device",
    "EvictionPolicy",
    "EvictionStrategy",
    "InferenceEngine",
    "InvalidOperationError",
    "KVCacheConfig",
    "KvCache",
    "KvCacheAccess",
    "KvCacheError",
    "KvCacheHandle",
    "OutOfMemoryError",
    "PagedKvCache",
    "PagedKvCacheHandle",
    "PrefixAwarePrefill",
    "PrefixCache",
    "PrefixCacheConfig",
    "PrefixCacheStats",
    "PrefixCachedEngine",
    "PrefixKvCache",
    "PrefixKvStats",
    "SamplingParams",
    "SeqId",
    "SequenceInfo",
    "SequenceNotFoundError",
    "SnapshotError",
    "get_num_threads",
    "merge_attention",
    "set_num_threads",
    "simd_level",
    "simd_levels",
    "use_simd",
]
