"""Text generation from a checkpoint: the transformer, sampling, and the engine that runs both over a cache."""

from kvcache.engine.completion import Completion, TokenLogprobs
from kvcache.engine.config import ModelConfig
from kvcache.engine.engine import InferenceEngine
from kvcache.engine.model import Transformer
from kvcache.engine.prefix_cached import PrefixCachedEngine
from kvcache.engine.protocols import Attend, Model
from kvcache.engine.sampling import SamplingParams

__all__ = [
    "Attend",
    "Completion",
    "InferenceEngine",
    "Model",
    "ModelConfig",
    "PrefixCachedEngine",
    "SamplingParams",
    "TokenLogprobs",
    "Transformer",
]
