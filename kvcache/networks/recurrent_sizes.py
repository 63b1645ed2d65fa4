"""The sizes of layers that keep a state of fixed size per text, and which layers of a network they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries, Flag, Size
from kvcache.support.arguments import short

__all__ = [
    "STATE_SIZES", "Kind", "Mixer", "Mlp", "Multipliers", "NextLayer", "RecurrentSizes", "layer_types_of", "mixers_of",
    "mlps_of",
]

Mixer = Literal["attention", "state", ""]
Mlp = Literal["mlp", "experts", ""]
Kind = Literal["conv", "delta", "kimi", "mamba"]

_MAX_TAPS = 64
_MAX_BOUND = 80  # below its e^-80 a state is nothing in any case
# What files call these layers: as they are published, and as transformers 5 writes them.
_STATES = {
    "conv": ("conv",), "delta": ("linear_attention",), "kimi": ("linear_attention",),
    "mamba": ("mamba", "linear_attention"),
}
# The sizes of these layers and their biases, by the kind, or by the family that has keys of its own.
STATE_SIZES: dict[str, dict[str, Size]] = {
    "conv": {"taps": Size("conv_L_cache", 3, 2, _MAX_TAPS)},
    "delta": {
        "groups": Size("linear_num_key_heads", 16), "heads": Size("linear_num_value_heads", 32),
        "size": Size("linear_key_head_dim", 128), "dim": Size("linear_value_head_dim", 128),
        "taps": Size("linear_conv_kernel_dim", 4, most=_MAX_TAPS),
    },
    "kimi": {
        "heads": Size("linear_num_heads", 32), "size": Size("linear_head_dim", 128),
        "taps": Size("linear_conv_kernel_dim", 4, most=_MAX_TAPS),
    },
    "granite": {
        "heads": Size("mamba_n_heads", 128), "dim": Size("mamba_d_head"), "size": Size("mamba_d_state", 256),
        "groups": Size("mamba_n_groups", 1), "taps": Size("mamba_d_conv", 4, most=_MAX_TAPS),
    },
    "mamba": {
        "heads": Size("mamba_num_heads"), "dim": Size("mamba_head_dim", 64), "size": Size("ssm_state_size", 128),
        "groups": Size("n_groups", 8), "taps": Size("conv_kernel", 4, most=_MAX_TAPS),
    },
}
STATE_SIZES["falcon"] = STATE_SIZES["granite"]  # of Falcon-H1, which has one more key in folders
_BIASES = {
    "granite": (Flag("mamba_conv_bias", True), Flag("mamba_proj_bias", False)),
    "mamba": (Flag("use_conv_bias", True), Flag("use_bias", False)),
}
_DOUBLES = "linear_allow_neg_eigval"  # of OLMo-Hybrid: whether steps go up to 2
_BOUND = "kda_lower_bound"  # of Ling 3.0: the least logarithm of a decay, 0 for none; its gates have one matrix each
_ATTENDING = ("attention", "full_attention")
_MLPS: dict[str, Mlp] = {"mlp": "mlp", "moe": "experts"}  # layers without a mixer
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


class Multipliers(NamedTuple):
    """The numbers that Falcon-H1 multiplies by.

    Attributes:
        attention_in, key, attention_out: the rows that attention takes, its keys, and what it adds.
        state_in, parts, state_out: the rows that a layer with a state takes, z, x, B, C and steps of their projection,
            and what it adds.
        gate, down: the gate of an MLP before its activation, and what it adds.
    """

    attention_in: float
    key: float
    attention_out: float
    state_in: float
    parts: tuple[float, ...]
    state_out: float
    gate: float
    down: float

    @classmethod
    def of(cls, read: Entries) -> Multipliers:
        """Read the keys of a `config.json`. Raises CheckpointError naming the key and its value."""
        lists = {"mlp_multipliers": 2, "ssm_multipliers": 5}
        mlp, parts = (
            (1.0,) * count if read.get(key) is None else read.numbers(key, count) for key, count in lists.items()
        )
        names = ("attention_in", "key", "attention_out", "ssm_in", "ssm_out")
        attention_in, keys, attention_out, state_in, state_out = (
            read.number(f"{name}_multiplier", 1.0) for name in names
        )
        return cls(attention_in, keys, attention_out, state_in, parts, state_out, *mlp)


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """The layers with a state of a network.

    Attributes:
        kind: "conv": a short convolution between two gates. "delta": the gated delta rule. "kimi": the same with a
            decay for each channel of keys. "mamba": Mamba2.
        taps: rows that the convolution sees, the newest among them.
        conv_bias, projection_bias: whether the convolution, and the projections around the layer, add a bias.
        heads, groups: of matrices, and of the keys and queries (delta, kimi) or B and C (mamba) that they share; 0 of
            "conv".
        size, dim: rows and columns of the matrix of a head.
        tiled: whether head h has group `h % groups`; if not, `h // (heads // groups)`.
        channels: of the convolution.
        step_limits: the least and the largest step (mamba).
        apart: whether queries, keys and values have projections and convolutions of their own in files (delta, kimi).
        factor: of the steps (delta).
        gating: whether results are gated before their norm, after it, or without one ("alone") (mamba).
        norm_eps: what the norm of heads adds; 0: what all norms add.
        rank: channels between the two matrices that make decays, and the two that make gates; 0: one makes each (kimi).
        bound: the least logarithm of a decay; 0: there is none (kimi).
    """

    kind: Kind
    taps: int
    channels: int
    conv_bias: bool = False
    projection_bias: bool = False
    heads: int = 0
    groups: int = 0
    size: int = 0
    dim: int = 0
    tiled: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    apart: bool = False
    factor: float = 1.0
    norm_eps: float = 0.0
    rank: int = 0
    bound: float = 0.0
    gating: Literal["before", "after", "alone"] = "before"

    @property
    def inner(self) -> int:
        """Channels that the output projection takes."""
        return self.heads * self.dim if self.heads else self.channels

    @classmethod
    def of(cls, kind: Kind, read: Entries, hidden_size: int) -> RecurrentSizes:
        """Read the keys of a `config.json`. Raises CheckpointError naming the key and its value."""
        if kind == "conv":
            bias = read.flag("conv_bias", False)
            return cls(kind, STATE_SIZES[kind]["taps"](read), hidden_size, bias, bias)
        if kind == "kimi":
            return _kimi_sizes(read)
        keys = "granite" if kind == "mamba" and not read.default("mamba_num_heads") else kind
        _expect_silu(read, "mamba_hidden_act" if keys == "mamba" else "hidden_act")
        rows, doubles = STATE_SIZES[keys], read.has_default(_DOUBLES)
        if doubles:
            rows = _olmo_sizes(rows, read, hidden_size)
        heads, groups, size, taps = (rows[name](read) for name in ("heads", "groups", "size", "taps"))
        dim = _granite_dim(read, hidden_size, heads) if keys == "granite" else rows["dim"](read)
        if heads % groups and kind == "delta":
            raise CheckpointError(f"{rows['heads'].key}: expected a multiple of {groups} key heads, got {heads}")
        if heads % groups:
            raise CheckpointError(f"{rows['groups'].key}: expected a divisor of {heads} heads, got {groups}")
        channels = heads * dim + 2 * groups * size
        if kind == "delta":
            found = cls(kind, taps, channels, heads=heads, groups=groups, size=size, dim=dim)
            if not doubles:
                return found
            return replace(found, apart=True, factor=2.0 if read.flag(_DOUBLES, True) else 1.0, norm_eps=1e-5)
        conv, projection = (row(read) for row in _BIASES[keys])
        found = cls(kind, taps, channels, conv, projection, heads, groups, size, dim, step_limits=_limits(read))
        return replace(found, gating=_gating(read, projection)) if read.has_default("mamba_rms_norm") else found


def _kimi_sizes(read: Entries) -> RecurrentSizes:
    """The sizes of Kimi delta attention, whose heads are as high as wide."""
    _expect_silu(read, "hidden_act")
    heads, size, taps = (STATE_SIZES["kimi"][name](read) for name in ("heads", "size", "taps"))
    bounded, bound = read.has_default(_BOUND), read.get(_BOUND)
    if bounded and not (type(bound) in (int, float) and -_MAX_BOUND <= bound <= 0):
        raise CheckpointError(f"{_BOUND}: expected a number from {-_MAX_BOUND} to 0, got {short(bound)}")
    return RecurrentSizes(
        "kimi", taps, 3 * heads * size, heads=heads, groups=heads, size=size, dim=size, apart=True,
        rank=0 if bounded else size, bound=float(bound) if bounded else 0.0,
    )


def _gating(read: Entries, projection_bias: bool) -> Literal["before", "after", "alone"]:
    """Where the norm of Falcon-H1's layers with a state is, whose two projections have biases both or not."""
    if read.flag("projectors_bias", False) != projection_bias:
        raise CheckpointError(f"projectors_bias: expected {projection_bias} as in mamba_proj_bias, got another")
    if not read.flag("mamba_rms_norm", False):
        return "alone"
    return "after" if read.flag("mamba_norm_before_gate", True) else "before"


