"""Random models of some shapes, and caches that hold a context already."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    QuantizedCache,
)

from bench.support.report import reason_of
from kvcache.integrations.transformers import PagedCache, pack_weights

__all__ = ["BOUND", "FORMATS", "SHAPES", "decode", "fill", "is_one", "kv_bytes", "make_model", "makers", "packed",
           "prefill", "with_large_weights"]

FORMATS = ("f32", "f16", "q8", "q4")
BOUND = "attention left out"  # what the rest of a model takes, whatever the cache
SHAPES = {
    "1B": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "SmolLM2": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "tiny": {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 30,
             "num_attention_heads": 2, "num_key_value_heads": 1},
    # Four of the sixteen layers of OLMoE-1B-7B.
    "MoE": {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 4,
            "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "num_experts": 64,
            "num_experts_per_tok": 8},
}
FEW_ROWS = 256  # the most rows of a matrix that is drawn whole, so that routers choose different experts
PART = 1024  # tokens that are filled in at once


class NoCache(DynamicCache):
    """Keeps nothing, for the attention `BOUND`."""

    length = 0

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        if layer_idx == 0:
            self.length += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def crop(self, max_length: int) -> None:
        self.length += max_length if max_length < 0 else max_length - self.length


def with_large_weights(model: Any) -> Any:
    """Draw the matrices of a model anew, larger than the usual 0.02, so that its attention is not flat."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name and "conv" not in name:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif "sinks" in name:
                weight.normal_()
    return model


def _no_attention(module: Any, query: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    return query.transpose(1, 2).contiguous(), None


AttentionInterface.register(BOUND, _no_attention)
AttentionMaskInterface.register(BOUND, lambda *_, **__: None)


def make_model(shape: str, dtype: str) -> Any:
    """A network in inference; rows of a large matrix are alike, which takes no time to draw and none to multiply."""
    classes = (OlmoeConfig, OlmoeForCausalLM) if "num_experts" in SHAPES[shape] else (LlamaConfig, LlamaForCausalLM)
    config = classes[0](**SHAPES[shape], max_position_embeddings=1 << 17)
    with torch.device("meta"):
        model = classes[1](config)
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = weight.shape if len(weight) <= FEW_ROWS and weight.ndim == 2 else weight.shape[-1:]
            weight.copy_(torch.randn(drawn, generator=draw) * weight.shape[-1] ** -0.5)
    return model


def makers(config: Any, names: Collection[str] = ()) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """`(name, attn_implementation, new cache)` of every cache, or of those with one of `names` in the name."""
    made: dict[str, tuple[str, Callable[[], Any]]] = {}
    made["DynamicCache, sdpa"] = "sdpa", partial(DynamicCache, config=config)
    for backend, axis in (("quanto", 0), ("hqq", 1)):
        name = f"QuantizedCache {backend}"
        if not is_one(name, names):
            continue
        try:
            quantised = partial(QuantizedCache, backend, config=config, nbits=4, axis_key=axis, axis_value=axis)
            _try_out(quantised())
            made[name] = "sdpa", quantised
        except Exception as error:  # absent, or not for this version
            _say_once(f"not measured: {name} ({reason_of(error)})")
    for dtype in FORMATS:
        made[f"PagedCache {dtype}"] = "kvcache", partial(PagedCache, config, dtype=dtype)
    made[BOUND] = BOUND, partial(NoCache, config=config)
    for name, (implementation, make) in made.items():
        if is_one(name, names):
            yield name, implementation, make


def packed(
    model: Any, weights: Collection[str], names: Collection[str]
) -> Iterator[tuple[str, Any, str, Callable[[], Any]]]:
    """`(name, model, attn_implementation, new cache)` for each format of weights, with K and V in q4."""
    for each in weights:
        name = f"PagedCache q4, {'packed' if each == 'auto' else each} weights"
        if is_one(name, names):
            copied = copy.deepcopy(model)
            pack_weights(copied, each)
            yield name, copied, "kvcache", partial(PagedCache, model.config, dtype="q4")


def is_one(name: str, names: Collection[str]) -> bool:
    """True if one of `names` is part of `name`, or none is given."""
    return not names or any(part in name for part in names)


@cache
def _say_once(text: str) -> None:
    print(text)


def _try_out(made: Any) -> None:
    """Two steps, of which the second reads quantised states."""
    for count in (300, 1):
        made.update(*torch.zeros(2, 1, 1, count, 64), 0)


@torch.no_grad()
def fill(into: Any, model: Any, context: int) -> None:
    """Put random K and V of a context into every layer."""
    config, dtype = model.config, model.dtype
    draw = torch.Generator().manual_seed(1)
    for start in range(0, context, PART):
        count = min(PART, context - start)
        keys, values = torch.randn(2, 1, config.num_key_value_heads, count, config.head_dim, generator=draw).to(dtype)
        for layer in range(config.num_hidden_layers):
            into.update(keys, values, layer)


@torch.no_grad()
def decode(model: Any, implementation: str, cache: Any, steps: int) -> None:
    """Greedy-like steps of one token; then the cache is as before."""
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
    token = torch.tensor([[7]])
    for _ in range(steps):
        model(token, past_key_values=cache)


@torch.no_grad()
def prefill(model: Any, implementation: str, cache: Any, ids: Any) -> None:
    """A prompt up to the logits of its last token."""
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
    model(ids, past_key_values=cache, logits_to_keep=1)


def kv_bytes(cache: Any) -> int:
    """Bytes of K and V in use."""
    if isinstance(cache, PagedCache):
        return cache.stats().used_bytes
    total = 0
    for layer in cache.layers:
        for name in ("keys", "values", "_quantized_keys", "_quantized_values"):
            total += _bytes(getattr(layer, name, None))
    return total


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        inner = [getattr(value, name) for name in ("_data", "_scale", "_shift") if hasattr(value, name)]
        return sum(map(_bytes, inner)) if inner else value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0
