"""Text generation from a checkpoint: the transformer, sampling, and the engine that runs both over a cache."""

from kvcache.core.rowformat import Format
from kvcache.engine.cached import PrefixCachedEngine
from kvcache.engine.chat import Answer
from kvcache.engine.completion import Completion, TokenLogprobs
from kvcache.engine.documents import Segment, SegmentUse
from kvcache.engine.inference import InferenceEngine
from kvcache.networks.config import ModelConfig
from kvcache.networks.model import Transformer
from kvcache.networks.protocols import Attend, LayerAttention, Model, NetworkConfig
from kvcache.sampling.sampling import SamplingParams
from kvcache.texts.compressed_prefix import CompressedPrefix
from kvcache.texts.kv_settings import Settings
from kvcache.texts.policy import Policy
from kvcache.texts.prefix_policy import PrefixPolicy, Probe

__all__ = [
    "Answer",
    "Attend",
    "Completion",
    "CompressedPrefix",
    "Format",
    "InferenceEngine",
    "LayerAttention",
    "Model",
    "ModelConfig",
    "NetworkConfig",
    "Policy",
    "PrefixCachedEngine",
    "PrefixPolicy",
    "Probe",
    "SamplingParams",
    "Segment",
    "SegmentUse",
    "Settings",
    "TokenLogprobs",
    "Transformer",
]
