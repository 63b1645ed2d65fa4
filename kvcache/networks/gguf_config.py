"""The configuration of a network in a GGUF file, in the keys of a Hugging Face `config.json`."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np

from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile
from kvcache.networks.config import ModelConfig
from kvcache.networks.config_fields import gguf_keys
from kvcache.networks.expert_kinds import ExpertKind
from kvcache.networks.families import FAMILIES, family_of
from kvcache.networks.family import Family
from kvcache.networks.gguf_architectures import ARCHITECTURES, NEXT_LAYERS, Architecture
from kvcache.networks.recurrent_sizes import STATE_SIZES
from kvcache.networks.sparse_gates import share_of
from kvcache.networks.unread_families import parts_missing
from kvcache.support.arguments import short

__all__ = ["NEUTRAL", "architecture_of", "config_of", "network_of"]

_SOFTMAX, _SIGMOID = 1, 2  # of `expert_gating_func`
_MAX_LAYERS = 1 << 16
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_TURNED = "attention.rope_pattern"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYER_INPUTS = "per_layer_token_embd.weight"
_CUTOFFS, _LOW_RANK = "activation_sparsity_scale", "blk.0.laurel_l.weight"
_STREAMS = ("altup.num_inputs", "altup.active_idx", "attention.shared_kv_layers")
_MOST_DEVIATIONS = 5
# What entries mean where they are 0 or absent; None: the family's default.
_ABSENT: dict[str, Any] = {
    "leading_dense_block_count": 0, "expert_group_count": 1, "expert_group_used_count": 1, "expert_weights_norm": False,
    "expert_weights_scale": 1.0, "expert_count": None, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "embedding_scale": None, "residual_scale": None, "logit_scale": None, "attention.scale": None,
    "attention.value_scale": 1.0,
}
_PER_LAYER = ("attention.head_count_kv", "feed_forward_length")  # with 0 for layers that have none
_HEADS = "attention.head_count"
_LIMITS = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}
_STATES = {  # the sizes of layers with a state, by their kind
    "conv": (("taps", "shortconv.l_cache"),), "kimi": (("taps", "ssm.conv_kernel"), ("size", "kda.head_dim")),
    "": (
        ("taps", "ssm.conv_kernel"), ("size", "ssm.state_size"), ("groups", "ssm.group_count"),
        ("heads", "ssm.time_step_rank"),
    ),
}
_LATENT_SIZES = {"kv_lora_rank": "attention.kv_lora_rank", "qk_rope_head_dim": "rope.dimension_count"}
# Files do not say it; the largest network of these families, of so many layers, scales by another size than its heads.
_LARGEST = {"gemma2": 46, "gemma3_text": 62}
_UNNORMED = {"llama4_text": 128}  # experts of the network whose queries and keys have no norm: files do not say it
_GLM_FLASH = ((47, 48), 154880)  # layers and tokens: its first files say nothing of sigmoids
# Entries of `rope.` that are read, and those that change no text.
_ROPE_ENTRIES = frozenset((
    "dimension_count", "dimension_count_swa", "dimension_sections", "freq_base", "freq_base_swa", "scale_linear",
    "scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.finetuned",
    "scaling.yarn_attn_factor", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow",
))
_YARN = {
    "original_max_position_embeddings": "original_context_length", "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
}
# Options that change the result and are not implemented, and the value that has no effect.
NEUTRAL: dict[str, Any] = {
    "expert_count": 0, "expert_shared_count": 0, "expert_group_count": (0, 1), "expert_gating_func": _SOFTMAX,
    "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.scale": 0.0,
    "attention.output_scale": 0.0, "attention.temperature_scale": 0.0, "attention.shared_kv_layers": 0,
    "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "embedding_scale": 0.0, "logit_scale": 0.0,
    "residual_scale": 0.0, "swin_norm": False, "use_parallel_residual": False, NEXT_LAYERS: 0,
    "rope.scaling.alpha": 0.0, "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}


def architecture_of(file: GgufFile, expected: str = "model") -> Architecture:
    """The architecture of a file that has a "model", or an "adapter". CheckpointError: another one."""
    name, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type", "model")
    if kind != expected:
        raise CheckpointError(f"{file.path}: general.type: expected {expected}, got {short(kind)}")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        if parts := parts_missing(name):
            raise CheckpointError(
                f"{file.path}: general.architecture: expected a network without {parts}, got {name!r}"
            )
        raise CheckpointError(
            f"{file.path}: general.architecture: expected one of {', '.join(ARCHITECTURES)}, got {short(name)}"
        )
    return ARCHITECTURES[name]


def config_of(file: GgufFile) -> dict[str, Any]:
    """The network in `file` as the entries of a `config.json`. Raises as `network_of`, which checks the values too."""
    return _read(file)[2]


def _read(file: GgufFile) -> tuple[_Entries, list[tuple[str, str]], dict[str, Any]]:
    """The entries of `file`, pairs of a key of `config.json` and its entry's name, and the values by these keys."""
    architecture, read = architecture_of(file), _Entries(file)
    family = FAMILIES[family_of({"model_type": _model_type(read, architecture)})[0]]
    keys = [*gguf_keys(family), *architecture.names.items()]
    _refuse_unsupported(read, architecture, family, {name for _, name in keys})
    return read, keys, _config_of(read, architecture, family, keys)


