"""`Family`: a row of the table of architectures, what one fixes and what absent keys of its `config.json` mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvcache.networks.expert_kinds import ExpertKind
from kvcache.networks.recurrent_sizes import Kind

__all__ = ["Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table. A bias is None where a key decides.

    Attributes:
        model_type: the name in config.json.
        qkv_bias: of queries, keys, values; None: a key, and another one for the output projection.
        mlp_bias: of the MLP, of all experts and their router; None: a key.
        bias_keys: the keys of biases of queries, keys and values, of the output projection, of the MLP; "": no bias.
        qk_norm: how queries and keys are normed: see `ModelConfig`.
        norm, norm_bias, norms: see `ModelConfig`. A LayerNorm is an RMSNorm if files have `rms_norm_eps`, of which
            the family has a default.
        norms_less_one: whether folders store the weights of norms minus 1; "layers": but for the last norm.
        embedding_norm: see `ModelConfig`.
        embedding_by_size: whether the embedding is multiplied by the square root of the hidden size.
        activation: that of the MLP; None: the key that `activation_key` names.
        windows: which layers may have the window of `sliding_window`: none, all, or those of `layer_types`.
        chunked: whether layers have chunks, of `attention_chunk_size`, in place of windows.
        window_switch: whether windows need a true `use_sliding_window`.
        full_every: without `layer_types`, one in each `full_every` has no window; 0: the first `max_window_layers`
            have none.
        pattern_key: the key of that number.
        rope_per_kind: whether layers with and without a window have a rotary embedding each.
        mlp_gate: whether an MLP has a gate.
        prefix: what names of tensors begin with.
        attention_gate: whether each head of queries is followed by a gate of its results.
        gates: whether the results of each head, or of each channel of it, have a gate, one number; with a default of
            `gating` this key says which.
        gate_curve: see `ModelConfig`.
        rope_in_windows: which layers have no rotary embedding: none ("all" have one), those without a window
            ("windows" have one), or the latter unless `sliding_window` is null ("mixed"); "given": all, or none if the
            base in `rope_parameters` is null.
        neighbours: whether folders have the rows of queries and keys in the order of rotary embeddings that turn
            channels 2 i and 2 i + 1.
        recurrence: the kind of its layers with a state (`RecurrentSizes`); "": there are none.
        paired: see `ModelConfig`: whether layers of files have a state, and attention beside it.
        rate_axes: whether folders have rates of decays as `(1, 1, heads, 1)`.
        by_key_heads: whether folders have the projections of the delta rule in the order of its key heads.
        eps_key: the key of what norms add to the mean of squares.
        names: what files call tensors, by the stems of `names`, with or without the layer's.
        other_names: what some files call them, where they have no tensor of the usual name.
        sinks: in which layers each query head has a logit that joins the normaliser of its softmax.
        window_pairs: by how much layers with a window have more KV heads.
        first_full: whether the first layer has no window in any case, without `layer_types`.
        last_full: whether the last layer has no window in any case.
        experts: what kind of experts layers have; None: they have none.
        fused: the names in folders of queries, keys and values as one matrix, and of gate and up as one; "": they are
            apart.
        aliases: older names of the architecture.
        layers_differ: whether layers may have sizes of their own, see `LayerSizes`.
        latent: whether layers have latent attention (`LatentSizes`).
        index: whether indexers choose its tokens (`IndexSizes`), and whether folders have their turned channels in the
            order of halves or of neighbours; "": there are none.
        value_norm: whether values pass through an RMSNorm without a weight.
        layer_scales: whether each layer multiplies its result by a number.
        streams: whether the residual stream is several (`StreamSizes`).
        next_layers: the key of the number of MTP layers; "": there are none, or they are left out.
        next_prefix: what the names of their tensors begin with in folders, before the number of a layer among them;
            "": they are those of layers behind the last one.
        next_names: what folders call the tensors that only they have.
        next_like: the layers that attend as they do, without `mtp_layer_types`: those without a window, those with one,
            or the first layer.
        next_mlp: what they have behind attention, without `mtp_mlp_layer_types`; "": what the last layer has.
        next_turned: whether they have a rotary embedding in any case.
        next_raw: see `NextLayer`.
        translated: makes entries of the usual keys of a `config.json` that has others; None: it has these.
        defaults: the values of absent keys; those that the table leaves out are in `fields`. Soft caps,
            factors, `partial_rotary_factor`, `rotary_dim`, `lm_head_bias`, `long_mscale`, `use_qk_norm`,
            `layer_rope_theta` ("last": every fourth layer from the last one has no window and does not turn),
            `llama_4_scaling_beta`, `qk_scale_factor`, `post_norm_eps` and `alpha` are read only where they are here.
            Files have to say what is None.
    """

    model_type: str
    qkv_bias: bool | None = False
    mlp_bias: bool | None = False
    bias_keys: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    qk_norm: Literal["", "head", "all", "turned", "layer", "plain", "unit"] = ""
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norms: Literal["before", "after", "both", "parallel", "mixed"] = "before"
    norms_less_one: bool | Literal["layers"] = False
    embedding_norm: bool = False
    embedding_by_size: bool = False
    activation: Literal["clamped"] | None = None
    activation_key: str = "hidden_act"
    windows: Literal["none", "all", "types"] = "none"
    chunked: bool = False
    window_switch: bool = False
    full_every: int = 0
    pattern_key: str = "sliding_window_pattern"
    rope_per_kind: bool = False
    mlp_gate: bool = True
    prefix: str = "model."
    attention_gate: bool = False
    gates: Literal["", "head", "channel"] = ""
    gate_curve: Literal["sigmoid", "softplus"] = "sigmoid"
    rope_in_windows: Literal["all", "windows", "mixed", "given"] = "all"
    neighbours: bool = False
    recurrence: Kind | Literal[""] = ""
    paired: bool = False
    rate_axes: bool = False
    by_key_heads: bool = False
    eps_key: str = "rms_norm_eps"
    names: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    sinks: Literal["", "all", "windows"] = ""
    window_pairs: int = 1
    first_full: bool = False
    last_full: bool = False
    experts: ExpertKind | None = None
    fused: tuple[str, str] = ("", "")
    aliases: tuple[str, ...] = ()
    layers_differ: bool = False
    latent: bool = False
    index: Literal["", "halves", "neighbours"] = ""
    value_norm: bool = False
    layer_scales: bool = False
    streams: bool = False
    next_layers: str = ""
    next_prefix: str = ""
    next_names: Mapping[str, str] = field(default_factory=dict)
    next_like: Literal["full", "window", "first"] = "full"
    next_mlp: Literal["mlp", ""] = ""
    next_turned: bool = False
    next_raw: bool = False
    translated: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
