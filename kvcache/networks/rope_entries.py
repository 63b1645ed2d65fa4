"""The rotary embeddings that a `config.json` describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvcache.errors import CheckpointError
from kvcache.kernels.functions import log, power
from kvcache.networks.entries import Entries
from kvcache.networks.family import Family
from kvcache.networks.rope import Rope
from kvcache.support.arguments import short

__all__ = ["Ropes", "long_attention_factor", "ropes_of"]

_LEAST_BETA = 1e-6  # of YaRN's betas (rotations over the context): keeps the wavelengths finite
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PARAMETERS, _SCALING = "rope_parameters", "rope_scaling"
# The keys that one of the kinds reads. transformers too ignores those of another kind.
_READ = frozenset((
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
    "short_factor", "long_factor",
))
# Keys that nothing here reads and that change no text: sections are those of images, the others are remarks.
_REMARKS = frozenset({"mrope_section", "mrope_interleaved", "max_position_embeddings", "finetuned"})
# Keys that some families read, or none, and the values without an effect.
_GROWTH = "llama_4_scaling_beta"
_ALPHA = "alpha"  # of Hunyuan: its rotary embedding is called dynamic and does not change with the text
# Phi-3.5-MoE multiplies cosines and sines by the first factor within the original context, else by the second.
_SHORT, _LONG = "short_mscale", "long_mscale"
_NEUTRAL = {"attn_factor": 1, _GROWTH: 0, "partial_rotary_factor": 1, _ALPHA: 0, _SHORT: None, _LONG: None}


class Ropes(NamedTuple):
    """The rotary embeddings of a network.

    Attributes:
        rope: of all layers, or of those without a window.
        window_rope: of the layers with a window, if they have another one.
        rotary_dim: the channels of a head that they turn, the first ones.
        window_rotary_dim: those in layers with a window.
    """

    rope: Rope
    window_rope: Rope | None
    rotary_dim: int
    window_rotary_dim: int


def ropes_of(
    config: Mapping[str, Any], family: Family, positions: int, head_dim: int, window_head_dim: int
) -> Ropes:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

    Args:
        head_dim, window_head_dim: the channels of a head in layers without and with a window.

    Raises:
        CheckpointError: an entry of the wrong kind, an embedding that is not supported, or two that differ.
    """
    given = [name for name in (_PARAMETERS, _SCALING) if config.get(name) not in (None, {})]
    dims = head_dim, window_head_dim
    found = [_ropes_in(name, config, family, positions, dims) for name in given or [_PARAMETERS]]
    if found[0] != found[-1]:
        raise CheckpointError(f"{_SCALING}: expected none beside {_PARAMETERS}, got {short(config[_SCALING])}")
    return found[0]


def _ropes_in(
    name: str, config: Mapping[str, Any], family: Family, positions: int, head_dims: tuple[int, int]
) -> Ropes:
    """The ropes of the entry `name`; those of the family's default if it is absent or null."""
    read = Entries(config, defaults=family.defaults)
    values = config.get(name)
    values = family.defaults.get(name, {}) if values is None else values
    if not isinstance(values, dict):
        raise CheckpointError(f"{name}: expected an object, got {short(values)}")
    nested = any(key in (_FULL, _SLIDING) or isinstance(value, dict) for key, value in values.items())
    if nested and not (family.rope_per_kind and set(values) <= {_FULL, _SLIDING}):
        raise CheckpointError(f"{name}: expected one kind for all layers, got one per layer type: {short(values)}")

    theta = read.number("rope_theta", 10000.0, at_least=1.0)
    parts = [(_part(values, name, _FULL), f"{name}.{_FULL}.", theta)] if nested else [(values, f"{name}.", theta)]
    if family.rope_per_kind:
        if nested:
            sliding, where = _part(values, name, _SLIDING), f"{name}.{_SLIDING}."
        else:
            sliding, where = {}, "rope_local_base_freq: "
            if name == _PARAMETERS and "rope_local_base_freq" in family.defaults:
                _refuse_flat(values, theta)
            theta = Entries(values, f"{name}.").number("rope_theta", theta, at_least=1.0)
        parts.append((sliding, where, read.number("rope_local_base_freq", theta, at_least=1.0)))
    inside = [part for part, _, _ in parts] if nested else [values]
    sizes = [_rotary_dim(inside[min(i, len(inside) - 1)], config, family, size) for i, size in enumerate(head_dims)]
    first, *rest = (
        _growing(_RopeEntry(Entries(part, where), read, family, positions, theta, size))
        for (part, where, theta), size in zip(parts, sizes, strict=False)
    )
    return Ropes(first, rest[0] if rest and rest[0] != first else None, *sizes)


