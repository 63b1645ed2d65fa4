"""The configuration of a network in a GGUF file, in the keys of a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from kvcache.errors import CheckpointError
from kvcache.gguf.architectures import ARCHITECTURES, CAPS, NEXT_LAYERS, SCALES, Architecture
from kvcache.gguf.file import GgufFile
from kvcache.support.arguments import short

__all__ = ["KEYS", "NEUTRAL", "architecture_of", "config_of"]

_SOFTMAX, _SIGMOID = 1, 2  # of `expert_gating_func`

# From the keys of config.json to those of a file, after the architecture and a dot.
KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "rope_local_base_freq": "rope.freq_base_swa",
}
_MAX_LAYERS = 1 << 16
# Networks that turn some channels of a head.
_PARTIAL = (
    "phi3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "glm4", "glm4_moe", "minimax_m2", "bailing_moe_v2",
)
_ROPE_PER_KIND = ("gemma3_text", "gemma4_text", "olmo2", "mellum")  # OLMo 3 has the architecture of OLMo 2
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_TURNED = "attention.rope_pattern"
_LAYER_INPUTS = "per_layer_token_embd.weight"
_DEFAULT_WHERE_ZERO = (*CAPS, *SCALES, "expert_count")
_REQUIRED = ("num_attention_heads", "rms_norm_eps")  # those that config.json may leave out
_HEAD_SIZES = {"delta": "linear_value_head_dim", "granite": "mamba_d_head", "mamba": "mamba_head_dim"}
# What files say of experts, in the keys of LFM2 and Nemotron.
_BESIDE_EXPERTS = {
    "num_dense_layers": "leading_dense_block_count", "n_shared_experts": "expert_shared_count",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length", "moe_latent_size": "moe_latent_size",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count", "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
}
_LATENT = ("deepseek_v3", "mistral4")  # networks with latent attention
# Networks with usual attention, experts, and a bias of their choice.
_ATTENDING = ("glm4_moe", "minimax_m2", "ernie4_5_moe", "bailing_moe_v2")
_PER_LAYER = ("attention.head_count_kv", "feed_forward_length")  # with 0 for layers that have none
_OWN_EPS = {"conv": "norm_eps", "mamba": "layer_norm_epsilon"}
# The sizes of layers with a state, by kind.
_STATES = {
    "conv": {"conv_L_cache": "shortconv.l_cache"},
    "delta": {
        "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    },
    "granite": {
        "mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size", "mamba_n_groups": "ssm.group_count",
        "mamba_n_heads": "ssm.time_step_rank",
    },
    "mamba": {
        "conv_kernel": "ssm.conv_kernel", "ssm_state_size": "ssm.state_size", "n_groups": "ssm.group_count",
        "mamba_num_heads": "ssm.time_step_rank",
    },
}
_LATENT_SIZES = {"kv_lora_rank": "attention.kv_lora_rank", "qk_rope_head_dim": "rope.dimension_count"}
_GLM_FLASH = ((47, 48), 154880)  # layers and tokens: its first files say nothing of sigmoids
# Entries of `rope.` that are read, and those that change no text.
_ROPE_ENTRIES = frozenset(
    {
        "dimension_count", "dimension_count_swa", "dimension_sections", "freq_base", "freq_base_swa", "scale_linear",
        "scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.finetuned",
        "scaling.yarn_attn_factor", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow",
    }
)
# Options that change the result and are not implemented, and the value that has no effect.
NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_group_count": 0,
    "expert_gating_func": _SOFTMAX,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.output_scale": 0.0,
    "attention.temperature_scale": 0.0,
    "attention.shared_kv_layers": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "swin_norm": False,
    "use_parallel_residual": False,
    NEXT_LAYERS: 0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}


def architecture_of(file: GgufFile) -> Architecture:
    """Raises CheckpointError for an architecture that is not supported."""
    name, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: general.type: expected model, got {short(kind)}")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture: expected one of {', '.join(ARCHITECTURES)}, got {short(name)}"
        )
    return ARCHITECTURES[name]


def config_of(file: GgufFile) -> dict[str, Any]:
    """The contents of a `config.json` for the network in `file`. Sizes are as the file says, not checked.

    `eos_token_id` is left out; the factors of the tensor `rope_freqs.weight` are not included.

    Raises:
        CheckpointError: an option that is not supported. Messages name the entry, not the file; those of
            `architecture_of` name both.
    """
    architecture = architecture_of(file)
    read = _Entries(file)
    for key, neutral in NEUTRAL.items():
        if key not in architecture.understood:
            read.refuse(key, neutral)
    read.refuse_unread("rope.", _ROPE_ENTRIES)
    read.per_layer = _PER_LAYER if architecture.states else ()
    found: dict[str, Any] = {"architectures": None, "rope_theta": 10000.0}
    for key, name in {**KEYS, **architecture.names}.items():
        if not name:
            continue
        value = read.first(name) if architecture.layers_differ and name in _PER_LAYER else read.get(name)
        if value is None and key in _REQUIRED:
            read.fail(name, "a number")
        if value is not None and not (value == 0 and name in _DEFAULT_WHERE_ZERO):
            found[key] = value
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    found = {**architecture.fixed, **found, "model_type": _model_type(architecture, found)}
    if architecture.model_type.startswith("granite"):
        _set_granite(read, found)
    if architecture.model_type == "minicpm":
        _set_minicpm(found)
    if architecture.states:
        _set_states(read, architecture.states, found)
    if architecture.layers_differ:
        _set_layers(read, file, found)
    elif architecture.model_type in _LATENT:
        _set_latent(read, file, found)
    else:
        _set_heads(read, architecture, found)
    if architecture.model_type in _ATTENDING:
        _set_attending_experts(read, found)
    if architecture.model_type not in _ROPE_PER_KIND:
        read.refuse("rope.freq_base_swa", found["rope_theta"])
    _set_windows(read, architecture, found)
    found["tie_word_embeddings"] = "output.weight" not in file
    if "token_embd.weight" in file:
        found["vocab_size"] = file["token_embd.weight"].shape[0]
    if found["model_type"] == "gpt_oss" and "moe_intermediate_size" in found:
        found["intermediate_size"] = found["moe_intermediate_size"]
    turns = found.get("position_embedding_type") != "nope"
    found["rope_scaling"] = _scaling(read, "rope_factors_long.weight" in file) if turns else {"rope_type": "default"}
    if found["model_type"] == "gpt_oss":
        found["rope_scaling"] = {**found["rope_scaling"], "truncate": False}
    if architecture.layers_differ and found.pop("rope_scaling")["rope_type"] != "default":
        read.fail("rope.scaling.type", "none")
    if architecture.model_type == "mellum":
        found.setdefault("rope_local_base_freq", found["rope_theta"])
    if architecture.model_type == "granite_swa":
        _set_bases(read, found)
    if growth := read.get("attention.temperature_scale"):
        found["rope_scaling"] = {**found["rope_scaling"], "llama_4_scaling_beta": growth}
    return found


def _model_type(architecture: Architecture, found: Mapping[str, Any]) -> str:
    """The networks that share an architecture of llama.cpp, told apart."""
    if architecture.model_type == "llama" and "num_local_experts" in found:
        return "mixtral"
    if architecture.model_type == "olmo2" and found.get("sliding_window"):
        return "olmo3"
    return architecture.model_type


def _set_granite(read: _Entries, found: dict[str, Any]) -> None:
    """The size of the MLP for all rows, which is all that Granite 4 has without experts."""
    shared = read.get("expert_shared_feed_forward_length")
    if shared is not None:
        found["shared_intermediate_size"] = shared
        if found["model_type"] == "granite":
            found["intermediate_size"] = shared


def _set_minicpm(found: dict[str, Any]) -> None:
    """The factors of MiniCPM from those of the file, which has them as Granite's."""
    names = ("num_hidden_layers", "hidden_size", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    layers, hidden, embedding, residual, logits = (found.get(name) for name in names)
    found["scale_emb"] = embedding
    if isinstance(residual, float) and type(layers) is int and 0 < layers <= _MAX_LAYERS:
        found["scale_depth"] = residual * math.sqrt(layers)
    if isinstance(logits, float) and logits > 0 and type(hidden) is int:
        found["dim_model_base"] = hidden / logits


def _set_states(read: _Entries, kind: str, found: dict[str, Any]) -> None:
    """The sizes of layers with a state, and the kind of each layer."""
    kind = "granite" if found["model_type"] == "granitemoehybrid" else kind
    if kind in _OWN_EPS:
        found[_OWN_EPS[kind]] = found["rms_norm_eps"]
    for key, name in _STATES[kind].items():
        found[key] = read.get(name)
        if found[key] is None:
            read.fail(name, "a number")
    layers, heads = found.get("num_hidden_layers"), found.get(next(reversed(_STATES[kind])))
    if type(layers) is not int or not 0 < layers <= _MAX_LAYERS:
        read.fail("block_count", f"a number of layers up to {_MAX_LAYERS}")
    if kind != "conv":
        inner = read.get("ssm.inner_size")
        if type(inner) is not int or type(heads) is not int or heads < 1 or inner % heads:
            read.fail("ssm.inner_size", f"a multiple of {short(heads)} heads")
        found[_HEAD_SIZES[kind]] = inner // heads
    if kind == "delta":
        found["shared_expert_intermediate_size"] = read.get("expert_shared_feed_forward_length")
        _set_delta_layers(read, layers, found)
        return
    if kind == "granite":
        _set_granite_layers(read, layers, inner, found)
        return
    _set_experts(read, found)
    attending, widths = (read.each_layer(name, layers) for name in _PER_LAYER)
    found["num_hidden_layers"] = layers = layers - _mtp_layers(read, layers)
    attending, widths = attending[:layers], widths[:layers]
    if kind == "conv":
        found["layer_types"] = ["full_attention" if count else "conv" for count in attending]
        found["conv_bias"] = read.has_tensor("shortconv.conv.bias")
        return
    if not isinstance(read.either("feed_forward_length"), np.ndarray):
        read.fail("feed_forward_length", f"a number for each of {layers} layers")
    alone = "moe" if "n_routed_experts" in found else "mlp"
    kinds = {(True, False): "attention", (False, False): "mamba", (False, True): alone}
    each = [kinds.get((bool(count), bool(width))) for count, width in zip(attending, widths, strict=True)]
    if None in each:
        read.fail("feed_forward_length", "0 for layers that attend", read.either("feed_forward_length"))
    found["layers_block_type"] = each
    found["use_bias"], found["mlp_bias"] = read.has_tensor("ssm_in.bias"), read.has_tensor("ffn_up.bias")
    found["use_conv_bias"] = read.has_tensor("ssm_conv1d.bias")


def _set_granite_layers(read: _Entries, layers: int, inner: int, found: dict[str, Any]) -> None:
    attending, hidden = read.each_layer("attention.head_count_kv", layers), found.get("hidden_size")
    found["layer_types"] = ["attention" if count else "mamba" for count in attending]
    if type(hidden) is not int or hidden < 1 or inner % hidden:
        read.fail("ssm.inner_size", f"a multiple of {short(hidden)}")
    found["mamba_expand"] = inner // hidden
    found["position_embedding_type"] = "rope" if read.get("rope.scaling.finetuned", True) else "nope"
    found["mamba_conv_bias"] = read.has_tensor("ssm_conv1d.bias")
    found["mamba_proj_bias"] = read.has_tensor("ssm_in.bias")


def _set_experts(read: _Entries, found: dict[str, Any]) -> None:
    """The sizes beside experts, and how these are chosen, in networks that have layers with a state."""
    for key, name in _BESIDE_EXPERTS.items():
        if (value := read.get(name)) is not None:
            found[key] = value
    if read.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        read.fail("expert_gating_func", f"{_SIGMOID}, sigmoids")


def _set_latent(read: _Entries, file: GgufFile, found: dict[str, Any]) -> None:
    """The sizes of latent attention, and the experts of networks that have it."""
    for key, name in _LATENT_SIZES.items():
        found[key] = read.get(name)
        if type(found[key]) is not int:
            read.fail(name, "a number")
    latent, turned = found["kv_lora_rank"], found["qk_rope_head_dim"]
    key, value = (read.get(f"attention.{name}_length_mla") for name in ("key", "value"))
    if type(key) is not int or key <= turned:
        read.fail("attention.key_length_mla", f"more than {turned}, of a file with the matrices attn_k_b and attn_v_b")
    if read.get("attention.key_length") != latent + turned:
        read.fail("attention.key_length", f"{latent + turned}, of a latent and what turns")
    found |= {"qk_nope_head_dim": key - turned, "v_head_dim": value}
    found["q_lora_rank"] = read.get("attention.q_lora_rank") or None
    found["rope_interleave"] = True
    if "n_routed_experts" not in found:
        _set_youtu(read, found)
        return
    layers = _set_chosen_experts(read, found)
    gating = read.get("expert_gating_func")
    if gating is None:
        tokens = file["token_embd.weight"].shape[0] if "token_embd.weight" in file else 0
        gating = _SIGMOID if layers in _GLM_FLASH[0] and tokens == _GLM_FLASH[1] else _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        read.fail("expert_gating_func", f"{_SOFTMAX} or {_SIGMOID}")
    if found["model_type"] == "mistral4" and gating != _SOFTMAX:
        read.fail("expert_gating_func", f"{_SOFTMAX}, a softmax")
    if gating == _SOFTMAX and found["model_type"] != "mistral4":
        found["model_type"] = "deepseek_v2"
        found["topk_method"] = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
        if found["norm_topk_prob"]:
            read.fail("expert_weights_norm", "false for a choice by softmax")


def _set_youtu(read: _Entries, found: dict[str, Any]) -> None:
    """Latent attention without experts."""
    layers, dense = found.get("num_hidden_layers"), read.get("leading_dense_block_count", 0)
    if found["model_type"] != "deepseek_v3" or _mtp_layers(read, layers if type(layers) is int else 0):
        read.fail("expert_count", "experts")
    if type(layers) is not int or type(dense) is not int or dense < layers:
        read.fail("leading_dense_block_count", f"all {short(layers)} layers without experts", dense)
    found["model_type"] = "youtu"


def _set_chosen_experts(read: _Entries, found: dict[str, Any]) -> int:
    """The experts of DeepSeek and its kin, and the MTP layers; returns all layers of the file."""
    layers = found.get("num_hidden_layers")
    if type(layers) is not int:
        read.fail("block_count", "a number")
    found["num_nextn_predict_layers"] = mtp_layers = _mtp_layers(read, layers)
    found["num_hidden_layers"] = layers - mtp_layers
    beside = {key: read.get(name) for key, name in _BESIDE_EXPERTS.items()}
    found |= {
        "n_shared_experts": beside["n_shared_experts"], "first_k_dense_replace": beside["num_dense_layers"] or 0,
        "n_group": beside["n_group"] or 1, "topk_group": beside["topk_group"] or 1,
        "routed_scaling_factor": beside["routed_scaling_factor"] or 1.0,
        "norm_topk_prob": bool(beside["norm_topk_prob"]),
    }
    return layers


def _set_attending_experts(read: _Entries, found: dict[str, Any]) -> None:
    """The experts of networks with usual attention that choose them with a bias."""
    if found["model_type"] in ("glm4_moe", "bailing_moe_v2"):
        _set_chosen_experts(read, found)
        found["attention_bias"] = read.has_tensor("attn_q.bias")
        found["num_shared_experts"] = found["n_shared_experts"]
        found["moe_shared_expert_intermediate_size"] = read.get("expert_shared_feed_forward_length")
        found["moe_router_enable_expert_bias"] = read.has_tensor("exp_probs_b.bias")
        found["use_qk_norm"] = read.has_tensor("attn_q_norm.weight")
    expected = _SOFTMAX if found["model_type"] == "ernie4_5_moe" else _SIGMOID
    if read.get("expert_gating_func", expected) != expected:
        read.fail("expert_gating_func", "a softmax" if expected == _SOFTMAX else "sigmoids")


def _mtp_layers(read: _Entries, layers: int) -> int:
    """The MTP layers, the last ones of a file."""
    found = read.get(NEXT_LAYERS, 0)
    if type(found) is not int or not 0 <= found < layers:
        read.fail(NEXT_LAYERS, f"a number below {layers}")
    return found


def _set_delta_layers(read: _Entries, layers: int, found: dict[str, Any]) -> None:
    """The layers of Qwen3.5."""
    mtp_layers = _mtp_layers(read, layers)
    key = "num_nextn_predict_layers" if found["model_type"] == "qwen3_next" else "mtp_num_hidden_layers"
    found["num_hidden_layers"], found[key] = layers - mtp_layers, mtp_layers
    states = read.either("attention.recurrent_layers")
    if states is not None and not (
        isinstance(states, np.ndarray) and states.dtype == np.bool_ and len(states) in (layers, layers - mtp_layers)
    ):
        read.fail("attention.recurrent_layers", f"a bool for each of {layers} layers", states)
    if states is not None:
        kinds = ["linear_attention" if each else "full_attention" for each in states[: layers - mtp_layers].tolist()]
        found["layer_types"] = kinds
    else:
        found["full_attention_interval"] = read.get("full_attention_interval", 4)


def _set_heads(read: _Entries, architecture: Architecture, found: dict[str, Any]) -> None:
    """The size of a head, the part of it that RoPE turns, and the scale of the scores."""
    heads, hidden = found["num_attention_heads"], found.get("hidden_size")
    if "head_dim" not in found and type(heads) is int and type(hidden) is int and heads > 0:
        found["head_dim"] = hidden // heads
    size = found.get("head_dim")
    if read.get("attention.value_length") not in (None, size):
        read.fail("attention.value_length", f"{short(size)} as in every head")
    turned = read.get("rope.dimension_count")
    if found.get("position_embedding_type") == "nope":
        turned = None  # nothing turns: files say the hidden size over the heads, or anything
    if turned not in (None, size):
        may = architecture.model_type in _PARTIAL
        partial = may and type(turned) is int and type(size) is int and 0 < turned < size
        if not partial:
            read.fail("rope.dimension_count", f"{short(size)} as in every head")
        found["partial_rotary_factor"] = (turned + 0.5) / size  # which is rounded down to channels
    elif architecture.model_type in _PARTIAL:
        found["partial_rotary_factor"] = 1.0
    if architecture.model_type in ("gemma2", "gemma3_text"):
        # Files do not say it; the largest network of each family scales by another size than its heads have.
        largest = found.get("num_hidden_layers") == {"gemma2": 46, "gemma3_text": 62}[architecture.model_type]
        whole = type(hidden) is int and type(heads) is int and heads > 0
        found["query_pre_attn_scalar"] = hidden // heads if largest and whole else size


def _set_layers(read: _Entries, file: GgufFile, found: dict[str, Any]) -> None:
    """The sizes of each layer, in the keys of Gemma 4; no entry says that values are keys: the matrix is missing."""
    layers = found.get("num_hidden_layers")
    pattern = read.either(_PATTERN)
    if type(layers) is not int or not isinstance(pattern, np.ndarray) or len(pattern) != layers:
        read.fail(_PATTERN, f"a bool for each of {short(layers)} layers")
    size, window_size = (_head_size(read, end) for end in ("", "_swa"))
    found["head_dim"], found["per_layer_config"] = window_size, {}
    values = {name: read.each_layer(name, layers) for name in _PER_LAYER}
    for layer, slides in enumerate(pattern.tolist()):
        own = {"head_dim": window_size if slides else size} | {
            key: values[KEYS[key]][layer] for key in ("num_key_value_heads", "intermediate_size")
        }
        found["per_layer_config"][str(layer)] = {key: value for key, value in own.items() if value}
    full = [layer for layer, slides in enumerate(pattern.tolist()) if not slides]
    found["attention_k_eq_v"] = any(f"blk.{layer}.attn_k.weight" in file for layer in full) and not any(
        f"blk.{layer}.attn_v.weight" in file for layer in full
    )
    found["num_kv_shared_layers"] = read.get("attention.shared_kv_layers")
    found["hidden_size_per_layer_input"] = read.get("embedding_length_per_layer_input", 0)
    if _LAYER_INPUTS in file:
        found["vocab_size_per_layer_input"] = file[_LAYER_INPUTS].shape[0]
    found["enable_moe_block"] = "num_local_experts" in found
    found["top_k_experts"] = found.get("num_experts_per_tok")
    bases = {"full_attention": found["rope_theta"], "sliding_attention": found.get("rope_local_base_freq", 10000.0)}
    found["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}


def _head_size(read: _Entries, end: str) -> Any:
    """The channels of a head, all of which RoPE turns, in the layers whose entries have this end."""
    size = read.get(f"attention.key_length{end}")
    if size is None:
        read.fail(f"attention.key_length{end}", "a number")
    for name in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
        if read.get(name) not in (None, size):
            read.fail(name, f"{short(size)} as in attention.key_length{end}")
    return size


def _set_windows(read: _Entries, architecture: Architecture, found: dict[str, Any]) -> None:
    """The window, and which layers have it."""
    if architecture.model_type == "gemma2":
        found.setdefault("sliding_window", 4096)  # llama.cpp's default
    window, positions = found.get("sliding_window"), found.get("max_position_embeddings")
    if not window:
        found["sliding_window"] = None
    elif not architecture.windows and type(window) is int and type(positions) is int and window < positions:
        read.fail(_WINDOW, f"none, or at least all {positions} positions")
    found["use_sliding_window"] = bool(window)
    pattern, layers = read.either(_PATTERN), found.get("num_hidden_layers")
    if isinstance(pattern, np.ndarray):
        if len(pattern) != layers or pattern.dtype != np.bool_:
            read.fail(_PATTERN, f"a bool for each of {short(layers)} layers", pattern)
        if window:
            found["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern.tolist()]
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern


def _set_bases(read: _Entries, found: dict[str, Any]) -> None:
    """The base of RoPE, which is one in such files, for each layer; 0 for layers that have none."""
    kinds, base = found.get("layer_types"), found["rope_theta"]
    if kinds is None:
        read.fail(_PATTERN, "a bool for each layer, and a window", read.either(_PATTERN))
    turned = read.either(_TURNED)
    each = [True] * len(kinds) if turned is None else turned.tolist() if isinstance(turned, np.ndarray) else []
    if len(each) != len(kinds) or not all(type(value) is bool for value in each):
        read.fail(_TURNED, f"a bool for each of {len(kinds)} layers", turned)
    found["layer_rope_theta"] = [base if value else 0 for value in each]
    found["rope_parameters"] = {**found["rope_scaling"], "rope_theta": base}


class _Entries:
    """The entries of the file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.prefix = f"{file.metadata['general.architecture']}."
        self._file = file
        self.per_layer: tuple[str, ...] = ()  # entries that may be 0 in some layers

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an entry, or that of every layer where it is an array.

        Raises:
            CheckpointError: an array of different values: layers of different sizes are not supported.
        """
        found = self._file.metadata.get(self.prefix + name, default)
        if name in self.per_layer and isinstance(found, np.ndarray) and found.any():
            found = found[found != 0]
        if isinstance(found, np.ndarray) and len(found) and (found == found[0]).all():
            return float(str(found[0])) if found.dtype == np.float32 else found[0].item()
        if isinstance(found, (list, np.ndarray)):
            raise CheckpointError(f"{self.prefix}{name}: expected one value for all layers, got {short(found)}")
        return found

    def either(self, name: str) -> Any:
        """The value of an entry, which may be an array with a value for each layer."""
        return self._file.metadata.get(self.prefix + name)

    def each_layer(self, name: str, layers: int) -> list[int]:
        """The whole numbers of all layers."""
        found = self.either(name)
        if not isinstance(found, np.ndarray):
            return [self.get(name, 0)] * layers
        if len(found) != layers or found.dtype.kind not in "iu":
            self.fail(name, f"a whole number for each of {layers} layers", found)
        numbers: list[int] = found.tolist()
        return numbers

    def has_tensor(self, part: str) -> bool:
        """Whether a layer has a tensor of this name."""
        return any(name.startswith("blk.") and name.endswith(f".{part}") for name in self._file)

    def first(self, name: str) -> Any:
        """The value of an entry, or that of the first layer."""
        found = self.either(name)
        return found[0].item() if isinstance(found, np.ndarray) and len(found) else found

    def refuse(self, name: str, neutral: Any) -> None:
        """Raise CheckpointError if the file has the entry, with another value than this."""
        found = self.get(name)
        if found is not None and (not isinstance(found, (bool, int, float)) or found != neutral):
            raise CheckpointError(f"{self.prefix}{name}: expected {neutral}, got {short(found)}")

    def refuse_unread(self, group: str, known: frozenset[str]) -> None:
        """Raise CheckpointError for an entry of a group that is neither known nor in `NEUTRAL`."""
        for key in self._file.metadata:
            if key.startswith(self.prefix + group):
                name = key.removeprefix(self.prefix)
                if name.removeprefix(group) not in known and name not in NEUTRAL:
                    self.fail(name, "no such entry", self.either(name))

    def fail(self, name: str, expected: str, value: Any = None) -> NoReturn:
        value = self.get(name) if value is None else value
        found = "nothing" if value is None else short(value)
        raise CheckpointError(f"{self.prefix}{name}: expected {expected}, got {found}")


def _scaling(read: _Entries, has_factors: bool) -> Mapping[str, Any]:
    """`rope_scaling` of a `config.json`, never a family's default; that of longrope is in tensors."""
    factor = read.get("rope.scaling.factor", read.get("rope.scale_linear"))
    kind = read.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "longrope" and has_factors) or (kind == "linear" and factor in (None, 0, 1)):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        read.fail("rope.scaling.type", "none, linear or yarn")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": read.get("rope.scaling.original_context_length"),
        "attention_factor": read.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": read.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": read.get("rope.scaling.yarn_beta_slow"),
    }
    everywhere = read.get("rope.scaling.yarn_log_multiplier")
    if everywhere and read.prefix in ("deepseek2.", "mistral4."):  # their files have a tenth of it, and no other one
        scaling |= {"mscale": 10 * everywhere, "mscale_all_dim": 10 * everywhere, "attention_factor": None}
    elif everywhere:
        scaling |= {"mscale": 1.0, "mscale_all_dim": everywhere, "attention_factor": None}
    return {key: value for key, value in scaling.items() if value is not None}