def _olmo_sizes(rows: Mapping[str, Size], read: Entries, hidden_size: int) -> dict[str, Size]:
    """The rows of the sizes of OLMo-Hybrid, whose defaults are those of attention."""
    usual = read.size("num_attention_heads")
    own = {name: rows[name]._replace(default=usual) for name in ("heads", "groups")}
    own["size"] = rows["size"]._replace(default=max(1, int(0.75 * hidden_size / own["groups"](read))))
    return {**rows, **own, "dim": rows["dim"]._replace(default=2 * own["size"](read))}


def _granite_dim(read: Entries, hidden_size: int, heads: int) -> int:
    """The channels of a head of Granite, which are those of the layer over its heads."""
    inner = read.size("mamba_expand", 2) * hidden_size
    if read.has_default("mamba_d_ssm") and read.get("mamba_d_ssm") is not None:
        inner = read.size("mamba_d_ssm")
    dim = inner // heads if read.get("mamba_d_head") in (None, "auto") else read.size("mamba_d_head")
    if heads * dim != inner:
        raise CheckpointError(f"mamba_n_heads: expected heads of {inner} channels in all, got {heads} of {dim}")
    return dim


def _expect_silu(read: Entries, key: str) -> None:
    """Raise CheckpointError where the convolution has another activation."""
    if read.get(key) not in (None, "silu", "swish"):
        raise CheckpointError(f"{key}: expected silu in layers with a state, got {short(read.get(key))}")