def _part(values: Mapping[str, Any], name: str, kind: str) -> dict[str, Any]:
    """The entry of one kind of layer."""
    found = values.get(kind)
    if not isinstance(found, (dict, type(None))):
        raise CheckpointError(f"{name}.{kind}: expected an object, got {short(found)}")
    return found or {}


def _refuse_flat(values: dict[str, Any], theta: float) -> None:
    """Where the two kinds have bases of their own, an entry without kinds does not say which of them it means."""
    if not values.items() <= {"rope_type": "default", "rope_theta": theta}.items():
        raise CheckpointError(f"{_PARAMETERS}: expected {_FULL} and {_SLIDING}, got {short(values)}")


def _rotary_dim(values: Mapping[str, Any], config: Mapping[str, Any], family: Family, head_dim: int) -> int:
    """The channels that are turned: all, but for a family that has `partial_rotary_factor`."""
    if "partial_rotary_factor" not in family.defaults:
        return head_dim
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is None and "rotary_dim" in family.defaults and config.get("rotary_dim") is not None:
        turned = Entries(config).size("rotary_dim", most=head_dim)
        if turned % 2:
            raise CheckpointError(f"rotary_dim: expected an even number of channels, got {turned}")
        return turned
    if partial is None:
        partial = family.defaults["partial_rotary_factor"]
    if type(partial) not in (int, float) or not 0 < partial <= 1 or int(head_dim * partial) % 2:
        raise CheckpointError(
            f"partial_rotary_factor: expected an even share of {head_dim} channels, got {short(partial)}"
        )
    size = int(head_dim * partial)
    if not size:
        raise CheckpointError(f"partial_rotary_factor: expected channels to turn, got {short(partial)} of {head_dim}")
    return size


class _RopeEntry(NamedTuple):
    """The entry of a rotary embedding, and what a configuration says around it.

    Attributes:
        read: the entry.
        config: the whole configuration.
        family: of the network.
        positions: of the network.
        theta: the base where the entry has none.
        rotary_dim: the channels that are turned.
    """

    read: Entries
    config: Entries
    family: Family
    positions: int
    theta: float
    rotary_dim: int

    @property
    def original(self) -> int:
        """The positions before the embedding was stretched."""
        name = "original_max_position_embeddings"
        return (self.read if self.config.get(name) is None else self.config).size(name, self.positions)

    def factor(self, original: int) -> float:
        """How many times longer the context is than the original one."""
        return self.read.number("factor", max(self.positions / original, 1.0), at_least=1.0)


def _growing(entry: _RopeEntry) -> Rope:
    """The rotary embedding of an entry, and how queries grow with their position."""
    read, family = entry.read, entry.family
    _refuse_unread(read, family)
    rope = _rope(entry)
    growth = read.number(_GROWTH, 0.0) if _GROWTH in family.defaults else 0.0
    if not growth:
        return rope
    original = read.size("original_max_position_embeddings", rope.original_positions or None)
    return replace(rope, query_growth=growth, original_positions=original)


def _rope(entry: _RopeEntry) -> Rope:
    read, family, theta = entry.read, entry.family, entry.read.number("rope_theta", entry.theta, at_least=1.0)
    if theta <= 1:
        raise CheckpointError(f"rope_theta: expected more than 1, got {theta}")
    found = read.get("rope_type")
    kind = read.get("type") if found is None else found
    kind = "default" if kind is None else kind
    if family.model_type == "phi3" and kind in ("su", "yarn"):  # its older names
        kind = "longrope"
    if kind == "mrope":  # several positions for a part of an image; those of a text are one
        kind = "default"
    if kind == "dynamic" and _ALPHA in family.defaults and read.get(_ALPHA) not in (None, 0) and entry.rotary_dim > 2:
        theta *= power(read.number(_ALPHA, at_least=1.0), entry.rotary_dim / (entry.rotary_dim - 2))
        kind = "default"
    if _LONG in family.defaults and kind not in ("default", "longrope"):
        raise CheckpointError(f"{entry.read.where}rope_type: expected default or longrope, got {short(kind)}")
    if not isinstance(kind, str) or kind not in _KINDS:
        *known, last = _KINDS
        raise CheckpointError(f"{entry.read.where}rope_type: expected {', '.join(known)} or {last}, got {short(kind)}")
    return _KINDS[kind](entry._replace(theta=theta))


# -- kinds ------------------------------------------------------------------------------------------------------