def network_of(file: GgufFile, **more: Any) -> ModelConfig:
    """The configuration of the network in `file`, but for the factors of the tensor `rope_freqs.weight`.

    Args:
        more: keys of a `config.json`, such as `eos_token_id`.

    Raises:
        CheckpointError: an option that is not supported. Messages name the entry, not the file; those of
            `architecture_of` name both.
    """
    read, keys, found = _read(file)
    try:
        return ModelConfig.from_dict(found | more)
    except CheckpointError as error:
        key, _, rest = str(error).partition(": ")
        names = [name for own, name in keys if own == key]
        name = next((name for name in reversed(names) if read.either(name) is not None), (*names, "")[0])
        key = f"{read.prefix}{name}" if name else key
        raise CheckpointError(f"{key}: {rest}") from None


def _model_type(read: _Entries, architecture: Architecture) -> str:
    """The networks that share an architecture of llama.cpp, told apart."""
    others = [other for name, other in architecture.others.items() if read.get(name)]
    if not others or not architecture.softmax:
        return (others or [architecture.model_type])[-1]
    gating = read.get("expert_gating_func")
    if gating is None:
        tokens = read.file["token_embd.weight"].shape[0] if "token_embd.weight" in read.file else 0
        flash = read.get("block_count") in _GLM_FLASH[0] and tokens == _GLM_FLASH[1]
        gating = _SIGMOID if flash else _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        read.fail("expert_gating_func", f"{_SOFTMAX} or {_SIGMOID}")
    if gating == _SOFTMAX and read.get("expert_weights_norm"):
        read.fail("expert_weights_norm", "false for a choice by softmax")
    return others[-1] if gating == _SIGMOID else architecture.softmax


def _refuse_unsupported(read: _Entries, architecture: Architecture, family: Family, names: set[str]) -> None:
    """Raise CheckpointError for an entry that changes the result and is not among those that are read."""
    understood, kind = {*architecture.understood, *names}, family.experts
    if family.next_layers:
        understood.add(NEXT_LAYERS)
    if kind is not None:
        understood |= {"expert_gating_func"} | ({"expert_shared_count"} if kind.shared else set())
        sigmoid = kind.choice.get("sigmoid")
        expected, either = _SIGMOID if sigmoid else _SOFTMAX, architecture.softmax or callable(sigmoid)
        if not either and read.get("expert_gating_func", expected) != expected:
            read.fail("expert_gating_func", "sigmoids" if expected == _SIGMOID else "a softmax")
    for name, neutral in NEUTRAL.items():
        if name not in understood:
            read.refuse(name, neutral)
    for name, value in architecture.only.items():
        read.refuse(name, value)
    for key in read.file.metadata:
        name = key.removeprefix(read.prefix)
        if key.startswith(f"{read.prefix}rope.") and name[5:] not in _ROPE_ENTRIES and name not in NEUTRAL:
            read.fail(name, "no such entry", read.either(name))


