"""The tensors of a network by the names of a Hugging Face checkpoint, the same for every family.

Files may use other names, stack tensors or transpose them; `FolderTensors` and `GgufCheckpoint` translate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvcache.networks.config import ModelConfig

__all__ = ["EMBEDDING", "EXPERT", "HEAD", "LAYER", "NORM", "NORMS", "ROUTER", "matrices_of", "tensors_of"]

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")

# The norms of a layer: before attention, after it, before the MLP, after it.
NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
ROUTER = ("mlp.gate.weight",)
_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def matrices_of(config: ModelConfig) -> Iterator[tuple[str, ...]]:
    """The matrices of one layer, in the order of `LayerWeights`: the names in a layer that are above each other."""
    yield _QKV
    yield ("self_attn.o_proj.weight",)
    if not config.num_experts:
        yield "mlp.gate_proj.weight", "mlp.up_proj.weight"
        yield ("mlp.down_proj.weight",)
        return
    yield ROUTER
    for i in range(config.num_experts):
        yield f"mlp.experts.{i}.gate_proj.weight", f"mlp.experts.{i}.up_proj.weight"
        yield (f"mlp.experts.{i}.down_proj.weight",)


def tensors_of(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the network with its shape. The biases of a layer's experts are one tensor."""
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    for i in range(config.num_layers):
        for name, shape in _layer(config):
            yield f"model.layers.{i}.{name}", shape
    yield NORM, (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, config.hidden_size)


def _layer(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    queries, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for norm in NORMS[config.norms]:
        if norm is not None:
            yield f"{norm}.weight", (hidden,)
    for name, rows, columns, bias in (
        ("q_proj", queries, hidden, config.qkv_bias),
        ("k_proj", pairs, hidden, config.qkv_bias),
        ("v_proj", pairs, hidden, config.qkv_bias),
        ("o_proj", hidden, queries, config.output_bias),
    ):
        yield f"self_attn.{name}.weight", (rows, columns)
        if bias:
            yield f"self_attn.{name}.bias", (rows,)
    if config.qk_norm:
        whole = config.qk_norm == "all"
        yield "self_attn.q_norm.weight", (queries if whole else config.head_dim,)
        yield "self_attn.k_norm.weight", (pairs if whole else config.head_dim,)
    if config.sinks:
        yield "self_attn.sinks", (config.num_heads,)
    sizes = (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner))
    if not experts:
        for name, rows, columns in sizes:
            yield f"mlp.{name}.weight", (rows, columns)
            if config.mlp_bias:
                yield f"mlp.{name}.bias", (rows,)
        return
    yield "mlp.gate.weight", (experts, hidden)
    if config.mlp_bias:
        yield "mlp.gate.bias", (experts,)
        for name, rows, _ in sizes:
            yield f"mlp.experts.{name}.bias", (experts, rows)
    for i in range(experts):
        for name, rows, columns in sizes:
            yield f"mlp.experts.{i}.{name}.weight", (rows, columns)
