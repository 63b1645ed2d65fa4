"""Prefixes beyond the memory of one process: in a directory, Redis or Valkey, an object store, any other store."""

from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.links import TierStats
from kvcache.tiers.object_store import ObjectStoreTier
from kvcache.tiers.protocol import Tier
from kvcache.tiers.redis import RedisTier
from kvcache.tiers.tiers import Tiers

__all__ = ["DirectoryTier", "ObjectStoreTier", "RedisTier", "Tier", "TierStats", "Tiers"]