def _config_of(
    read: _Entries, architecture: Architecture, family: Family, keys: list[tuple[str, str]]
) -> dict[str, Any]:
    """The entries as a `config.json` of the family. Sizes are as the file says, not checked."""
    file = read.file
    read.per_layer = _PER_LAYER if architecture.states else ()
    found: dict[str, Any] = {"rope_theta": 10000.0, **architecture.fixed, "model_type": family.model_type}
    by_layer = (
        *_PER_LAYER * family.layers_differ, *_PER_LAYER[:1] * (family.window_pairs > 1),
        *(_HEADS,) * ("num_attention_heads_per_layer" in family.defaults),
    )
    for key, name in keys:
        value = read.first(name) if name in by_layer else read.get(name)
        if not value and name in _ABSENT:
            value = None if value is None and key in architecture.fixed else _ABSENT[name]
        if value is not None:
            found[key] = value
    for key in ("num_attention_heads", family.eps_key):  # which config.json may leave out
        if key not in found:
            read.fail(dict(keys)[key], "a number")
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    layers = _set_layer_counts(read, family, found)
    if "scale_depth" in family.defaults:
        _set_minicpm(found)
    if family.experts:
        _set_experts(read, architecture, family, family.experts, found)
    if _HEADS in by_layer:
        _set_lists(read, layers, found)
    if architecture.states:
        _set_states(read, architecture.states, family, layers, found)
    if family.layers_differ:
        _set_layers(read, family, found)
    elif family.latent:
        _set_latent(read, family, found)
    else:
        _set_heads(read, family, found)
    found |= {key: read.has_tensor(part) for key, part in architecture.tensors.items()}
    _set_windows(read, architecture, found)
    if family.window_pairs > 1:
        _set_pairs(read, family, layers, found)
    found["tie_word_embeddings"] = "output.weight" not in file
    if "token_embd.weight" in file:
        found["vocab_size"] = file["token_embd.weight"].shape[0]
    _set_ropes(read, architecture, family, found)
    return found


def _set_minicpm(found: dict[str, Any]) -> None:
    """The factors of MiniCPM from those of the file, which has them as Granite's."""
    residual, logits = found.pop("scale_depth", None), found.pop("dim_model_base", None)
    if isinstance(residual, float):
        found["scale_depth"] = residual * math.sqrt(found["num_hidden_layers"])
    if isinstance(logits, float) and logits > 0 and type(found.get("hidden_size")) is int:
        found["dim_model_base"] = found["hidden_size"] / logits


def _set_layer_counts(read: _Entries, family: Family, found: dict[str, Any]) -> int:
    """The MTP layers, which are the last ones, and those before them; returns all layers of the file."""
    layers, ahead = found.get("num_hidden_layers"), read.get(NEXT_LAYERS, 0)
    if type(layers) is not int or not 0 < layers <= _MAX_LAYERS:
        read.fail("block_count", f"a number of layers up to {_MAX_LAYERS}")
    if type(ahead) is not int or not 0 <= ahead < layers:
        read.fail(NEXT_LAYERS, f"a number below {layers}")
    found["num_hidden_layers"] = layers - ahead
    if family.next_layers:
        found[family.next_layers] = ahead
    first = f"blk.{layers - ahead}."
    if ahead and family.experts and f"{first}nextn.eh_proj.weight" in read.file:
        found["mtp_mlp_layer_types"] = ["sparse" if f"{first}ffn_gate_inp.weight" in read.file else "dense"]
    return layers


def _set_experts(
    read: _Entries, architecture: Architecture, family: Family, kind: ExpertKind, found: dict[str, Any]
) -> None:
    """Set keys that follow from the number of experts; refuse a file without experts unless a key allows it."""
    if architecture.listed:
        each = (f"blk.{i}.ffn_gate_inp.weight" in read.file for i in range(found["num_hidden_layers"]))
        found["mlp_layer_types"] = ["sparse" if has else "dense" for has in each]
    has = kind.count[0] in found
    if kind.switch:
        found[kind.switch] = has
    elif not has and kind.at_least and not kind.layer:
        read.fail("expert_count", "experts")
    if callable(word := kind.choice.get("sigmoid")):
        gating = read.get("expert_gating_func", _SIGMOID)
        if gating not in (_SOFTMAX, _SIGMOID):
            read.fail("expert_gating_func", f"{_SOFTMAX} or {_SIGMOID}")
        found[word.key] = word.words[gating == _SIGMOID]
    if kind.count[0] in found and found[kind.count[0]] == _UNNORMED.get(family.model_type):
        found["use_qk_norm"] = False
    if "topk_method" in family.defaults:
        found["topk_method"] = "greedy" if found["n_group"] == 1 else "group_limited_greedy"


