"""Entries of a `config.json` in the keys that most families have, for families that spell them in another way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries, Flag, Only
from kvcache.support.arguments import short

__all__ = ["bailing_entries", "kimi_entries"]

_LINEAR = "linear_attn_config"  # of Kimi: what layers with a state are
_SPELLED = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok", "num_local_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
}
_KIMI_SIZES = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# Options of later networks of the same model types, which are not implemented.
_OF_KIMI = (
    Only("mla_use_nope", True), Only("mla_use_output_gate", False), Only("moe_router_activation_func", "sigmoid"),
    Only("moe_layer_freq", 1),
)
_OF_KIMI_LAYERS = (Only("use_full_rank_gate", False),)
_LIMITS = {"expert_swiglu_limit_list": "swiglu_limits", "share_expert_swiglu_limit_list": "swiglu_limits_shared"}
_OF_BAILING = (
    Only("use_mla_nope", False), Only("no_kda_lora", True), Only("use_kda_lora", False), Only("mtp_use_kda", False),
    Only("up_proj_norm", False), Only("value_norm", False), Only("use_nGPT", False), Only("scale_router_input", False),
    Only("pregate_inference", False),
    Only("gated_attention_proj_granularity_type", "head_wise"), Only("scoring_func", "sigmoid"),
)


def kimi_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a Kimi-Linear network.

    Raises:
        CheckpointError: an option that is not supported, or lists that do not name each layer once.
    """
    found = _spelled(config)
    linear = found.get(_LINEAR)
    linear = {} if linear is None else linear
    if not isinstance(linear, dict):
        raise CheckpointError(f"{_LINEAR}: expected an object, got {short(linear)}")
    _check(found, "", _OF_KIMI)
    _check(linear, f"{_LINEAR}.", _OF_KIMI_LAYERS)
    for key in ("gate_lower_bound", "attn_res_block_size"):
        where, entries = (f"{_LINEAR}.", linear) if key in linear else ("", found)
        if entries.get(key) is not None:
            raise CheckpointError(f"{where}{key}: expected null, got {short(entries[key])}")
    found |= {usual: linear[key] for key, usual in _KIMI_SIZES.items() if linear.get(key) is not None}
    if found.get("layer_types") is None and type(found.get("num_hidden_layers")) is int:
        layers = range(1, found["num_hidden_layers"] + 1)  # as the lists count them
        full = [i for i in layers if i > 1 and i % 4 == 1]
        if "full_attn_layers" in linear or "kda_layers" in linear:
            full, others = (_numbers(linear, key) for key in ("full_attn_layers", "kda_layers"))
            if sorted(full + others) != [*layers]:
                expected = f"the layers from 1 to {len(layers)} that are not among full_attn_layers"
                raise CheckpointError(f"{_LINEAR}.kda_layers: expected {expected}, got {short(others)}")
        found["layer_types"] = ["full_attention" if i in full else "linear_attention" for i in layers]
    return found


def bailing_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a Ling 3.0 network.

    Raises:
        CheckpointError: an option that is not supported.
    """
    found = _spelled(config)
    _check(found, "", _OF_BAILING)
    read = Entries(found)
    for usual, key in {
        "linear_head_dim": "head_dim", "linear_num_heads": "num_attention_heads",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }.items():
        if found.get(usual) is None and found.get(key) is not None:
            found[usual] = found[key]
    if not Flag("kda_safe_gate", True)(read):
        found["kda_lower_bound"] = 0
    if found.get("layer_types") is None and type(found.get("num_hidden_layers")) is int:
        every = read.size("layer_group_size", 6)
        found["layer_types"] = [
            "linear_attention" if (i + 1) % every else "full_attention" for i in range(found["num_hidden_layers"])
        ]
    layers, dense = found.get("num_hidden_layers"), read.size("first_k_dense_replace", 2, at_least=0)
    for key, usual in _LIMITS.items():
        if (limits := _limits(found.pop(key, None), key)) and isinstance(layers, int):
            of_experts = [0.0 if i < dense else each for i, each in enumerate(limits)]
            found[usual] = of_experts + [0.0] * (layers - len(limits))
    for key in ("rope_parameters", "rope_scaling"):  # all of the channels turn, whatever share files name
        if isinstance(found.get(key), dict):
            found[key] = {name: value for name, value in found[key].items() if name != "partial_rotary_factor"}
    return found


def _limits(listed: Any, key: str) -> list[float]:
    """The bounds of SwiGLU in the first layers; a null is 0."""
    limits = [0 if each is None else each for each in listed] if isinstance(listed, list) else listed and [-1]
    if not all(type(each) in (int, float) and 0 <= each < math.inf for each in limits or ()):
        raise CheckpointError(f"{key}: expected a list of finite numbers from 0 on, got {short(listed)}")
    return [float(each) for each in limits or ()]


def _spelled(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries by their usual keys."""
    own = {usual: config[key] for key, usual in _SPELLED.items() if config.get(key) is not None}
    return {key: value for key, value in config.items() if key not in _SPELLED} | own


def _check(entries: Mapping[str, Any], where: str, options: tuple[Only, ...]) -> None:
    read = Entries(entries, where)
    for option in options:
        if read.get(option.key) is not None:
            option(read)


def _numbers(entries: Mapping[str, Any], key: str) -> list[int]:
    """A list of layers."""
    found = entries.get(key)
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise CheckpointError(f"{_LINEAR}.{key}: expected numbers of layers, got {short(found)}")
    return found
