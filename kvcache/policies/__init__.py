"""Eviction policies of the literature, in Python: `InferenceEngine(eviction_policy=SnapKV(), kv_budget=1024)`.

They are objects with the protocol `kvcache.engine.Policy`, beside those that `kvcache.EvictionPolicy` has built in.
With `per_head=True` each KV head keeps tokens of its own, as papers have it; without it all heads of a layer keep the
same, by the sum of their scores. `AdaKV` divides the budget of a layer among its heads. `KVzip` has another protocol:
it chooses what stays of a whole prefix that `InferenceEngine.compress` runs.
"""

from kvcache.policies.adakv import AdaKV
from kvcache.policies.expected_attention import ExpectedAttention
from kvcache.policies.keydiff import KeyDiff
from kvcache.policies.kvzip import KVzip
from kvcache.policies.ranked import Ranked
from kvcache.policies.snapkv import SnapKV
from kvcache.policies.tova import TOVA

__all__ = ["TOVA", "AdaKV", "ExpectedAttention", "KVzip", "KeyDiff", "Ranked", "SnapKV"]