def _set_lists(read: _Entries, layers: int, found: dict[str, Any]) -> None:
    """The query heads of each layer, and the bounds of SwiGLU, whose lists go on for MTP layers."""
    own = found["num_hidden_layers"]
    found["num_attention_heads_per_layer"] = read.each_layer(_HEADS, layers)[:own]
    for key, name in _LIMITS.items():
        each = read.either(name)
        if each is not None and not (isinstance(each, np.ndarray) and each.dtype.kind == "f" and len(each) == layers):
            read.fail(name, f"a number for each of {layers} layers", each)
        if each is not None:
            found[key] = [float(str(number)) for number in each[:own]]


def _set_states(read: _Entries, kind: str, family: Family, layers: int, found: dict[str, Any]) -> None:
    """The sizes of layers with a state, and the kind of each layer."""
    rows = STATE_SIZES[kind]
    for name, entry in _STATES.get(kind, _STATES[""]):
        found[rows[name].key] = read.get(entry)
        if found[rows[name].key] is None:
            read.fail(entry, "a number")
    if kind == "kimi":
        found["linear_num_heads"] = found["num_attention_heads"]
        attending = read.each_layer("attention.head_count_kv", layers)[: found["num_hidden_layers"]]
        found["layer_types"] = ["full_attention" if count else "linear_attention" for count in attending]
        return
    if kind != "conv":
        inner, heads = read.get("ssm.inner_size"), found[rows["heads"].key]
        if type(inner) is not int or type(heads) is not int or heads < 1 or inner % heads:
            read.fail("ssm.inner_size", f"a multiple of {short(heads)} heads")
        found[rows["dim"].key] = inner // heads
    if kind == "delta":
        _set_delta_layers(read, layers, found)
        return
    if kind == "falcon":  # every layer has one
        found["mamba_d_ssm"] = inner
        return
    if kind == "granite":
        _set_granite_layers(read, layers, inner, found)
        return
    attending, widths = (read.each_layer(name, layers)[: found["num_hidden_layers"]] for name in _PER_LAYER)
    if kind == "conv":
        found["layer_types"] = ["full_attention" if count else "conv" for count in attending]
        return
    if not isinstance(read.either("feed_forward_length"), np.ndarray):
        read.fail("feed_forward_length", f"a number for each of {layers} layers")
    alone = family.experts.layer if family.experts and family.experts.count[0] in found else "mlp"
    kinds = {(True, False): "attention", (False, False): "mamba", (False, True): alone}
    each = [kinds.get((bool(count), bool(width))) for count, width in zip(attending, widths, strict=True)]
    if None in each:
        read.fail("feed_forward_length", "0 for layers that attend", read.either("feed_forward_length"))
    found["layers_block_type"] = each


def _set_granite_layers(read: _Entries, layers: int, inner: int, found: dict[str, Any]) -> None:
    attending, hidden = read.each_layer("attention.head_count_kv", layers), found.get("hidden_size")
    found["layer_types"] = ["attention" if count else "mamba" for count in attending]
    if type(hidden) is not int or hidden < 1 or inner % hidden:
        read.fail("ssm.inner_size", f"a multiple of {short(hidden)}")
    found["mamba_expand"] = inner // hidden
    found["position_embedding_type"] = "rope" if read.get("rope.scaling.finetuned", True) else "nope"


def _set_latent(read: _Entries, family: Family, found: dict[str, Any]) -> None:
    """The sizes of latent attention."""
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
    found["rope_interleave"] = family.defaults.get("rope_interleave", True)
    if family.index and "indexer_types" in family.defaults:
        own = (f"blk.{i}.indexer.k_norm.weight" in read.file for i in range(found["num_hidden_layers"]))
        found["indexer_types"] = ["full" if each else "shared" for each in own]
    if family.experts is None:
        layers, dense = found["num_hidden_layers"], read.get("leading_dense_block_count", 0)
        if type(dense) is not int or dense < layers:
            read.fail("leading_dense_block_count", f"all {layers} layers without experts", dense)
        read.refuse(NEXT_LAYERS, 0)


