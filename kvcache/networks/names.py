"""The tensors of a network by the names of a Hugging Face checkpoint, the same for every family.

Files may use other names, stack tensors or transpose them; `FolderTensors` and `GgufCheckpoint` translate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.networks.config import ModelConfig
from kvcache.networks.index_sizes import IndexSizes
from kvcache.networks.latent_sizes import LatentSizes
from kvcache.networks.layer_sizes import LayerSizes
from kvcache.networks.recurrent_sizes import RecurrentSizes

__all__ = [
    "BESIDE", "DELTA_PART", "EMBEDDING", "EXPERT", "EXPERT_BIASES", "HEAD", "HEAD_BIAS", "HEAD_PART", "INPUT_NORM",
    "INPUT_PROJECTION", "INPUT_TABLE", "JOINT", "LAYER", "NEXT_NORMS", "NORM", "NORMS", "STORED", "Place",
    "bias_rows", "fused_place", "has_beside", "key_head_place", "key_head_rows", "latent_order", "matrices_of",
    "paired_norm", "paired_rows", "refuse_more_layers", "stored_tensors", "tensors_of", "unread_of",
]

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm", "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
# What gives each layer its inputs of a token: a table of the tokens, a projection of the embedding, a norm of that.
INPUT_TABLE, INPUT_PROJECTION, INPUT_NORM = (
    "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight",
    "model.per_layer_projection_norm.weight",
)
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
DELTA_PART = re.compile(r"mixer\.in_proj_(qkv|z|b|a)\.weight$")  # of layers of the delta rule
HEAD_PART = re.compile(r"self_attn\.(k_b|v_b)\.(\d+)\.weight")  # of latent attention, of a head
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
EXPERT_BIASES = re.compile(r"mlp\.experts\.(gate|up|down)_proj\.bias")  # of all experts of a layer

# What an MTP layer has beside its own tensors: a matrix of the embedding of the next token and the
# hidden row, joined; the norms of the two, and that before the head.
JOINT, NEXT_NORMS = "eh_proj.weight", ("enorm", "hnorm", "head_norm")

# The norms of a layer: before attention, after it, before the MLP, after it.
NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm", None, None, None),
}
_GATE_UP = ("gate", "up")
_ROUTER = ("mlp.gate.weight",)
_GATES = ("self_attn.gate_proj.weight",)
_INPUTS = {
    "conv": ("mixer.in_proj.weight",), "mamba": ("mixer.in_proj.weight",),
    "delta": tuple(f"mixer.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    "apart": tuple(f"mixer.in_proj_{part}.weight" for part in "qkvzba"),
}
# Matrices that stay as they are stored in every format of weights: they are small, and what they compute is exact or
# nothing: the experts of a row, or how fast a state decays.
STORED = (
    *_ROUTER, INPUT_PROJECTION, "mlp.shared_expert_gate.weight", "mixer.in_proj_b.weight", "mixer.in_proj_a.weight",
    "self_attn.indexer.weights_proj.weight",
)
# Beside experts: the norm of what the MLP adds, those before the experts and of what they add, the weight of the norm
# before the router, and the factors of the experts.
BESIDE = (
    "post_feedforward_layernorm_1.weight", "pre_feedforward_layernorm_2.weight", "post_feedforward_layernorm_2.weight",
    "router.scale", "router.per_expert_scale",
)
_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.(weight|bias)")
_PAIR_BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.([qkv])_proj\.bias")
_NORM_OF_HEADS = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_norm\.weight")


class Place(NamedTuple):
    """Where a tensor is: in which one of the file, from which row on, and that one's shape (None: the same)."""

    name: str
    first: int = 0
    shape: tuple[int, ...] | None = None


