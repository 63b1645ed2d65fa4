"""Many requests at once: the engine, its scheduler, and requests that stream."""

from kvcache.serving.batch import BatchEngine
from kvcache.serving.prometheus import exposition
from kvcache.serving.request import NewTokens, Request, RequestMetrics
from kvcache.serving.stats import BatchStats, Eviction, Histogram, NamespaceStats

__all__ = [
    "BatchEngine", "BatchStats", "Eviction", "Histogram", "NamespaceStats", "NewTokens", "Request", "RequestMetrics",
    "exposition",
]