def _default(entry: _RopeEntry) -> Rope:
    return Rope(theta=entry.theta)


def _linear(entry: _RopeEntry) -> Rope:
    return Rope(kind="linear", theta=entry.theta, factor=entry.read.number("factor", at_least=1.0))


def _llama3(entry: _RopeEntry) -> Rope:
    read, original = entry.read, entry.original
    low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
    if low > high or not high:
        expected = "low_freq_factor <= high_freq_factor, above 0"
        raise CheckpointError(f"{entry.read.where[:-1]}: expected {expected}, got {low} and {high}")
    factor = read.number("factor", at_least=1.0)
    return Rope("llama3", entry.theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(entry: _RopeEntry) -> Rope:
    read, original = entry.read, entry.original
    factor = entry.factor(original)
    fast, slow = read.number("beta_fast", 32.0), read.number("beta_slow", 1.0)
    if not _LEAST_BETA <= slow <= fast:
        name = entry.read.where[:-1]
        raise CheckpointError(f"{name}: expected {_LEAST_BETA:g} <= beta_slow <= beta_fast, got {slow} and {fast}")
    return Rope(
        "yarn", entry.theta, factor, original, beta_fast=fast, beta_slow=slow,
        attention_factor=_yarn_attention_factor(read, factor), truncate=read.flag("truncate", True),
    )


def _longrope(entry: _RopeEntry) -> Rope:
    read, original, pairs = entry.read, entry.original, entry.rotary_dim // 2
    factor = entry.factor(original)
    if _LONG in entry.family.defaults:
        usual, longer = _mscale(read, _SHORT), _mscale(read, _LONG)
    else:
        usual, longer = read.number("attention_factor", long_attention_factor(factor, original)), 0.0
    return Rope(
        "longrope", entry.theta, factor, original, attention_factor=usual, long_attention_factor=longer,
        divisors=read.numbers("short_factor", pairs), long_divisors=read.numbers("long_factor", pairs),
    )


def _proportional(entry: _RopeEntry) -> Rope:
    """One whose first pairs turn; the divisors of the others are infinite."""
    read, pairs = entry.read, entry.rotary_dim // 2
    share, factor = read.number("partial_rotary_factor", 1.0), read.number("factor", 1.0)
    turning = int(share * entry.rotary_dim // 2)
    if share > 1 or not factor:
        where = entry.read.where[:-1]
        raise CheckpointError(
            f"{where}: expected a partial_rotary_factor up to 1 and a positive factor, got {share} and {factor}"
        )
    return Rope("divided", entry.theta, divisors=(factor,) * turning + (math.inf,) * (pairs - turning))


_KINDS: dict[str, Callable[[_RopeEntry], Rope]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
    "proportional": _proportional,
}


def _mscale(read: Entries, key: str) -> float:
    found = read.number(key)
    if not found:
        raise CheckpointError(f"{read.where}{key}: expected a positive number, got {found}")
    return found


def _refuse_unread(read: Entries, family: Family) -> None:
    """Raise CheckpointError for a key that nothing here reads, unless its value changes nothing."""
    proportional = read.get("rope_type") == "proportional"
    for key in read:
        if key in _READ or key in _REMARKS or (key in _NEUTRAL and key in family.defaults):
            continue
        if key == "partial_rotary_factor" and (proportional or family.latent):  # latent attention names what turns
            continue
        value, neutral = read.get(key), _NEUTRAL.get(key)
        if value is not None and (type(value) not in (int, float) or value != neutral):
            expected = "no such key" if neutral is None else f"{neutral}, or no such key"
            raise CheckpointError(f"{read.where}{key}: expected {expected}, got {short(value)}")


def long_attention_factor(factor: float, original: int) -> float:
    """The temperature of LongRoPE (Ding et al., arXiv 2402.13753, section 3.4) for a context `factor` times longer."""
    return math.sqrt(1 + log(factor) / log(original)) if factor > 1 and original > 1 else 1.0


def _yarn_attention_factor(read: Entries, factor: float) -> float:
    """The temperature of YaRN (arXiv 2309.00071, section 3.4: `0.1 ln(s) + 1`), read or computed.

    `mscale` and `mscale_all_dim` are DeepSeek's refinement: the ratio of the two temperatures.
    """

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * log(factor) + 1.0

    if read.get("attention_factor") is not None:
        return read.number("attention_factor")
    if read.get("mscale") and read.get("mscale_all_dim"):
        return temperature(read.number("mscale")) / temperature(read.number("mscale_all_dim"))
    return temperature(1.0)
