"""The sizes of each layer of a network: the same for all layers, or one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries
from kvcache.networks.family import Family
from kvcache.networks.sparse_gates import cutoff_of
from kvcache.support.arguments import short

__all__ = ["LayerSizes", "first_sharing", "sizes_of"]

_EACH = "per_layer_config"
_HEADS = "num_attention_heads_per_layer"
_OVERRIDES = frozenset({"head_dim", "num_key_value_heads", "intermediate_size"})


class LayerSizes(NamedTuple):
    """The sizes of one layer.

    Attributes:
        num_kv_heads, head_dim: of its attention.
        intermediate_size: of its MLP, or of each of its experts if there is none beside them.
        num_heads: its query heads.
        kv_layer: the layer whose K and V it reads; None: it has its own.
        has_values: whether it has a matrix for values; if not, they are its keys before their norm and RoPE.
        value_dim: the channels of a value where it has fewer than a key; 0: it has as many.
        cutoff: how many deviations above the mean of a row the gates of its MLP begin to count; None: all count.
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_heads: int
    kv_layer: int | None = None
    has_values: bool = True
    value_dim: int = 0
    cutoff: float | None = None


def sizes_of(
    config: Mapping[str, Any], family: Family, windows: Sequence[int | None], all_layers: LayerSizes
) -> tuple[LayerSizes, ...]:
    """The sizes of each layer.

    Args:
        config: `config.json`.
        windows: of each layer.
        all_layers: the sizes of a layer of which nothing else is said.

    Raises:
        CheckpointError: an entry of the wrong kind, sizes that do not fit, heads of several sizes in layers with or
            without a window.
    """
    read = Entries(config, defaults=family.defaults)
    if not family.layers_differ:
        pairs, heads = all_layers.num_kv_heads, _query_heads(read, len(windows), all_layers.num_heads)
        found = [
            all_layers._replace(num_heads=own, num_kv_heads=pairs * (family.window_pairs if window else 1))
            for own, window in zip(heads, windows, strict=True)
        ]
        _check(found, windows)
        return tuple(found)
    same = read.flag("attention_k_eq_v", False)
    each = _overrides(config, read, windows, same)
    first_shared = len(windows) - read.size("num_kv_shared_layers", 0, at_least=0, most=len(windows) - 1)
    wide, cutoffs = read.flag("use_double_wide_mlp", False), _cutoffs(read, len(windows))
    found, owners = [], dict[bool, int]()
    for layer, window in enumerate(windows):
        size = Entries(each.get(layer, {}), f"{_EACH}.{layer}.")
        owner = None if layer < first_shared else owners.get(window is None)
        if layer < first_shared:
            owners[window is None] = layer
        elif owner is None:
            raise CheckpointError(
                f"num_kv_shared_layers: expected a layer like {layer} before layer {first_shared}, got none"
            )
        found.append(LayerSizes(
            size.size("num_key_value_heads", all_layers.num_kv_heads),
            size.size("head_dim", all_layers.head_dim),
            size.size("intermediate_size", all_layers.intermediate_size * (2 if wide and owner is not None else 1)),
            all_layers.num_heads,
            owner,
            not (same and window is None),
            cutoff=cutoffs[layer],
        ))
    _check(found, windows)
    return tuple(found)


def _query_heads(read: Entries, layers: int, usual: int) -> list[int]:
    """The query heads of each layer, which some families list."""
    found = read.get(_HEADS) if read.has_default(_HEADS) else None
    if found is None:
        return [usual] * layers
    if not isinstance(found, list) or len(found) != layers or not all(type(each) is int and each > 0 for each in found):
        raise CheckpointError(f"{_HEADS}: expected a positive number for each of {layers} layers, got {short(found)}")
    return found


def first_sharing(sizes: Sequence[LayerSizes]) -> int:
    """The layer from which on all read K and V of others; the number of layers: the last one has its own."""
    own = [layer for layer, size in enumerate(sizes) if size.kv_layer is None]
    return own[-1] + 1


