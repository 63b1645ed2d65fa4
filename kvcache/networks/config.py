"""The configuration of a network: `config.json` of its checkpoint, read strictly.

An option that changes the network's result is either supported or refused by name. Absent keys have the defaults
of the transformers library, which wrote the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries
from kvcache.networks.expert_kinds import ExpertKind
from kvcache.networks.expert_sizes import ExpertSizes
from kvcache.networks.families import Family, family_of
from kvcache.networks.files import read_json, refuse_adapter
from kvcache.networks.latent_sizes import LatentSizes, latent_scale
from kvcache.networks.layer_sizes import LayerSizes, sizes_of
from kvcache.networks.padded_heads import check_sizes
from kvcache.networks.quantisation import quantisation_of
from kvcache.networks.recurrent_sizes import Mixer, Mlp, RecurrentSizes, layer_types_of, mixers_of, mlps_of
from kvcache.networks.rope import Rope
from kvcache.networks.rope_entries import ropes_of
from kvcache.networks.towers import text_config_of
from kvcache.support.arguments import short

__all__ = ["ModelConfig"]

_MAX_LAYERS = 1 << 16  # some fields have an element for each layer
_FULL, _SLIDING = "full_attention", "sliding_attention"  # what files call layers without a window and with one
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh",
}
_WITHOUT_GATE: dict[str, Literal["gelu_tanh", "relu2", "xielu"]] = {
    "relu2": "relu2", "gelu_pytorch_tanh": "gelu_tanh", "xielu": "xielu",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Its features are fields; `families` says which architecture has which.

    Attributes:
        architecture: the class name in the checkpoint, e.g. "LlamaForCausalLM"; that of the text network, if it has
            more than one.
        intermediate_size: of the MLP, or of one expert.
        num_heads, num_kv_heads, head_dim: query heads, KV heads (a divisor), channels of one head. With `latent` one KV
            head, of the channels that a cache has.
        latent: the sizes of latent attention; None: heads have K and V of their own.
        sizes: those of each layer, which may be others.
        max_position_embeddings: positions are in [0, max_position_embeddings).
        rope: the rotary position embedding.
        window_rope: that of the layers with a window, if it is another one.
        rotary_dim: the channels of a head that it turns, the first ones.
        window_rotary_dim: those in layers with a window.
        rotated: which layers have one.
        mixers: what mixes the tokens of each layer: attention, a recurrence with a state, or nothing.
        recurrence: the sizes of the layers with a state; None: there are none.
        windows: for each layer the number of tokens that a query sees, itself among them; None: all tokens before it.
        attention_scale: of the scores; None: `head_dim**-0.5`.
        attention_softcap: scores become `cap * tanh(score / cap)`; None: they stay.
        sinks: whether each query head has a logit that joins the normaliser of its softmax.
        attention_gate: whether each head of queries is followed by a gate, whose sigmoid its results are multiplied by.
        head_gates: whether the results of each head are multiplied by the sigmoid of one number.
        qkv_bias, output_bias, mlp_bias: which projections add a bias.
        value_norm: whether values pass through an RMSNorm without a weight.
        qk_norm: how queries and keys pass through an RMSNorm before RoPE: not, each head alone, or all heads at once;
            "turned": each head alone after it.
        norm: of the residual stream: an RMSNorm or a LayerNorm; `norm_bias`: whether that adds a bias.
        norms: where each layer's norms are: before attention and MLP, after them, or both; "parallel": one before
            both, which then take the same rows.
        mlps: what follows the mixer of each layer: an MLP, experts, or nothing.
        mlp_gate: whether an MLP has a gate; if not, it is `down(activation(up(x)))`.
        activation: of the gate in the MLP, or of an MLP without one; "relu2" is `max(x, 0)**2`, "xielu" has
            four numbers of its own in each layer.
            "clamped" is `gate * sigmoid(alpha * gate) * (up + 1)`, with gate and up
            limited to `clamped_limit`, and `clamped_alpha` as alpha.
        experts_per_token: of `num_experts`; 0: there are none.
        experts: what layers with experts have beside their number; None: there are none.
        layer_inputs: the size of what each layer is given of each token beside the residual stream; 0: nothing.
        layer_scales: whether each layer multiplies its result by a number.
        embedding_scale, residual_scale, logit_scale: multiply the embedding, what a layer's parts add, the logits.
        logit_softcap: as `attention_softcap`, for the logits.
        tie_word_embeddings: whether the output matrix is the embedding, unless the files have another one.
        eos_token_ids: tokens that end a text.
        next_layers: how many MTP layers the files have, behind the last one.
        draft_layers: how many of the layers are such ones: 0, or 1 by `with_draft_layer`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: LatentSizes | None
    sizes: tuple[LayerSizes, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    window_rope: Rope | None
    rotary_dim: int
    window_rotary_dim: int
    rotated: tuple[bool, ...]
    mixers: tuple[Mixer, ...]
    recurrence: RecurrentSizes | None
    windows: tuple[int | None, ...]
    attention_scale: float | None
    attention_softcap: float | None
    sinks: bool
    attention_gate: bool
    head_gates: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    value_norm: bool
    qk_norm: Literal["", "head", "all", "turned"]
    norm: Literal["rms", "layer"]
    norm_bias: bool
    norms: Literal["before", "after", "both", "parallel"]
    mlps: tuple[Mlp, ...]
    mlp_gate: bool
    activation: Literal["silu", "gelu_tanh", "relu2", "xielu", "clamped"]
    clamped_alpha: float
    clamped_limit: float
    num_experts: int
    experts_per_token: int
    experts: ExpertSizes | None
    layer_inputs: int
    layer_scales: bool
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float | None
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    next_layers: int = 0
    draft_layers: int = 0

    @property
    def trunk_layers(self) -> int:
        """The layers of the network itself."""
        return self.num_layers - self.draft_layers

    def head_parts(self, layer: int) -> tuple[int, ...]:
        """The channels of a key of a layer: those of a head, or of a latent and of what turns beside it."""
        latent = self.latent
        return (self.sizes[layer].head_dim,) if latent is None else (latent.latent, latent.turned)

    def with_draft_layer(self) -> ModelConfig:
        """This network and the first MTP layer, behind its last one; itself if it has none."""
        full = [i for i, (mixer, window) in enumerate(zip(self.mixers, self.windows, strict=True))
                if mixer == "attention" and window is None]
        if not self.next_layers or self.draft_layers or not full:
            return self
        like, last = full[-1], self.mlps[-1]
        return replace(
            self, num_layers=self.num_layers + 1, draft_layers=1, sizes=(*self.sizes, self.sizes[like]),
            windows=(*self.windows, None), rotated=(*self.rotated, self.rotated[like]),
            mixers=(*self.mixers, self.mixers[like]), mlps=(*self.mlps, last),
        )

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """Read `config.json`, and `generation_config.json` if it exists, from a checkpoint directory.

        Raises:
            FileNotFoundError: there is no `config.json`.
            CheckpointError: not JSON, a key is missing or of the wrong type, an option is not supported, or the
                directory has an adapter.
        """
        directory = Path(directory)
        refuse_adapter(directory)
        config = read_json(directory / "config.json", infinity=True)
        generation = directory / "generation_config.json"
        # Both files may hold `eos_token_id`; generation_config.json takes precedence.
        if generation.exists() and (eos := read_json(generation).get("eos_token_id")) is not None:
            config = {**config, "eos_token_id": eos}
        return cls.from_dict(config)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Validate the contents of a `config.json`. Raises CheckpointError naming the key and its value."""
        if not isinstance(config, Mapping):
            raise TypeError(f"config: expected a Mapping, got {type(config).__name__}")
        config = text_config_of(config)
        architecture, family = family_of(config)
        read = Entries(config, defaults=family.defaults)
        hidden_size = read.size("hidden_size")
        num_heads = read.size("num_attention_heads")
        num_kv_heads = _derived(config, family, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"num_key_value_heads: expected a divisor of {num_heads} attention heads, got {num_kv_heads}"
            )
        latent = LatentSizes.of(read) if family.latent else None
        head_dim = latent.key if latent else _derived(config, family, "head_dim", hidden_size // num_heads, at_least=0)
        num_kv_heads = 1 if latent else num_kv_heads
        if head_dim % 2 or not head_dim:
            raise CheckpointError(f"head_dim: expected an even number (RoPE turns pairs), got {head_dim}")
        positions = read.size("max_position_embeddings")
        listed = layer_types_of(config, family.recurrence)
        num_layers = read.size("num_hidden_layers", len(listed or ()) or None, most=_MAX_LAYERS)
        _refuse_unsupported(config, family, read)
        if family.recurrence and family.windows != "none":
            listed = listed or [_kind_of_lfm3(i) for i in range(num_layers)]
            listed, config = _without_windows(listed), {**config, "layer_types": _windows_alone(listed)}
        mixers, recurrence = mixers_of(config, listed, family.recurrence, num_layers), None
        if family.recurrence:
            recurrence = RecurrentSizes.of(family.recurrence, read, hidden_size) if "state" in mixers else None
        if family.recurrence and family.windows == "none":
            config = {key: value for key, value in config.items() if key != "layer_types"}  # which name no windows
        if "layer_rope_theta" in family.defaults:
            config = _with_bases(config, num_layers)
        windows = _windows(config, family, read, positions, num_layers)
        qkv_bias, output_bias, mlp_bias = _biases(read, family)
        kind, (num_experts, size) = family.experts, _experts(read, family, listed or [])
        experts = kind.sizes(read) if kind and num_experts else None
        mlps = mlps_of(listed, mixers, experts=num_experts > 0)
        most_experts = 0 if experts is None else experts.choice.open_to(num_experts)
        sizes = sizes_of(config, family, windows, num_heads, LayerSizes(num_kv_heads, head_dim, size))
        if latent is not None:
            check_sizes((latent.latent, latent.turned), "kv_lora_rank")
        for dim in {each.head_dim for each in sizes} if latent is None else ():
            check_sizes((dim,), "head_dim")
        dims = {window is None: layer.head_dim for layer, window in zip(sizes, windows, strict=True)}
        if latent is not None:
            dims = {True: latent.turned, False: latent.turned}
        ropes = ropes_of(config, family, positions, dims.get(True, head_dim), dims.get(False, head_dim))
        scale = _attention_scale(read, head_dim) if latent is None else latent_scale(latent, _rope_of(config, family))
        return cls(
            architecture=architecture,
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            latent=latent,
            sizes=sizes,
            max_position_embeddings=positions,
            rms_norm_eps=read.number(family.eps_key, 1e-6),
            rope=ropes.rope,
            window_rope=ropes.window_rope,
            rotary_dim=ropes.rotary_dim,
            window_rotary_dim=ropes.window_rotary_dim,
            rotated=_rotated(Entries(config, defaults=family.defaults), family, windows),
            mixers=mixers,
            recurrence=recurrence,
            windows=windows,
            attention_scale=scale,
            attention_softcap=_cap(read, family, "attn_logit_softcapping"),
            sinks=family.sinks,
            attention_gate=family.attention_gate,
            head_gates=family.head_gates,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            value_norm=family.value_norm,
            qk_norm=_qk_norm(read, family),
            norm=family.norm,
            norm_bias=family.norm_bias,
            norms=family.norms,
            mlps=_with_mlps(mlps, read, kind) if kind and num_experts else mlps,
            mlp_gate=family.mlp_gate,
            activation=family.activation or _activation(read, family),
            clamped_alpha=read.number("swiglu_alpha", 1.702),
            clamped_limit=read.number("swiglu_limit", 7.0),
            num_experts=num_experts,
            experts_per_token=read.size(kind.per_token, most=most_experts) if kind and num_experts else 0,
            experts=experts,
            layer_inputs=_layer_inputs(read),
            layer_scales=family.layer_scales,
            embedding_scale=_embedding_scale(read, family, hidden_size),
            residual_scale=_residual_scale(read, family, num_layers),
            logit_scale=_logit_scale(read, family, hidden_size),
            logit_softcap=_cap(read, family, "final_logit_softcapping"),
            tie_word_embeddings=read.flag("tie_embedding", read.flag("tie_word_embeddings", False)),
            eos_token_ids=_eos(config),
            next_layers=_next_layers(read, family),
        )


def _qk_norm(read: Entries, family: Family) -> Literal["", "head", "all", "turned"]:
    """The norm of queries and keys, which some families have in some networks alone."""
    absent = read.default("use_qk_norm") is not None and not read.flag("use_qk_norm", True)
    return "" if absent else family.qk_norm


def _next_layers(read: Entries, family: Family) -> int:
    """The layers behind the last one, of families whose names of them are known."""
    return read.size(family.next_layers, 0, at_least=0) if family.next_layers else 0


def _refuse_unsupported(config: Mapping[str, Any], family: Family, read: Entries) -> None:
    """Raise CheckpointError for an option that changes the result and is not implemented."""
    quantisation = quantisation_of(config)
    packed = {stack.packed for stack in family.experts.stacks} if family.experts else set[str]()
    if quantisation is not None and quantisation.method == "mxfp4" and "mxfp4" not in packed:
        raise CheckpointError(f"quantization_config: expected mxfp4 for gpt_oss alone, got it for {family.model_type}")
    if family.attention_gate and not read.flag("attn_output_gate", True):
        raise CheckpointError("attn_output_gate: expected true, got false")
    for key in ("use_attention_gate", "use_sandwich_norm") if family.head_gates else ():
        if not read.flag(key, True):
            raise CheckpointError(f"{key}: expected true, got false")
    if family.model_type == "minicpm" and read.get("sparse_config") is not None:
        raise CheckpointError(f"sparse_config: expected null, got {short(read.get('sparse_config'))}")
    if read.get("clip_qkv") is not None:
        raise CheckpointError(f"clip_qkv: expected null, got {short(read.get('clip_qkv'))}")
    bidirectional = read.get("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):  # of the parts of an image: texts have none
        raise CheckpointError(f"use_bidirectional_attention: expected false or 'vision', got {short(bidirectional)}")


def _derived(config: Mapping[str, Any], family: Family, key: str, size: int, *, at_least: int = 1) -> int:
    """A size that others give: null means `size`; an absent key means the family's default, if it has one."""
    default = size if key in config else family.defaults.get(key, size)
    return Entries(config).size(key, default, at_least=at_least)


def _activation(read: Entries, family: Family) -> Literal["silu", "gelu_tanh", "relu2", "xielu"]:
    key, known = family.activation_key, _ACTIVATIONS if family.mlp_gate else _WITHOUT_GATE
    name = read.get(key)
    if name is None:
        name = read.default(key) or "silu"
    if not isinstance(name, str) or name not in known:
        raise CheckpointError(f"{key}: expected one of {', '.join(known)}, got {short(name)}")
    return known[name]


def _cap(read: Entries, family: Family, key: str) -> float | None:
    """A soft cap; None in families without it."""
    return read.cap(key) if key in family.defaults else None


def _factor(read: Entries, family: Family, key: str) -> float:
    """A positive factor; 1 in families without it."""
    found = read.number(key) if key in family.defaults else 1.0
    if not found:
        raise CheckpointError(f"{key}: expected a positive number, got {found}")
    return found


def _embedding_scale(read: Entries, family: Family, hidden_size: int) -> float:
    if family.embedding_by_size:
        return math.sqrt(hidden_size)
    return _factor(read, family, "embedding_multiplier") * _factor(read, family, "scale_emb")


def _residual_scale(read: Entries, family: Family, num_layers: int) -> float:
    if "scale_depth" in family.defaults:  # MiniCPM
        return _factor(read, family, "scale_depth") / math.sqrt(num_layers)
    return _factor(read, family, "residual_multiplier")


def _logit_scale(read: Entries, family: Family, hidden_size: int) -> float:
    if "dim_model_base" in family.defaults:  # MiniCPM
        return _factor(read, family, "dim_model_base") / hidden_size
    return _factor(read, family, "logit_scale") / _factor(read, family, "logits_scaling")


def _attention_scale(read: Entries, head_dim: int) -> float | None:
    """The factor of the scores; None for the usual one."""
    scale = None
    if read.default("query_pre_attn_scalar"):
        scalar = read.cap("query_pre_attn_scalar")
        scale = None if scalar is None else 1 / math.sqrt(scalar)
    elif read.default("attention_multiplier"):
        scale = read.number("attention_multiplier")
    return None if scale == 1 / math.sqrt(head_dim) else scale


def _biases(read: Entries, family: Family) -> tuple[bool, bool, bool]:
    """Whether queries, keys and values, the output projection, and the MLP have biases."""
    inputs, output, mlp = ((read.flag(key, False) if key else False) for key in family.bias_keys)
    return (
        inputs if family.qkv_bias is None else family.qkv_bias,
        output if family.qkv_bias is None else False,
        mlp if family.mlp_bias is None else family.mlp_bias,
    )


def _with_bases(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The entries of Granite with windows: the base of each layer's RoPE, 0 for none, as one for each kind of layer."""
    kinds = config.get("layer_types") or [_SLIDING if i % 4 else _FULL for i in range(num_layers)]
    flat = config.get("rope_parameters") or {}
    if not isinstance(kinds, list):
        raise CheckpointError(f"layer_types: expected a list, got {short(kinds)}")
    if not isinstance(flat, dict):
        raise CheckpointError(f"rope_parameters: expected an object, got {short(flat)}")
    usual = flat.get("rope_theta", config.get("rope_theta", 10000.0))
    bases = config.get("layer_rope_theta") or [usual] * num_layers
    if not isinstance(bases, list) or len(bases) != num_layers or not all(type(x) in (int, float) for x in bases):
        expected = f"a number for each of {num_layers} layers"
        raise CheckpointError(f"layer_rope_theta: expected {expected}, got {short(bases)}")
    found = {}
    for kind in (_FULL, _SLIDING):
        own = {base for base, each in zip(bases, kinds, strict=False) if each == kind and base}
        if len(own) > 1:
            raise CheckpointError(f"layer_rope_theta: expected one base for each kind of layer, got {short(bases)}")
        found[kind] = {"rope_type": "default", **flat, "rope_theta": (*own, usual)[0]}
    turned = [int(base != 0) for base in bases]
    return {**config, "layer_types": kinds, "rope_parameters": found, "no_rope_layers": turned}


def _rotated(read: Entries, family: Family, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Which layers have a rotary embedding."""
    if family.rope_in_windows == "windows" or (
        family.rope_in_windows == "mixed" and read.get("sliding_window") is not None
    ):
        return tuple(window is not None for window in windows)
    return _rotated_by_list(read, len(windows))


def _position_type(read: Entries) -> str:
    """The kind of all position embeddings: "rope" in families without a key for it, "nope" for none."""
    if read.default("position_embedding_type") is None:
        return "rope"
    found = read.get("position_embedding_type")
    if found not in (None, "rope", "nope"):
        raise CheckpointError(f"position_embedding_type: expected rope or nope, got {short(found)}")
    return "rope" if found == "rope" else "nope"


def _rotated_by_list(read: Entries, num_layers: int) -> tuple[bool, ...]:
    """The layers that `no_rope_layers` lists by a 1 (it has one) or 0; all in families without it."""
    interval = read.default("no_rope_layer_interval")
    if interval is None and read.default("layer_rope_theta") is None:
        return (_position_type(read) == "rope",) * num_layers
    listed = read.get("no_rope_layers")
    if listed is None:
        interval = read.size("no_rope_layer_interval")
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if not isinstance(listed, list) or len(listed) < num_layers or not all(value in (0, 1) for value in listed):
        raise CheckpointError(f"no_rope_layers: expected 0 or 1 for each of {num_layers} layers, got {short(listed)}")
    return tuple(bool(value) for value in listed[:num_layers])


def _kind_of_lfm3(layer: int) -> str:
    """The kind of a layer where files do not list them."""
    return {2: _FULL, 0: _SLIDING}.get(layer % 4, "conv") if layer else "conv"


def _without_windows(listed: list[Any]) -> list[Any]:
    """The kinds of layers, of which some keep a state, without their windows."""
    return [_FULL if each == _SLIDING else each for each in listed]


def _windows_alone(listed: list[Any]) -> list[Any]:
    """The kinds of layers, of which some keep a state, as far as they say which have a window."""
    return [each if each == _SLIDING else _FULL for each in listed]


def _windows(
    config: Mapping[str, Any], family: Family, read: Entries, positions: int, num_layers: int
) -> tuple[int | None, ...]:
    """The window of each layer. One that is not shorter than the longest text is none, unless it says which RoPE."""
    slides = not family.window_switch or read.flag("use_sliding_window", False)
    window = config.get("sliding_window", family.defaults.get("sliding_window")) if slides else None
    if window is not None and (type(window) is not int or window < 1):
        raise CheckpointError(f"sliding_window: expected a positive whole number or null, got {short(window)}")
    kinds = config.get("layer_types")
    allowed = ["full_attention"] if window is None else ["full_attention", "sliding_attention"]
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == num_layers and all(kind in allowed for kind in kinds)
    ):
        expected = " or ".join(allowed)
        raise CheckpointError(f"layer_types: expected {expected} for each of {num_layers} layers, got {short(kinds)}")
    says_rope = family.rope_per_kind or family.rope_in_windows != "all"
    if window is None or (window >= positions and not says_rope):
        return (None,) * num_layers
    window = min(window, positions)
    if family.windows == "none":
        raise CheckpointError(f"sliding_window: expected none, or at least all {positions} positions, got {window}")
    if family.windows == "all":
        if kinds is not None and "full_attention" in kinds:
            raise CheckpointError(f"layer_types: expected sliding_attention for all layers, got {short(kinds)}")
        return (window,) * num_layers
    if kinds is not None:
        with_window = [kind == "sliding_attention" for kind in kinds]
    elif family.full_every:
        with_window = _pattern(read, family.full_every, num_layers)
    elif read.default("no_rope_layer_interval"):
        with_window = [not turns for turns in _rotated_by_list(read, num_layers)]
    else:
        first = read.size("max_window_layers", 28, at_least=0)
        with_window = [i >= first for i in range(num_layers)]
    if family.layers_differ:
        with_window[-1] = False
    return tuple(window if slide else None for slide in with_window)


def _pattern(read: Entries, full_every: int, num_layers: int) -> list[bool]:
    """Which layers have a window by `sliding_window_pattern`: all but every so manyth, or those that are L of L and G.

    The letters repeat. Of EXAONE 4, whose last layer has no window in any case.
    """
    found = read.get("sliding_window_pattern")
    if not isinstance(found, str):
        every = read.size("sliding_window_pattern", full_every)
        return [(i + 1) % every != 0 for i in range(num_layers)]
    letters = [found[i % len(found)] for i in range(num_layers)] if found else []
    if not set(letters) <= {"L", "G"} or letters[-1:] != ["G"]:
        expected = "a positive whole number, or letters L and G, with G for the last layer"
        raise CheckpointError(f"sliding_window_pattern: expected {expected}, got {short(found)}")
    return [letter == "L" for letter in letters]


def _rope_of(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The entry of the rotary embedding, which `ropes_of` has read."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or family.defaults.get("rope_parameters")
    return found or {}


def _experts(read: Entries, family: Family, listed: list[Any]) -> tuple[int, int]:
    """The number of experts in every layer that has them, and the intermediate size of MLPs."""
    if family.experts is not None:
        experts = family.experts.number(read, listed)
        return experts, family.experts.mlp_size(read, experts)
    size = read.size("intermediate_size")
    return 0, _adjusted(read, size) if read.default("block_multiple_of") else size


def _with_mlps(mlps: tuple[Mlp, ...], read: Entries, kind: ExpertKind) -> tuple[Mlp, ...]:
    """The same with an MLP in the place of experts in layers that have none."""
    has = kind.has_experts(read, len(mlps))
    return tuple(each if each != "experts" or own else "mlp" for each, own in zip(mlps, has, strict=True))


def _adjusted(read: Entries, size: int) -> int:
    """The intermediate size of LFM2: two thirds of that of the files, times a factor, in whole multiples."""
    size = read.size("block_ff_dim", size)
    if not read.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = read.size("block_multiple_of")
    found = -(-int(read.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3)) // multiple) * multiple
    if not found:
        raise CheckpointError(f"intermediate_size: expected one of which two thirds are left, got {size}")
    return found


def _layer_inputs(read: Entries) -> int:
    """The size of the inputs of each layer, in families that have them; 0 or null: there are none."""
    key = "hidden_size_per_layer_input"
    if read.default(key) is None or read.get(key) in (None, 0):
        return 0
    rows, tokens = read.size("vocab_size_per_layer_input"), read.size("vocab_size")
    if rows != tokens:
        raise CheckpointError(f"vocab_size_per_layer_input: expected vocab_size, {tokens}, got {rows}")
    return read.size(key)


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids in `eos_token_id` (an id, a list or null), ascending."""
    eos = config.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int and 0 <= token < 2**32 for token in ids):
        raise CheckpointError(f"eos_token_id: expected token ids, got {short(eos)}")
    return tuple(sorted(set(ids)))
