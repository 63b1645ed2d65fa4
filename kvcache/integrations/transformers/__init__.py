"""A paged, packed, prefix-shared KV cache for models of transformers, whose attention reads the packed blocks.

For example::

    import kvcache.integrations.transformers as kvt  # registers the attention "kvcache"

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvcache")
    model.generate(**inputs, cache=kvt.PagedCache(model.config, dtype="q4"))

    kvt.pack_weights(model, "q8")  # linear layers and experts multiply by packed weights: several times as fast
    kvt.save_packed(model, "model.packed")  # `load_packed` reads it into AutoModelForCausalLM.from_config(config)

    store = kvt.PrefixStore(model.config, dtype="q8", max_memory_bytes="1GiB")
    cache = store.cache_for(inputs.input_ids)
    out = model.generate(**inputs, cache=cache)
    store.keep(cache, out)

Import it before torch: torch's threads then sleep soon after each operation and leave the cores to attention. It gives
kvcache as many threads as torch has then, unless a number was chosen; after `torch.set_num_threads`, call
`kvcache.set_num_threads` too. A `PagedCache` warns, once, of numbers that differ and of torch's threads that spin.
"""

from kvcache.integrations.transformers.attention import attention
from kvcache.integrations.transformers.cache import PagedCache, PagedCacheStats
from kvcache.integrations.transformers.hf import AttentionInterface, AttentionMaskInterface
from kvcache.integrations.transformers.masks import make_mask
from kvcache.integrations.transformers.measured_model import calibrate
from kvcache.integrations.transformers.pace import take_number
from kvcache.integrations.transformers.packed_file import load_packed, save_packed
from kvcache.integrations.transformers.prefixes import PrefixStore
from kvcache.integrations.transformers.weights import PackedWeights, pack_weights

__all__ = [
    "PackedWeights", "PagedCache", "PagedCacheStats", "PrefixStore", "calibrate", "load_packed", "pack_weights",
    "save_packed",
]

AttentionInterface.register("kvcache", attention)
AttentionMaskInterface.register("kvcache", make_mask)
take_number()
