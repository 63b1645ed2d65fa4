"""A paged, packed, prefix-shared KV cache for models of transformers, whose attention reads the packed blocks.

    import kvcache.integrations.transformers as kvt  # registers the attention "kvcache"

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvcache")
    model.generate(**inputs, past_key_values=kvt.PagedCache(model.config, dtype="q4"))
"""

from kvcache.integrations.transformers.attention import attention
from kvcache.integrations.transformers.cache import PagedCache, PagedCacheStats
from kvcache.integrations.transformers.hf import AttentionInterface, AttentionMaskInterface, torch
from kvcache.integrations.transformers.masks import make_mask

__all__ = ["PagedCache", "PagedCacheStats"]

AttentionInterface.register("kvcache", torch.compiler.disable(attention))
AttentionMaskInterface.register("kvcache", make_mask)
