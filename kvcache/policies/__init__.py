"""Eviction policies of the literature, in Python: `InferenceEngine(eviction_policy=SnapKV(), kv_budget=1024)`.

They are objects with the protocol `kvcache.engine.Policy`, beside those that `kvcache.EvictionPolicy` has built in. An
engine keeps the same tokens for all heads of a layer, so scores of heads are summed where a paper chooses head by head.
"""

from kvcache.policies.keydiff import KeyDiff
from kvcache.policies.snapkv import SnapKV
from kvcache.policies.tova import TOVA

__all__ = ["TOVA", "KeyDiff", "SnapKV"]