def _set_delta_layers(read: _Entries, layers: int, found: dict[str, Any]) -> None:
    """The layers of Qwen3.5."""
    own, states = found["num_hidden_layers"], read.either("attention.recurrent_layers")
    if states is not None and not (
        isinstance(states, np.ndarray) and states.dtype == np.bool_ and len(states) in (layers, own)
    ):
        read.fail("attention.recurrent_layers", f"a bool for each of {layers} layers", states)
    if states is not None:
        found["layer_types"] = ["linear_attention" if each else "full_attention" for each in states[:own].tolist()]
    else:
        found["full_attention_interval"] = read.get("full_attention_interval", 4)


def _set_heads(read: _Entries, family: Family, found: dict[str, Any]) -> None:
    """The size of a head, the part of it that RoPE turns, and the scale of the scores."""
    heads, hidden = found["num_attention_heads"], found.get("hidden_size")
    if "head_dim" not in found and type(heads) is int and type(hidden) is int and heads > 0:
        found["head_dim"] = hidden // heads
    size = found.get("head_dim")
    if "v_head_dim" in family.defaults:
        found.setdefault("v_head_dim", size)
    elif read.get("attention.value_length") not in (None, size):
        read.fail("attention.value_length", f"{short(size)} as in every head")
    turned = read.get("rope.dimension_count")
    if found.get("position_embedding_type") == "nope":
        turned = None  # nothing turns: files say the hidden size over the heads, or anything
    partial = "partial_rotary_factor" in family.defaults
    if turned not in (None, size):
        if not (partial and type(turned) is int and type(size) is int and 0 < turned < size):
            read.fail("rope.dimension_count", f"{short(size)} as in every head")
        found["partial_rotary_factor"] = (turned + 0.5) / size  # which is rounded down to channels
    elif partial:
        found["partial_rotary_factor"] = 1.0
    if (most := _LARGEST.get(family.model_type)) is not None:
        whole = found["num_hidden_layers"] == most and type(hidden) is int and type(heads) is int and heads > 0
        found["query_pre_attn_scalar"] = hidden // heads if whole else size


