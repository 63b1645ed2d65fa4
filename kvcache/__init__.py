"""kvcache: the KV-cache engine for LLM inference on CPUs.

Paged blocks with copy-on-write, exact prefix reuse, token eviction and attention straight over the blocks.
"""

# First, so that what ends the imports of the command `kvcache` is one line.
from kvcache.support import command_process as _command_process  # noqa: F401

# isort: split
# Before other libraries, which read how threads wait when they are loaded.
from kvcache.kernels.threads import get_num_threads, set_num_threads, simd_level, simd_levels, use_simd

# isort: split
from kvcache.core.calibration import Calibration
from kvcache.engine import Completion, InferenceEngine, PrefixCachedEngine, SamplingParams, Segment, TokenLogprobs
from kvcache.errors import (
    BlockNotFoundError,
    CheckpointError,
    GrammarError,
    InvalidOperationError,
    KvCacheError,
    OutOfMemoryError,
    QueueFullError,
    SequenceNotFoundError,
    SnapshotError,
)
from kvcache.eviction import EvictionPolicy, EvictionStrategy
from kvcache.handle import BlockTable, CacheHandleStats, Device, KvCacheHandle
from kvcache.lists.manager import CacheManager
from kvcache.lists.manager_config import KVCacheConfig
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.handle import PagedKvCacheHandle
from kvcache.paged.merging import merge_attention
from kvcache.paged.reports import BlockId, CacheStats, CsrBlockTable, SeqId, SequenceInfo
from kvcache.prefix.cache_block import CacheBlock
from kvcache.prefix.cache_session import CacheSession
from kvcache.prefix.events.kv_events import KvEvents
from kvcache.prefix.prefill import PrefixAwarePrefill
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.prefix.prefix_stats import PrefixCacheStats
from kvcache.serving import BatchEngine, BatchStats, Request, RequestMetrics
from kvcache.states.cached_state import CachedKvState
from kvcache.states.kv_cache import KvCache
from kvcache.states.kv_cache_access import KvCacheAccess
from kvcache.states.prefix_config import PrefixCacheConfig, PrefixKvStats
from kvcache.states.prefix_kv_cache import PrefixKvCache
from kvcache.trie.policy import LFU, LRU

__version__ = "0.3.0"

__all__ = [
    "LFU",
    "LRU",
    "BatchEngine",
    "BatchStats",
    "BlockId",
    "BlockNotFoundError",
    "BlockTable",
    "CacheBlock",
    "CacheHandleStats",
    "CacheManager",
    "CacheSession",
    "CacheStats",
    "CachedKvState",
    "Calibration",
    "CheckpointError",
    "Completion",
    "CsrBlockTable",
    "Device",
    "EvictionPolicy",
    "EvictionStrategy",
    "GrammarError",
    "InferenceEngine",
    "InvalidOperationError",
    "KVCacheConfig",
    "KvCache",
    "KvCacheAccess",
    "KvCacheError",
    "KvCacheHandle",
    "KvEvents",
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
    "QueueFullError",
    "Request",
    "RequestMetrics",
    "SamplingParams",
    "Segment",
    "SeqId",
    "SequenceInfo",
    "SequenceNotFoundError",
    "SnapshotError",
    "TokenLogprobs",
    "get_num_threads",
    "merge_attention",
    "set_num_threads",
    "simd_level",
    "simd_levels",
    "use_simd",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