def stored_tensors(
    expected: Iterable[tuple[str, tuple[int, ...]]], place: Callable[[str], Place]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a file for `expected` ones, each once, with their shapes."""
    for name, shape in expected:
        found = place(name)
        if not found.first:  # the first part of a tensor stands for all of it
            yield found.name, found.shape or shape


def refuse_more_layers(
    found: Iterable[tuple[int, str] | None], config: ModelConfig, joint: str, key: str
) -> None:
    """Raise CheckpointError that names `key` if files have layers behind the last one, but for MTP layers.

    Args:
        found: of tensors of the files their layer and their name in it, or None.
        joint: what the name of a tensor begins with that MTP layers alone have.
    """
    layers, next_layers = set[int](), set[int]()
    for each in found:
        if each is not None and each[0] >= config.trunk_layers:
            (next_layers if each[1].startswith(joint) else layers).add(each[0])
    if more := layers - next_layers:
        raise CheckpointError(f"{key}: expected {max(more) + 1}, the layers of the files, got {config.trunk_layers}")


def fused_place(config: ModelConfig, part: str, qkv: str, gate_up: str) -> Place | None:
    """Where a matrix of a layer is in files that store queries, keys and values as one, or gate and up; "": apart.

    The biases of queries, keys and values are one vector there too.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if qkv and (found := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", part)):
        first, rows = {"q": 0, "k": queries, "v": queries + pairs}[found[1]], queries + 2 * pairs
        return Place(f"{qkv}.{found[2]}", first, (rows, hidden) if found[2] == "weight" else (rows,))
    if gate_up and (found := re.fullmatch(r"mlp\.(gate|up)_proj\.weight", part)):
        return Place(f"{gate_up}.weight", inner if found[1] == "up" else 0, (2 * inner, hidden))
    return None


def bias_rows(config: ModelConfig, name: str, place: Place) -> int | None:
    """The numbers of a bias that is a part of a vector of a file; None: it is the whole vector, or no such bias."""
    found = _PAIR_BIAS.fullmatch(name) if place.shape is not None else None
    return (config.num_heads if found[1] == "q" else config.num_kv_heads) * config.head_dim if found else None


def paired_rows(config: ModelConfig, name: str, first: int, stop: int) -> NDArray[np.int64] | None:
    """The rows of a file for the rows `first` to `stop` of a tensor, where RoPE turns neighbours in the file.

    A rotary embedding of the channels 2 i and 2 i + 1 of a head turns the channels i and i + rotary_dim / 2 of the same
    head with its rows in the order 0, 2, 4, .., 1, 3, 5, ... Queries and keys change alike, so their scores stay.

    Returns:
        int64 `(stop - first,)`; None for a tensor that is neither of queries nor of keys.
    """
    return _paired(config, np.arange(first, stop)) if _ROTATED.fullmatch(name) else None


def paired_norm(config: ModelConfig, name: str, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """The weights of a norm before RoPE, of a file where RoPE turns neighbours, in the order of `paired_rows`."""
    if not _NORM_OF_HEADS.fullmatch(name):
        return weights
    return weights.reshape(-1)[_paired(config, np.arange(weights.size))].reshape(weights.shape)


def _paired(config: ModelConfig, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of a file for these rows of all heads."""
    half = config.rotary_dim // 2
    channels = rows % config.head_dim
    order = np.where(channels < half, 2 * channels, 2 * (channels - half) + 1)
    return np.where(channels < config.rotary_dim, rows - channels + order, rows)


def latent_order(config: ModelConfig, part: str, first: int, stop: int) -> NDArray[np.int64] | None:
    """The rows of a file for rows [first, stop) of a tensor of latent attention or its indexer; None: in order."""
    assert config.latent is not None, "it is such a network"
    of_indexer = config.index is not None and part.startswith("self_attn.indexer.")
    sizes: LatentSizes | IndexSizes | None = config.index if of_indexer else config.latent
    assert sizes is not None, "an indexer has sizes"
    return sizes.file_rows(part, first, stop)


def key_head_rows(sizes: RecurrentSizes, part: str, first: int, stop: int) -> NDArray[np.int64]:
    """The rows of a file for the rows `first` to `stop` of a projection of the delta rule, where files go by key heads.

    Each key head has its query, its key, and the values and z of its value heads in one matrix, and their b and a in
    another one.

    Args:
        part: "qkv", "z", "b" or "a".

    Returns:
        int64 `(stop - first,)`.
    """
    rows, size, heads = np.arange(first, stop), sizes.size, sizes.heads // sizes.groups
    if part in ("b", "a"):
        return rows // heads * 2 * heads + rows % heads + (heads if part == "a" else 0)
    values, keys = heads * sizes.dim, sizes.groups * size
    each = 2 * (size + values)  # rows of a key head
    if part == "z":
        return rows // values * each + 2 * size + values + rows % values
    kind = np.minimum(rows // keys, 2)  # of queries, keys and values
    rest, width = rows - kind * keys, np.where(kind == 2, values, size)
    found: NDArray[np.int64] = rest // width * each + kind * size + rest % width
    return found


def key_head_place(sizes: RecurrentSizes, hidden: int, part: str, pair: str, whole: str) -> Place:
    """The place of a projection of the delta rule, where files go by key heads; see `key_head_rows`.

    Args:
        hidden: its columns.
        part: see there.
        pair, whole: the names of the matrices of b and a, and of the others.
    """
    if part in ("b", "a"):
        return Place(pair, sizes.heads if part == "a" else 0, (2 * sizes.heads, hidden))
    return Place(whole, sizes.channels if part == "z" else 0, (sizes.channels + sizes.inner, hidden))


def matrices_of(config: ModelConfig, layer: int) -> Iterator[tuple[str, ...]]:
    """The matrices of a layer: for each the names in the layer of the tensors that it has, above each other."""
    if config.mixers[layer] == "attention" and config.latent is not None:
        first = "q_a_proj" if config.latent.queries else "q_proj"
        yield f"self_attn.{first}.weight", "self_attn.kv_a_proj_with_mqa.weight"
        if config.latent.queries:
            yield ("self_attn.q_b_proj.weight",)
        if config.index is not None and config.index.own[layer]:
            yield ("self_attn.indexer.wq_b.weight",)
            yield "self_attn.indexer.wk.weight", "self_attn.indexer.weights_proj.weight"
        yield from ((f"self_attn.{part}.{head}.weight",) for part in ("k_b", "v_b") for head in range(config.num_heads))
        yield ("self_attn.o_proj.weight",)
    elif config.mixers[layer] == "attention":
        sizes = config.sizes[layer]
        read = _QKV[:1] if sizes.kv_layer is not None else _QKV if sizes.has_values else _QKV[:2]
        yield (*read, *_GATES[: bool(config.gates)])
        yield ("self_attn.o_proj.weight",)
    elif config.recurrence is not None and config.mixers[layer]:
        yield _INPUTS["apart" if config.recurrence.apart else config.recurrence.kind]
        yield ("mixer.out_proj.weight",)
    if config.mlps[layer] == "mlp" or has_beside(config):
        yield ("mlp.gate_proj.weight", "mlp.up_proj.weight")[not config.mlp_gate :]
        yield ("mlp.down_proj.weight",)
    if config.mlps[layer] == "experts":
        yield from _expert_matrices(config)
    if config.layer_inputs:
        yield ("per_layer_input_gate.weight",)
        yield ("per_layer_projection.weight",)
    if layer >= config.trunk_layers:
        yield (JOINT,)


def has_beside(config: ModelConfig) -> bool:
    """Whether experts are beside an MLP with norms of its own."""
    return config.experts is not None and config.experts.beside


def _expert_matrices(config: ModelConfig) -> Iterator[tuple[str, ...]]:
    yield _ROUTER
    if config.experts is not None and config.experts.latent:
        yield from (("mlp.latent_in.weight",), ("mlp.latent_out.weight",))
    if config.experts is not None and config.experts.shared:
        yield tuple(f"mlp.shared_expert.{name}_proj.weight" for name in _GATE_UP[not config.mlp_gate :])
        yield ("mlp.shared_expert.down_proj.weight",)
        if config.experts.shared_gate:
            yield ("mlp.shared_expert_gate.weight",)
    for i in range(config.num_experts):
        yield tuple(f"mlp.experts.{i}.{name}_proj.weight" for name in _GATE_UP[not config.mlp_gate :])
        yield (f"mlp.experts.{i}.down_proj.weight",)


def tensors_of(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the network with its shape. The biases of a layer's experts are one tensor."""
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    if size := config.layer_inputs:
        yield INPUT_TABLE, (config.vocab_size, config.num_layers * size)
        yield INPUT_PROJECTION, (config.num_layers * size, config.hidden_size)
        yield INPUT_NORM, (size,)
    for i in range(config.num_layers):
        for name, shape in _layer(config, i):
            yield f"model.layers.{i}.{name}", shape
    yield f"{NORM}.weight", (config.hidden_size,)
    if config.norm_bias:
        yield f"{NORM}.bias", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, config.hidden_size)
    if config.head_bias:
        yield HEAD_BIAS, (config.vocab_size,)


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    same = config.paired and layer % 2 == 1  # the first norm is that of the layer before
    for i, norm in enumerate(NORMS[config.norms_of(layer)]):
        if i == 0 and same:
            continue
        if norm is not None and (config.mixers[layer], config.mlps[layer])[i // 2]:
            yield f"{norm}.weight", (config.hidden_size,)
            if config.norm_bias:
                yield f"{norm}.bias", (config.hidden_size,)
    if config.mixers[layer] == "attention" and config.latent is not None:
        yield from _latent(config, config.latent)
        if config.index is not None and config.index.own[layer]:
            yield from _indexer(config, config.index, config.latent.queries)
    elif config.mixers[layer] == "attention":
        sinks = config.sinks == "all" or (config.sinks == "windows" and config.windows[layer] is not None)
        yield from _attention(config, config.sizes[layer], sinks)
    elif config.recurrence is not None and config.mixers[layer]:
        yield from _recurrence(config, config.recurrence)
    if config.mlps[layer]:
        yield from _mlps(config, config.sizes[layer].intermediate_size, config.mlps[layer] == "experts")
    hidden = config.hidden_size
    if size := config.layer_inputs:
        yield "per_layer_input_gate.weight", (size, hidden)
        yield "per_layer_projection.weight", (hidden, size)
        yield "post_per_layer_input_norm.weight", (hidden,)
    if config.layer_scales:
        yield "layer_scalar", (1,)
    if layer >= config.trunk_layers:
        yield JOINT, (hidden, 2 * hidden)
        yield from ((f"{name}.weight", (hidden,)) for name in NEXT_NORMS)


def unread_of(config: ModelConfig) -> Iterator[str]:
    """The tensors that files may have and nothing reads: of layers that read K and V of others."""
    for layer, sizes in enumerate(config.sizes):
        if sizes.kv_layer is not None:
            for part in ("k_proj", "v_proj", "k_norm"):
                yield f"model.layers.{layer}.self_attn.{part}.weight"


def _recurrence(config: ModelConfig, sizes: RecurrentSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, inner = config.hidden_size, sizes.heads, sizes.inner
    inputs = {
        "conv": (("in_proj", 3 * hidden),), "mamba": (("in_proj", inner + sizes.channels + heads),),
        "delta": (("in_proj_qkv", sizes.channels), ("in_proj_z", inner), ("in_proj_b", heads), ("in_proj_a", heads)),
    }
    parts = (("q", sizes.groups * sizes.size), ("k", sizes.groups * sizes.size), ("v", inner)) if sizes.apart else ()
    inputs["apart"] = (*((f"in_proj_{part}", rows) for part, rows in parts), *inputs["delta"][1:])
    for name, rows in inputs["apart" if parts else sizes.kind]:
        yield f"mixer.{name}.weight", (rows, hidden)
        if sizes.projection_bias:
            yield f"mixer.{name}.bias", (rows,)
    for name, rows in ((f"conv1d_{part}", rows) for part, rows in parts) if parts else (("conv1d", sizes.channels),):
        yield f"mixer.{name}.weight", (rows, 1, sizes.taps)
    if sizes.conv_bias:
        yield "mixer.conv1d.bias", (sizes.channels,)
    if sizes.kind != "conv":
        yield "mixer.rate", (heads,)
        yield "mixer.dt_bias", (heads,)
    if sizes.kind != "conv" and sizes.gating != "alone":
        yield "mixer.norm.weight", (sizes.dim if sizes.kind == "delta" else inner,)
    if sizes.kind == "mamba":
        yield "mixer.D", (heads,)
    yield "mixer.out_proj.weight", (hidden, inner)
    if sizes.projection_bias:
        yield "mixer.out_proj.bias", (hidden,)


def _attention(config: ModelConfig, sizes: LayerSizes, sinks: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    queries, pairs = config.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    own, value = sizes.kv_layer is None, sizes.value_dim or sizes.head_dim
    absent = {"k_proj": not own, "v_proj": not (own and sizes.has_values)}
    for name, rows, columns, bias in (
        ("q_proj", queries * (2 if config.attention_gate else 1), hidden, config.qkv_bias),
        ("k_proj", pairs, hidden, config.qkv_bias),
        ("v_proj", sizes.num_kv_heads * value, hidden, config.qkv_bias),
        ("o_proj", hidden, config.num_heads * value, config.output_bias),
    ):
        if absent.get(name):
            continue
        yield f"self_attn.{name}.weight", (rows, columns)
        if bias:
            yield f"self_attn.{name}.bias", (rows,)
    if config.qk_norm not in ("", "plain"):
        for name, heads, rows in (("q", config.num_heads, queries), ("k", sizes.num_kv_heads, pairs)):
            shapes = {"all": (rows,), "layer": (heads, sizes.head_dim)}
            if name == "q" or own:
                yield f"self_attn.{name}_norm.weight", shapes.get(config.qk_norm, (sizes.head_dim,))
    if config.gates:
        yield _GATES[0], (config.gates_of(sizes), hidden)
    if sinks:
        yield "self_attn.sinks", (config.num_heads,)


def _latent(config: ModelConfig, sizes: LatentSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of latent attention, those of each head apart: k_b is the transpose of the head's key matrix."""
    hidden, queries = config.hidden_size, config.num_heads * sizes.query
    if sizes.queries:
        yield "self_attn.q_a_proj.weight", (sizes.queries, hidden)
        if config.qkv_bias:
            yield "self_attn.q_a_proj.bias", (sizes.queries,)
        yield "self_attn.q_a_layernorm.weight", (sizes.queries,)
        yield "self_attn.q_b_proj.weight", (queries, sizes.queries)
    else:
        yield "self_attn.q_proj.weight", (queries, hidden)
    yield "self_attn.kv_a_proj_with_mqa.weight", (sizes.key, hidden)
    if config.qkv_bias:
        yield "self_attn.kv_a_proj_with_mqa.bias", (sizes.key,)
    yield "self_attn.kv_a_layernorm.weight", (sizes.latent,)
    for head in range(config.num_heads):
        yield f"self_attn.k_b.{head}.weight", (sizes.latent, sizes.plain)
        yield f"self_attn.v_b.{head}.weight", (sizes.value, sizes.latent)
    yield "self_attn.o_proj.weight", (hidden, config.num_heads * sizes.value)
    if config.output_bias:
        yield "self_attn.o_proj.bias", (hidden,)


def _indexer(config: ModelConfig, sizes: IndexSizes, queries: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "self_attn.indexer.wq_b.weight", (sizes.heads * sizes.dim, queries)
    yield "self_attn.indexer.wk.weight", (sizes.dim, config.hidden_size)
    yield "self_attn.indexer.k_norm.weight", (sizes.dim,)
    yield "self_attn.indexer.k_norm.bias", (sizes.dim,)
    yield "self_attn.indexer.weights_proj.weight", (sizes.heads, config.hidden_size)


def _mlps(config: ModelConfig, inner: int, has_experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, experts, sizes = config.hidden_size, config.num_experts, config.experts
    if not has_experts or has_beside(config):
        for name, rows, columns in _matrices(config, hidden, inner):
            yield f"mlp.{name}.weight", (rows, columns)
            if config.mlp_bias:
                yield f"mlp.{name}.bias", (rows,)
        if config.activation == "xielu":
            yield from (("mlp.act_fn.alpha_p", (1,)), ("mlp.act_fn.alpha_n", (1,)))
            yield from (("mlp.act_fn.beta", ()), ("mlp.act_fn.eps", ()))
    if not has_experts or sizes is None:
        return
    if sizes.beside:
        yield from zip(BESIDE, ((hidden,), (hidden,), (hidden,), (hidden,), (experts,)), strict=True)
    width = sizes.latent or hidden
    yield "mlp.gate.weight", (experts, hidden)
    if sizes.choice.bias:
        yield "mlp.expert_bias", (experts,)
    if sizes.latent:
        yield "mlp.latent_in.weight", (sizes.latent, hidden)
        yield "mlp.latent_out.weight", (hidden, sizes.latent)
    if sizes.shared:
        for name, rows, columns in _matrices(config, hidden, sizes.shared):
            yield f"mlp.shared_expert.{name}.weight", (rows, columns)
    if sizes.shared_gate:
        yield "mlp.shared_expert_gate.weight", (1, hidden)
    matrices = _matrices(config, width, sizes.size)
    if config.mlp_bias:
        yield "mlp.gate.bias", (experts,)
        for name, rows, _ in matrices:
            yield f"mlp.experts.{name}.bias", (experts, rows)
    for i in range(experts):
        for name, rows, columns in matrices:
            yield f"mlp.experts.{i}.{name}.weight", (rows, columns)


def _matrices(config: ModelConfig, hidden: int, inner: int) -> list[tuple[str, int, int]]:
    """The matrices of an MLP with their rows and columns."""
    found = [("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)]
    return found if config.mlp_gate else found[1:]
