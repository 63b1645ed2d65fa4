"""Prefixes beyond the memory of one process: in a directory, in Redis or Valkey, in any store with three methods."""

from kvcache.tiers.directory import DirectoryTier
from kvcache.tiers.links import TierStats
from kvcache.tiers.protocol import Tier
from kvcache.tiers.redis import RedisTier
from kvcache.tiers.tiers import Tiers

__all__ = ["DirectoryTier", "RedisTier", "Tier", "TierStats", "Tiers"]
