"""The entries of a `config.json` of Step, as published and as transformers saves it, in keys that other families share.

Published files list bases of RoPE, shares of channels that turn, kinds and bounds for each layer, MTP layers
among them; others name the layers with experts by their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries
from kvcache.support.arguments import short

__all__ = ["step_entries"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_FIRST_WITH_EXPERTS = 3  # where no key says
_ALIASES = {  # published keys, and those of transformers, of which the last one counts
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim", "num_mtp_layers": "num_nextn_predict_layers",
}
_LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta",
          "partial_rotary_factors")  # which may go on for MTP layers
_OF_MTP = ("layer_types", "mlp_layer_types")
_MOST_LAYERS = 1 << 16


def step_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The usual entries. Raises CheckpointError for lists that do not fit the layers, and for other options."""
    found = {key: value for key, value in config.items() if key not in _ALIASES}
    for alias, key in _ALIASES.items():
        if alias in config and found.get(key) is None:
            found[key] = config[alias]
    read = Entries(found)
    layers = read.size("num_hidden_layers", most=_MOST_LAYERS)
    ahead = read.size("num_nextn_predict_layers", 0, at_least=0, most=_MOST_LAYERS)
    for key in _LISTS:
        if isinstance(found.get(key), list) and len(found[key]) == layers + ahead:
            if ahead and key in _OF_MTP:
                found[f"mtp_{key}"] = found[key][layers:]
            found[key] = found[key][:layers]
    kinds = found.get("layer_types")
    kinds = [_FULL] * layers if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers or not all(each in (_FULL, _SLIDING) for each in kinds):
        expected = f"{_FULL} or {_SLIDING} for each of {layers} layers"
        raise CheckpointError(f"layer_types: expected {expected}, got {short(kinds)}")
    found["layer_types"] = kinds
    _set_heads(read, kinds, found)
    _set_ropes(read, kinds, found)
    if found.get("mlp_layer_types") is None:
        first = read.size("first_k_dense_replace", _FIRST_WITH_EXPERTS, at_least=0)
        experts = _with_experts(found.pop("moe_layers_enum", None), first, layers)
        each = ["sparse" if i in experts else "dense" for i in range(layers + ahead)]
        found["mlp_layer_types"] = each[:layers]
        found.setdefault("mtp_mlp_layer_types", each[layers:])
    if found.get("query_pre_attn_scalar") is None:
        found["query_pre_attn_scalar"] = read.size("head_dim", 128)
    return found


def _with_experts(listed: Any, first: int, layers: int) -> set[int]:
    """The layers with experts: numbers in a list, or in a string with commas between them; None: from `first` on."""
    if listed is None:
        return set(range(first, layers))
    each = [item.strip() for item in listed.split(",")] if isinstance(listed, str) else listed
    if not isinstance(each, list) or not all(type(item) is int or item == "" or _is_number(item) for item in each):
        raise CheckpointError(f"moe_layers_enum: expected numbers of layers, got {short(listed)}")
    return {int(item) for item in each if item != ""}


def _is_number(item: Any) -> bool:
    return isinstance(item, str) and item.isascii() and item.isdecimal() and len(item) < 9


def _set_heads(read: Entries, kinds: list[str], found: dict[str, Any]) -> None:
    """The query heads of each layer."""
    usual = read.size("num_attention_heads", 64)
    other = found.pop("attention_other_setting", None) or {}
    if not isinstance(other, dict):
        raise CheckpointError(f"attention_other_setting: expected an object, got {short(other)}")
    sliding = Entries(other, "attention_other_setting.").size("num_attention_heads", usual)
    sliding = read.size("num_sliding_attention_heads", sliding)
    for key, own in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
        if other.get(key) is not None and other[key] != found.get(own):
            expected = short(found.get(own))
            raise CheckpointError(f"attention_other_setting.{key}: expected {expected}, got {short(other[key])}")
    heads = [sliding if kind == _SLIDING else usual for kind in kinds]
    given = found.pop("per_layer_config", None)
    for layer, sizes in (given or {}).items() if isinstance(given, (dict, type(None))) else [("", given)]:
        known = _is_number(layer) and int(layer) < len(kinds)
        if not known or not isinstance(sizes, dict) or set(sizes) != {"num_attention_heads"}:
            raise CheckpointError(f"per_layer_config: expected query heads by numbers of layers, got {short(given)}")
        heads[int(layer)] = Entries(sizes, f"per_layer_config.{layer}.").size("num_attention_heads")
    found.setdefault("num_attention_heads_per_layer", heads)


def _set_ropes(read: Entries, kinds: list[str], found: dict[str, Any]) -> None:
    """The rotary embedding of each kind of layer, of lists with an entry for each layer."""
    if isinstance(given := found.get("rope_parameters"), dict) and {_FULL, _SLIDING} & set(given):
        found["rope_parameters"] = {_FULL: {}, _SLIDING: {}} | given
        return
    scaling, ropes = found.pop("rope_scaling", None) or {}, dict[str, dict[str, Any]]()
    if not isinstance(scaling, dict):
        raise CheckpointError(f"rope_scaling: expected an object, got {short(scaling)}")
    columns = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}
    for key, own in columns.items():
        value = found.pop(key, None)
        each = value if isinstance(value, list) else [value] * len(kinds)
        if len(each) != len(kinds):
            raise CheckpointError(f"{key}: expected a number for each of {len(kinds)} layers, got {short(value)}")
        for kind, number in zip(kinds, each, strict=True):
            if number is not None and ropes.setdefault(kind, {}).setdefault(own, number) != number:
                raise CheckpointError(f"{key}: expected one number for all layers of a kind, got {short(value)}")
    found["rope_parameters"] = {kind: {"rope_type": "default", **ropes.get(kind, {})} for kind in (_FULL, _SLIDING)}
    found["rope_parameters"][_FULL] |= scaling