def _cutoffs(read: Entries, layers: int) -> list[float | None]:
    """From where on the gates of each layer count: of the shares that do not, 0 where all do."""
    key = "activation_sparsity_pattern"
    if not read.has_default(key):
        return [None] * layers
    given = read.get(key)
    if given is None:
        sparse = 10 if layers > 10 else 0
        given = [0.95] * sparse + [0.0] * (layers - sparse)
    if not isinstance(given, list) or len(given) != layers or not all(_is_share(each) for each in given):
        raise CheckpointError(f"{key}: expected a number below 1 for each of {layers} layers, got {short(given)}")
    return [cutoff_of(share) if share else None for share in given]


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and (value == 0 or 1e-7 <= value <= 0.9999999)  # beyond, its float is 0 or 1


def _overrides(
    config: Mapping[str, Any], read: Entries, windows: Sequence[int | None], same: bool
) -> dict[int, dict[str, Any]]:
    """The sizes of single layers: `per_layer_config` of transformers 5, or two keys for those without a window."""
    given, inner = config.get(_EACH), config.get("intermediate_size")
    if isinstance(inner, list):
        if len(inner) != len(windows):
            expected = f"one for each of {len(windows)} layers"
            raise CheckpointError(f"intermediate_size: expected {expected}, got {short(inner)}")
        given = {str(layer): {"intermediate_size": size} for layer, size in enumerate(inner)}
    if given is None and not read.has_default("global_head_dim"):
        return {}
    if given is None:
        full = {"head_dim": read.size("global_head_dim")}
        if same and read.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = read.size("num_global_key_value_heads")
        return {layer: full for layer, window in enumerate(windows) if window is None}
    layers = [_number(key, len(windows)) for key in given] if isinstance(given, dict) else [None]
    if None in layers or len(set(layers)) < len(layers):
        raise CheckpointError(f"{_EACH}: expected an object with numbers of {len(windows)} layers, got {short(given)}")
    for layer, sizes in given.items():
        if not isinstance(sizes, dict) or not set(sizes) <= _OVERRIDES:
            expected = "an object with " + ", ".join(sorted(_OVERRIDES))
            raise CheckpointError(f"{_EACH}.{layer}: expected {expected}, got {short(sizes)}")
    return {layer: sizes for layer, sizes in zip(layers, given.values(), strict=True) if layer is not None}


def _number(key: str, count: int) -> int | None:
    """The layer that a key names, with zeros before its number or not: transformers makes all of one width."""
    number = int(key) if len(key) < 9 and key.isascii() and key.isdecimal() else count
    return number if number < count else None


def _check(found: Sequence[LayerSizes], windows: Sequence[int | None]) -> None:
    """Raise CheckpointError unless heads fit, and layers of one kind have heads of one size, as their RoPE has."""
    for layer, size in enumerate(found):
        if size.num_heads % size.num_kv_heads:
            raise CheckpointError(
                f"num_key_value_heads: expected a divisor of {size.num_heads} attention heads, got {size.num_kv_heads} "
                f"in layer {layer}"
            )
        if size.head_dim % 2:
            raise CheckpointError(
                f"head_dim: expected an even number (RoPE turns pairs), got {size.head_dim} in layer {layer}"
            )
        owner = found[layer if size.kv_layer is None else size.kv_layer]
        if size[:2] != owner[:2]:
            raise CheckpointError(
                f"num_kv_shared_layers: expected the {owner.num_kv_heads} KV heads of {owner.head_dim} channels of "
                f"layer {size.kv_layer} in layer {layer}, got {size.num_kv_heads} of {size.head_dim}"
            )
    for full in (True, False):
        dims = sorted({size.head_dim for size, window in zip(found, windows, strict=True) if (window is None) == full})
        if len(dims) > 1:
            kind = "without" if full else "with"
            raise CheckpointError(f"head_dim: expected one for all layers {kind} a window, got {short(dims)}")
