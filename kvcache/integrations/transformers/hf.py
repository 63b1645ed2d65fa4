"""The names that this package takes from torch and transformers, in one place.

torch's threads (libgomp's) spin for milliseconds after each operation by default, on the cores that attention needs
next. libgomp reads how long once, when torch loads it. Imported before torch, this module makes it about 50 us, unless
the user has said otherwise; imported after it, OMP_WAIT_POLICY=PASSIVE in the environment of the process does that.
"""

from __future__ import annotations

import os
import sys

from kvcache.kernels.threads import preset

# Whether libgomp has read its variables already, and found none.
IMPORTED_LATE = "torch" in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}

try:
    with preset("GOMP_SPINCOUNT", "1000", "OMP_WAIT_POLICY"):
        import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from torch.utils._pytree import tree_map
    from torch.utils.dlpack import to_dlpack
    from transformers import AttentionInterface
    from transformers.cache_utils import (
        DYNAMIC_LAYER_TYPE_MAPPING,
        CacheLayerMixin,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        get_layer_types_and_kwargs,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import (
        AttentionMaskInterface,
        bidirectional_mask_function,
        causal_mask_function,
        eager_mask,
        sdpa_mask,
    )
    from transformers.pytorch_utils import Conv1D
except ImportError as error:
    raise ImportError(
        f"kvcache.integrations.transformers: expected torch and transformers 5, got: {error}; "
        "pip install 'kvcache-cpu[hf]'"
    ) from error

__all__ = [
    "DYNAMIC_LAYER_TYPE_MAPPING",
    "IMPORTED_LATE",
    "AttentionInterface",
    "AttentionMaskInterface",
    "CacheLayerMixin",
    "Conv1D",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "bidirectional_mask_function",
    "causal_mask_function",
    "eager_mask",
    "get_layer_types_and_kwargs",
    "safe_open",
    "save_file",
    "sdpa_attention_forward",
    "sdpa_mask",
    "to_dlpack",
    "torch",
    "tree_map",
]