def _set_layers(read: _Entries, family: Family, found: dict[str, Any]) -> None:
    """The sizes of each layer, in the keys of Gemma 4; no entry says that values are keys: the matrix is missing."""
    layers, pattern = found["num_hidden_layers"], read.either(_PATTERN)
    if not isinstance(pattern, np.ndarray) or len(pattern) != layers:
        read.fail(_PATTERN, f"a bool for each of {layers} layers")
    size = _head_size(read, "")
    window_size = _head_size(read, "_swa") if "global_head_dim" in family.defaults else size
    found["head_dim"], found["per_layer_config"] = window_size, {}
    values = {name: read.each_layer(name, layers) for name in _PER_LAYER}
    for layer, slides in enumerate(pattern.tolist()):
        pairs, inner = (values[name][layer] for name in _PER_LAYER)
        own = {
            "head_dim": window_size if slides else size, "num_key_value_heads": pairs, "intermediate_size": inner,
        }
        found["per_layer_config"][str(layer)] = {key: value for key, value in own.items() if value}
    full = [layer for layer, slides in enumerate(pattern.tolist()) if not slides]
    keys, own_values = (any(f"blk.{layer}.attn_{x}.weight" in read.file for layer in full) for x in "kv")
    found["attention_k_eq_v"] = keys and not own_values
    found["num_kv_shared_layers"] = read.get("attention.shared_kv_layers")
    found["hidden_size_per_layer_input"] = read.get("embedding_length_per_layer_input", 0)
    if _LAYER_INPUTS in read.file:
        found["vocab_size_per_layer_input"] = read.file[_LAYER_INPUTS].shape[0]
    bases = {"full_attention": found["rope_theta"], "sliding_attention": found.get("rope_local_base_freq", 10000.0)}
    found["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    if family.streams:
        _set_streams(read, layers, found)


def _set_streams(read: _Entries, layers: int, found: dict[str, Any]) -> None:
    """The streams of Gemma 3n, and from where on gates count, in deviations; minus infinity: all count."""
    for name in _STREAMS:
        if read.get(name) is None:
            read.fail(name, "a number")
    if _LOW_RANK in read.file:
        found["laurel_rank"] = read.file[_LOW_RANK].shape[0]
    each = read.either(_CUTOFFS)
    if not isinstance(each, np.ndarray) or each.dtype.kind != "f" or len(each) != layers:
        read.fail(_CUTOFFS, f"a number for each of {layers} layers", each)
    if not ((np.abs(each) <= _MOST_DEVIATIONS) | (each == -np.inf)).all():
        read.fail(_CUTOFFS, f"numbers up to {_MOST_DEVIATIONS} or minus infinity", each)
    found["activation_sparsity_pattern"] = [share_of(cutoff) for cutoff in each.tolist()]


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
    window, positions = found.get("sliding_window"), found.get("max_position_embeddings")
    if not window:
        found["sliding_window"] = None
    elif not architecture.windows and type(window) is int and type(positions) is int and window < positions:
        read.fail(_WINDOW, f"none, or at least all {positions} positions")
    found["use_sliding_window"] = bool(window)
    if found["sliding_window"] and found.get("is_causal") is False:  # llama.cpp has no window then behind a token
        read.fail("attention.causal", "true beside a window")
    pattern, layers = read.either(_PATTERN), found.get("num_hidden_layers")
    if isinstance(pattern, np.ndarray):
        if pattern.dtype.kind in "iu" and ((pattern == 0) | (pattern == 1)).all():
            pattern = pattern.astype(np.bool_)
        if type(layers) is int and len(pattern) > layers == len(pattern) - read.get(NEXT_LAYERS, 0):
            found["mtp_layer_types"] = [_SLIDING if pattern[layers] else _FULL]
            pattern = pattern[:layers]
        if len(pattern) != layers or pattern.dtype != np.bool_:
            read.fail(_PATTERN, f"a bool for each of {short(layers)} layers", pattern)
        if window:
            found["layer_types"] = [_SLIDING if slides else _FULL for slides in pattern.tolist()]
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern


def _set_pairs(read: _Entries, family: Family, layers: int, found: dict[str, Any]) -> None:
    """The KV heads of layers without a window, of which those with one have a multiple."""
    kinds, name = found.get("layer_types"), "attention.head_count_kv"
    if kinds is None:
        missing, what = (_PATTERN, "a bool for each layer") if found["sliding_window"] else (_WINDOW, "a window")
        read.fail(missing, what, read.either(missing))
    each, times = read.each_layer(name, layers), [family.window_pairs if kind == _SLIDING else 1 for kind in kinds]
    shares = {pairs / more if type(pairs) is int else -1 for pairs, more in zip(each, times, strict=False)}
    pairs = shares.pop()
    if shares or pairs < 1 or pairs % 1:
        expected = f"{family.window_pairs} times as many in layers with a window as in others"
        read.fail(name, expected, read.either(name))
    found["num_key_value_heads"] = int(pairs)


def _set_ropes(read: _Entries, architecture: Architecture, family: Family, found: dict[str, Any]) -> None:
    """The rotary embeddings, whose entries say one for all layers or one for each kind."""
    each_layer, scaling = "layer_rope_theta" in family.defaults, {"rope_type": "default"}
    if not family.rope_per_kind or each_layer:
        read.refuse("rope.freq_base_swa", found["rope_theta"])
    else:
        found.setdefault("rope_local_base_freq", found["rope_theta"])
    if found.get("position_embedding_type") != "nope":
        scaling = _scaling(read, latent=family.latent)
    found["rope_scaling"] = scaling | architecture.fixed.get("rope_scaling", {})
    if family.layers_differ and found.pop("rope_scaling")["rope_type"] != "default":
        read.fail("rope.scaling.type", "none")
    if each_layer:
        _set_bases(read, found)
    if architecture.half_turned:
        _set_halves(read, found)
    if growth := read.get("attention.temperature_scale"):
        found["rope_scaling"]["llama_4_scaling_beta"] = growth


def _set_halves(read: _Entries, found: dict[str, Any]) -> None:
    """The base and the turned channels of layers with a window, and without one: half of them."""
    size = found.get("head_dim")
    whole = read.get("rope.dimension_count", size)
    turned = whole // 2 if type(whole) is int else whole, read.get("rope.dimension_count_swa", whole)
    if type(size) is not int or not all(type(each) is int and 0 < each <= size for each in turned):
        read.fail("rope.dimension_count", f"channels of {short(size)}")
    full, slides = ((each + 0.5) / size if each < size else 1.0 for each in turned)  # rounded down to channels
    scaling = found.pop("rope_scaling")
    found["rope_parameters"] = {
        _FULL: {**scaling, "rope_theta": found["rope_theta"], "partial_rotary_factor": full},
        _SLIDING: {"rope_theta": found["rope_local_base_freq"], "partial_rotary_factor": slides},
    }


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
        self.file = file
        self.per_layer: tuple[str, ...] = ()  # entries that may be 0 in some layers

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an entry, or that of every layer where it is an array.

        Raises:
            CheckpointError: an array of different values: layers of different sizes are not supported.
        """
        found = self.file.metadata.get(self.prefix + name, default)
        if name in self.per_layer and isinstance(found, np.ndarray) and found.any():
            found = found[found != 0]
        if isinstance(found, np.ndarray) and len(found) and (found == found[0]).all():
            return float(str(found[0])) if found.dtype == np.float32 else found[0].item()
        if isinstance(found, (list, np.ndarray)):
            raise CheckpointError(f"{self.prefix}{name}: expected one value for all layers, got {short(found)}")
        return found

    def either(self, name: str) -> Any:
        """The value of an entry, which may be an array with a value for each layer."""
        return self.file.metadata.get(self.prefix + name)

    def each_layer(self, name: str, layers: int) -> list[int]:
        """The whole numbers of all layers."""
        found = self.either(name)
        if not isinstance(found, np.ndarray):
            return [self.get(name, 0)] * layers
        if len(found) != layers or found.dtype.kind not in "iu":
            self.fail(name, f"a whole number for each of {layers} layers", found)
        return [int(number) for number in found]

    def has_tensor(self, part: str) -> bool:
        """Whether a layer has a tensor of this name."""
        return any(name.startswith("blk.") and name.endswith(f".{part}") for name in self.file)

    def first(self, name: str) -> Any:
        """The value of an entry, or that of the first layer."""
        found = self.either(name)
        return found[0].item() if isinstance(found, np.ndarray) and len(found) else found

    def refuse(self, name: str, neutral: Any) -> None:
        """Raise CheckpointError if the file has the entry, with another value than this, or than these."""
        found, all_neutral = self.get(name), neutral if isinstance(neutral, tuple) else (neutral,)
        if found is not None and (not isinstance(found, (bool, int, float)) or found not in all_neutral):
            self.fail(name, " or ".join(map(str, all_neutral)))

    def fail(self, name: str, expected: str, value: Any = None) -> NoReturn:
        value = self.get(name) if value is None else value
        found = "nothing" if value is None else short(value)
        raise CheckpointError(f"{self.prefix}{name}: expected {expected}, got {found}")


def _scaling(read: _Entries, *, latent: bool) -> dict[str, Any]:
    """`rope_scaling` of a `config.json`, never a family's default; that of longrope is in tensors."""
    factor = read.get("rope.scaling.factor", read.get("rope.scale_linear"))
    kind = read.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "longrope" and "rope_factors_long.weight" in read.file):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "default"} if factor in (None, 0, 1) else {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        read.fail("rope.scaling.type", "none, linear or yarn")
    scaling = {key: read.get(f"rope.scaling.{name}") for key, name in _YARN.items()}
    scaling |= {"rope_type": "yarn", "factor": factor}
    if everywhere := read.get("rope.scaling.yarn_log_multiplier"):  # files with latent attention have a tenth of it
        shown = 10 * everywhere if latent else everywhere
        scaling |= {"mscale": shown if latent else 1.0, "mscale_all_dim": shown, "attention_factor": None}
    return {key: value for key, value in scaling.items() if value is not None}