def _limits(read: Entries) -> tuple[float, float]:
    """The limits of steps; transformers 5 writes infinity as an object."""
    found = read.get("time_step_limit")
    if found is None:
        return 0.0, float("inf")
    if isinstance(found, (list, tuple)) and len(found) == 2:
        least, most = (float(x["__float__"]) if x == {"__float__": "Infinity"} else x for x in found)
        if all(type(x) in (int, float) for x in (least, most)) and 0 <= least <= most:
            return float(least), float(most)
    raise CheckpointError(f"time_step_limit: expected two numbers from 0 on, ascending, got {short(found)}")


class NextLayer(NamedTuple):
    """How an MTP layer differs from the last layer.

    Attributes:
        like: the layer that attends as it does.
        mlp: what it has behind attention.
        rotated: whether it has a rotary embedding.
        is_raw: whether it takes hidden rows as they are before the last norm, and gives them so.
    """

    like: int
    mlp: Mlp
    rotated: bool
    is_raw: bool


def layer_types_of(config: Mapping[str, Any], kind: Kind | Literal[""]) -> list[Any] | None:
    """The kinds of the layers, by whatever key a network with states of this kind has; None: no key says.

    Raises:
        CheckpointError: no list, or letters that no kind has.
    """
    if not kind:
        return None
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and set(pattern) <= set(_LETTERS):
        return [_LETTERS[letter] for letter in pattern]
    if pattern is not None:
        letters = " ".join(_LETTERS)
        raise CheckpointError(f"hybrid_override_pattern: expected letters of {letters}, got {short(pattern)}")
    listed = config.get("layers_block_type", config.get("layer_types"))
    if not isinstance(listed, (list, type(None))):
        raise CheckpointError(f"layer_types: expected a list, got {short(listed)}")
    return listed


def mlps_of(listed: list[Any] | None, mixers: tuple[Mixer, ...], has_experts: list[bool]) -> tuple[Mlp, ...]:
    """The MLPs behind the mixer of each layer; where some layers are an MLP alone, the others have none."""
    if all(mixers):
        return tuple("experts" if own else "mlp" for own in has_experts)
    return tuple("" if mixer else _MLPS[each] for mixer, each in zip(mixers, listed or (), strict=True))


def mixers_of(
    config: Mapping[str, Any], listed: list[Any] | None, kind: Kind | Literal[""], num_layers: int
) -> tuple[Mixer, ...]:
    """The mixer of each layer, by its kind, in a network whose states are of this kind, if it has any.

    Raises:
        CheckpointError: other names, or another number of them.
    """
    if not kind:
        return (_named(has_state=False),) * num_layers
    states, alone = _STATES[kind], tuple(_MLPS) if kind == "mamba" else ()
    if listed is None and kind == "conv":
        return _by_index(config.get("full_attn_idxs"), num_layers)
    if listed is None and kind == "delta":
        every = Entries(config).size("full_attention_interval", 4)
        return tuple(_named(has_state=(i + 1) % every != 0) for i in range(num_layers))
    allowed = (*states, *_ATTENDING, *alone)
    if listed is None or len(listed) != num_layers or not all(each in allowed for each in listed):
        raise CheckpointError(
            f"layer_types: expected {' or '.join(allowed)} for each of {num_layers} layers, got {short(listed)}"
        )
    return tuple("" if each in alone else _named(has_state=each in states) for each in listed)


def _by_index(attending: Any, num_layers: int) -> tuple[Mixer, ...]:
    """The same by a list of the layers that attend; None: all do."""
    if attending is None:
        return (_named(has_state=False),) * num_layers
    if not isinstance(attending, list) or not all(type(i) is int and 0 <= i < num_layers for i in attending):
        raise CheckpointError(f"full_attn_idxs: expected layers from 0 to {num_layers - 1}, got {short(attending)}")
    return tuple(_named(has_state=i not in attending) for i in range(num_layers))


def _named(*, has_state: bool) -> Mixer:
    return "state" if has_state else "attention"
