"""The fields of a network's configuration: one row each, with its keys in folders and in GGUF and what reads it.

`FIELDS` is the table. A field that one entry holds is a row of `entries`, with its key, default and check; a field
that others decide is a function of what is read so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Cap, Entries, Number, Size
from kvcache.networks.expert_sizes import ExpertSizes
from kvcache.networks.family import Family
from kvcache.networks.index_sizes import INDEXED, IndexSizes
from kvcache.networks.latent_sizes import LatentSizes, latent_scale
from kvcache.networks.layer_sizes import LayerSizes, sizes_of
from kvcache.networks.padded_heads import check_sizes
from kvcache.networks.quantisation import quantisation_of
from kvcache.networks.recurrent_sizes import (
    Mlp,
    Multipliers,
    NextLayer,
    RecurrentSizes,
    layer_types_of,
    mixers_of,
    mlps_of,
)
from kvcache.networks.residual_streams import StreamSizes
from kvcache.networks.rope import QueryGrowth
from kvcache.networks.rope_entries import Ropes, ropes_of
from kvcache.support.arguments import short

__all__ = ["FIELDS", "ConfigField", "gguf_keys", "read_fields"]

_MAX_LAYERS = 1 << 16  # some fields have an element for each layer
_FIRST_PATTERN = "prefix_dense_sliding_window_pattern"  # of windows, in layers with an MLP in place of experts
_LIMITS = "swiglu_limits_shared", "swiglu_limits"  # of the MLP or the one beside experts, of experts
_BOTH_WAYS = "use_bidirectional_attention"  # "vision": in the parts of an image alone, and texts have none
# What files call layers without a window, with one, and with chunks.
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MEANT = {("gemma", "gelu"): "gelu_pytorch_tanh"}  # what names of a family stand for, in its first files
_WITHOUT_GATE = {"relu2": "relu2", "gelu_pytorch_tanh": "gelu_tanh", "xielu": "xielu"}


class ConfigReading(Entries):
    """A `config.json` while it is read.

    Attributes:
        config: its entries. After `layers`, lists of layers name windows alone, and bases are those of kinds of layers.
        family: the row of its architecture.
        listed: what it calls the layers of a network that has states, without their windows, after `layers`.
        num_layers: the number of layers, after `layers`.
        found: the fields that are read so far.
    """

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        super().__init__(config, defaults=family.defaults)
        self.config, self.family, self.found = config, family, SimpleNamespace()
        self.listed: list[Any] | None = None
        self.num_layers = 0

    def layers(self) -> int:
        """Read the lists of layers, and return the number of layers."""
        config, family = self.config, self.family
        self.listed = None if family.paired else layer_types_of(config, family.recurrence)
        self.num_layers = self.size("num_hidden_layers", len(self.listed or ()) or None, most=_MAX_LAYERS)
        if family.paired:
            self.listed = ["mamba", "attention"] * self.num_layers
            self.num_layers *= 2
        if family.recurrence and family.windows == "none":  # their lists name no windows
            config = {key: value for key, value in config.items() if key != "layer_types"}
        elif family.recurrence:
            kinds = self.listed or [
                {2: _FULL, 0: _SLIDING}.get(i % 4 if i else 1, "conv") for i in range(self.num_layers)  # of LFM3
            ]
            config = {**config, "layer_types": [each if each == _SLIDING else _FULL for each in kinds]}
            self.listed = [_FULL if each == _SLIDING else each for each in kinds]
        if family.index and "layer_types" in config:
            config = _without_types(config, self.num_layers)
        if "layer_rope_theta" in family.defaults:
            config = _with_bases(config, self.num_layers, family.defaults["layer_rope_theta"] == "last")
        self.config = config
        return self.num_layers

    def derived(self, key: str, size: int, *, at_least: int = 1) -> int:
        """A size that others give: null means `size`; an absent key means the family's default, if it has one."""
        default = size if key in self.config else self.family.defaults.get(key, size)
        return Entries(self.config).size(key, default, at_least=at_least)

    @cached_property
    def ropes(self) -> Ropes:
        """The rotary embeddings, and the channels that they turn."""
        found = self.found
        dims = {window is None: size.head_dim for size, window in zip(found.sizes, found.windows, strict=True)}
        if found.latent is not None:
            dims = {True: found.latent.turned, False: found.latent.turned}
        full, slides = (dims.get(each, found.head_dim) for each in (True, False))
        return ropes_of(self.config, self.family, found.max_position_embeddings, full, slides)


class ConfigField(NamedTuple):
    """A row of the table.

    Attributes:
        read: makes the value, of a file as far as it is read.
        gguf: the key in GGUF files, after the architecture and a dot; "": they do not say it so.
        keys: those in `config.json`; none: that of `read`.
        optional: whether only families read the entry whose defaults have its key.
    """

    read: Callable[[ConfigReading], Any] | Cap | Number | Size
    gguf: str = ""
    keys: tuple[str, ...] = ()
    optional: bool = False


def read_fields(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of a `ModelConfig` but for its architecture.

    Args:
        config: `config.json` of the text network.
        family: its row.

    Raises:
        CheckpointError: names the key and its value.
    """
    reading = ConfigReading(family.translated(config) if family.translated else config, family)
    _refuse_unsupported(reading)
    for name, field in FIELDS.items():
        setattr(reading.found, name, field.read(reading))
    return vars(reading.found) | {name: getattr(family, name) for name in _OF_FAMILY}


def gguf_keys(family: Family) -> list[tuple[str, str]]:
    """The keys of `config.json` with those of GGUF files; of several for a key the last one that a file has counts."""
    found = [
        (family.eps_key if key == "rms_norm_eps" else key, field.gguf) for field in FIELDS.values() if field.gguf
        for key in field.keys or ((field.read.key,) if isinstance(field.read, tuple) else ())
        if not field.optional or key in family.defaults
    ]
    return found + (family.experts.gguf_keys() if family.experts else [])


def _refuse_unsupported(read: ConfigReading) -> None:
    """Raise CheckpointError for an option that changes the result and is not implemented."""
    family, quantisation = read.family, quantisation_of(read.config)
    packed = {stack.packed for stack in family.experts.stacks} if family.experts else set[str]()
    if quantisation is not None and quantisation.method == "mxfp4" and "mxfp4" not in packed:
        raise CheckpointError(f"quantization_config: expected mxfp4 for gpt_oss alone, got it for {family.model_type}")
    gates = ("use_attention_gate", "use_sandwich_norm", "use_head_wise_attn_gate") if family.gates == "head" else ()
    for key in (*gates, "attn_output_gate") if family.attention_gate else gates:
        if not read.flag(key, True):
            raise CheckpointError(f"{key}: expected true, got false")
    for key in ("clip_qkv", "sparse_config") if family.model_type == "minicpm" else ("clip_qkv",):
        if read.get(key) is not None:
            raise CheckpointError(f"{key}: expected null, got {short(read.get(key))}")
    both = read.get(_BOTH_WAYS)
    if both not in (None, False, "vision") and not (both is True and read.has_default(_BOTH_WAYS)):
        raise CheckpointError(f"{_BOTH_WAYS}: expected false or 'vision', got {short(both)}")


def _causal(read: ConfigReading) -> bool:
    """Whether no token sees later ones."""
    if read.flag("is_causal", True) and read.get(_BOTH_WAYS) is not True:
        return True
    if read.found.recurrence is not None or read.family.layers_differ or read.family.next_layers:
        raise CheckpointError(f"is_causal: expected true for {read.family.model_type}, got false")
    return False


def _num_kv_heads(read: ConfigReading) -> int:
    """The KV heads; a latent is one, whatever the key says."""
    heads: int = read.found.num_heads
    pairs = read.derived("num_key_value_heads", heads)
    if heads % pairs:
        raise CheckpointError(f"num_key_value_heads: expected a divisor of {heads} attention heads, got {pairs}")
    return 1 if read.found.latent else pairs


def _head_dim(read: ConfigReading) -> int:
    latent: LatentSizes | None = read.found.latent
    share = read.found.hidden_size // read.found.num_heads
    size = latent.key if latent else read.derived("head_dim", share, at_least=0)
    if size % 2 or not size:
        raise CheckpointError(f"head_dim: expected an even number (RoPE turns pairs), got {size}")
    return size


def _recurrence(read: ConfigReading) -> RecurrentSizes | None:
    kind = read.family.recurrence
    return RecurrentSizes.of(kind, read, read.found.hidden_size) if kind and "state" in read.found.mixers else None


def _bias(read: ConfigReading, part: int) -> bool:
    """Whether queries, keys and values (0), the output projection (1), or the MLP (2) have biases."""
    key, fixed = read.family.bias_keys[part], (read.family.mlp_bias if part == 2 else read.family.qkv_bias)
    said = read.flag(key, False) if key else False
    return said if fixed is None else fixed and part != 1


def _qk_norm(read: ConfigReading) -> str:
    """The norm of queries and keys, which some families have in some networks alone."""
    absent = read.default("use_qk_norm") is not None and not read.flag("use_qk_norm", True)
    return "" if absent else read.family.qk_norm


def _gates(read: ConfigReading) -> str:
    """The gates of the results of attention, which Laguna has for heads or for their channels."""
    if read.default("gating") is None:
        return read.family.gates
    found = read.get("gating")
    if found is not True and found not in ("per-head", "per-element"):
        raise CheckpointError(f"gating: expected true, per-head or per-element, got {short(found)}")
    return "channel" if found == "per-element" else "head"


def _limits(read: ConfigReading) -> tuple[tuple[float, float], ...]:
    """The bounds of SwiGLU in each layer, of families that list them; null stands for none."""
    found = []
    for key in _LIMITS:
        listed = read.get(key) if read.has_default(key) else None
        each = [0] * read.num_layers if listed is None else listed
        known = isinstance(each, list) and len(each) == read.num_layers
        if not known or not all(value is None or (type(value) in (int, float) and 0 <= value < 1e30) for value in each):
            expected = f"a number from 0 on or null for each of {read.num_layers} layers"
            raise CheckpointError(f"{key}: expected {expected}, got {short(listed)}")
        found.append([float(value or 0) for value in each])
    return tuple(zip(*found, strict=True))


def _activation(read: ConfigReading) -> str:
    family = read.family
    key, known = family.activation_key, _ACTIVATIONS if family.mlp_gate else _WITHOUT_GATE
    name = read.default(key) or "silu" if read.get(key) is None else read.get(key)
    name = _MEANT.get((family.model_type, name), name) if isinstance(name, str) else name
    if family.activation is None and (not isinstance(name, str) or name not in known):
        raise CheckpointError(f"{key}: expected one of {', '.join(known)}, got {short(name)}")
    return family.activation or known[name]


def _factor(read: ConfigReading, key: str) -> float:
    """A positive factor; 1 in families without it."""
    found = read.number(key) if key in read.family.defaults else 1.0
    if not found:
        raise CheckpointError(f"{key}: expected a positive number, got {found}")
    return found


def _value_scale(read: ConfigReading) -> float:
    key = "attention_value_scale"
    return 1.0 if key in read.config and read.config[key] is None else _factor(read, key)


def _embedding_scale(read: ConfigReading) -> float:
    if read.family.embedding_by_size or ("mup_enabled" in read.family.defaults and read.flag("mup_enabled", False)):
        return math.sqrt(read.found.hidden_size)
    return _factor(read, "embedding_multiplier") * _factor(read, "scale_emb")


def _residual_scale(read: ConfigReading) -> float:
    if "scale_depth" in read.family.defaults:  # MiniCPM
        return _factor(read, "scale_depth") / math.sqrt(read.num_layers)
    return _factor(read, "residual_multiplier")


def _logit_scale(read: ConfigReading) -> float:
    if "dim_model_base" in read.family.defaults:  # MiniCPM
        hidden: int = read.found.hidden_size
        return _factor(read, "dim_model_base") / hidden
    factors = (_factor(read, key) for key in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
    return math.prod(factors) / _factor(read, "logits_scaling")


def _norm(read: ConfigReading) -> str:
    """The norm: in networks with an entry for each of both, an RMSNorm if its eps is there."""
    family, key = read.family, "rms_norm_eps"
    both = family.norm == "layer" and family.eps_key != key and read.has_default(key)
    return "rms" if both and read.get(key) is not None else family.norm


def _attention_scale(read: ConfigReading) -> float | None:
    """The factor of the scores; None for the usual one."""
    if read.found.latent is not None:
        keys = ("rope_parameters", "rope_scaling")  # which `ropes_of` has read
        rope = next((read.config[key] for key in keys if read.config.get(key)), read.default("rope_parameters"))
        return latent_scale(read.found.latent, rope or {})
    scale = None
    if read.default("query_pre_attn_scalar"):
        scalar = read.cap("query_pre_attn_scalar")
        scale = None if scalar is None else 1 / math.sqrt(scalar)
    elif read.default("qk_scale_factor"):
        scale = read.number("qk_scale_factor") / math.sqrt(read.found.head_dim)
    elif read.default("attention_multiplier"):
        scale = read.number("attention_multiplier")
    return None if scale == 1 / math.sqrt(read.found.head_dim) else scale


def _with_bases(config: Mapping[str, Any], num_layers: int, last: bool) -> dict[str, Any]:
    """The entries of Granite with windows: the base of each layer's RoPE, 0 for none, as one for each kind of layer.

    `last`: without a key every fourth layer from the last one is full and has base 0; if not, from the first, with one.
    """
    full = [(num_layers - 1 - i if last else i) % 4 == 0 for i in range(num_layers)]
    kinds = config.get("layer_types") or [_FULL if each else _SLIDING for each in full]
    flat = config.get("rope_parameters") or {}
    if not isinstance(kinds, list):
        raise CheckpointError(f"layer_types: expected a list, got {short(kinds)}")
    if not isinstance(flat, dict):
        raise CheckpointError(f"rope_parameters: expected an object, got {short(flat)}")
    usual = flat.get("rope_theta", config.get("rope_theta", 10000.0))
    bases = config.get("layer_rope_theta") or [0 if last and each else usual for each in full]
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


def _without_types(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The entries of a network with indexers without its list of layers, which are all of one kind."""
    kinds = config["layer_types"]
    if kinds is not None and kinds != [INDEXED] * num_layers:
        raise CheckpointError(f"layer_types: expected {INDEXED} for each of {num_layers} layers, got {short(kinds)}")
    return {key: value for key, value in config.items() if key != "layer_types"}


def _index(read: ConfigReading) -> IndexSizes | None:
    """The sizes of indexers."""
    kind = read.family.index
    if not kind:
        return None
    return IndexSizes.of(read, read.num_layers, read.found.latent.turned, kind == "neighbours")


def _rotated(read: ConfigReading) -> tuple[bool, ...]:
    """Which layers have a rotary embedding."""
    among = read.family.rope_in_windows
    if among == "given":
        return ((read.config.get("rope_parameters") or {}).get("rope_theta", 1.0) is not None,) * read.num_layers
    if among == "windows" or (among == "mixed" and read.get("sliding_window") is not None):
        # The first layers of Cohere's networks with experts have no window, and turn.
        also = read.default(_FIRST_PATTERN) is not None and read.size(_FIRST_PATTERN) == 1
        pairs = zip(read.found.windows, read.found.mlps, strict=True)
        return tuple(window is not None or (also and mlp == "mlp") for window, mlp in pairs)
    return _rotated_by_list(read)


def _unrotated_growth(read: ConfigReading) -> QueryGrowth | None:
    """How queries grow in layers without a rotary embedding; None: they do not."""
    key = "attn_temperature_tuning"
    if read.default(key) is None:
        return None
    if type(read.get(key)) not in (bool, int):  # files of the first version have a number
        raise CheckpointError(f"{key}: expected true or false, got {short(read.get(key))}")
    found = QueryGrowth(read.number("attn_scale"), read.size("floor_scale"))
    return found if read.get(key) and found.rate else None


def _position_type(read: Entries) -> str:
    """The kind of all position embeddings: "rope" in families without a key for it, "nope" for none."""
    if read.default("position_embedding_type") is None:
        return "rope"
    found = read.get("position_embedding_type")
    if found not in (None, "rope", "nope"):
        raise CheckpointError(f"position_embedding_type: expected rope or nope, got {short(found)}")
    return "rope" if found == "rope" else "nope"


def _rotated_by_list(read: ConfigReading) -> tuple[bool, ...]:
    """The layers that `no_rope_layers` lists by a 1 (it has one) or 0; all in families without it."""
    num_layers = read.num_layers
    if read.default("no_rope_layer_interval") is None and read.default("layer_rope_theta") is None:
        return (_position_type(read) == "rope",) * num_layers
    listed = read.config.get("no_rope_layers")
    if listed is None or (listed == [] and read.family.chunked):
        interval = read.size("no_rope_layer_interval")
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if not isinstance(listed, list) or len(listed) < num_layers or not all(value in (0, 1) for value in listed):
        raise CheckpointError(f"no_rope_layers: expected 0 or 1 for each of {num_layers} layers, got {short(listed)}")
    return tuple(bool(value) for value in listed[:num_layers])


def _windows(read: ConfigReading) -> tuple[int | None, ...]:
    """The window of each layer. One that is not shorter than the longest text is none, unless it says which RoPE."""
    config, family, num_layers = read.config, read.family, read.num_layers
    positions = read.found.max_position_embeddings
    slides = not family.window_switch or read.flag("use_sliding_window", False)
    key, kind = ("attention_chunk_size", _CHUNKED) if family.chunked else ("sliding_window", _SLIDING)
    window = config.get(key, family.defaults.get(key)) if slides else None
    if family.first_full and read.get("sliding_window_size") is not None:  # of MiMo: those before a token
        window = read.size("sliding_window_size") + 1
    if window is not None and (type(window) is not int or window < 1):
        raise CheckpointError(f"{key}: expected a positive whole number or null, got {short(window)}")
    if window is not None:  # both ways they say the tokens of both sides, or of each; ours are one side and the token
        window = window // 2 + 1 if read.get(_BOTH_WAYS) is True else window
        window += not read.flag("is_causal", True)
    kinds = config.get("layer_types")
    allowed = [_FULL] if window is None else [_FULL, kind]
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == num_layers and all(each in allowed for each in kinds)
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
        if kinds is not None and _FULL in kinds:
            raise CheckpointError(f"layer_types: expected sliding_attention for all layers, got {short(kinds)}")
        return (window,) * num_layers
    if kinds is not None:
        with_window = [each == kind for each in kinds]
    elif family.full_every:
        most = num_layers if read.default("max_window_layers") is None else read.size("max_window_layers", at_least=0)
        with_window = [slides and i < most for i, slides in enumerate(_pattern(read, family, num_layers))]
    elif read.default("no_rope_layer_interval"):
        with_window = [turns == family.chunked for turns in _rotated_by_list(read)]
    else:
        first = read.size("max_window_layers", 28, at_least=0)
        with_window = [i >= first for i in range(num_layers)]
    if family.last_full:
        with_window[-1] = False
    if family.first_full and kinds is None:
        with_window[0] = False
    return tuple(window if slide else None for slide in with_window)


def _pattern(read: Entries, family: Family, num_layers: int) -> list[bool]:
    """Which layers have a window by a pattern: all but every so manyth, or those that are L of L and G.

    The letters repeat. Of EXAONE 4, whose last layer has no window in any case.
    """
    key = family.pattern_key
    if read.default(_FIRST_PATTERN) is not None:
        first, every = read.size("first_k_dense_replace", at_least=0, most=num_layers), read.size(_FIRST_PATTERN)
        rest = read.size(key, family.full_every)
        return [(i + 1) % every != 0 for i in range(first)] + [(i + 1) % rest != 0 for i in range(num_layers - first)]
    found = read.get(key)
    if not isinstance(found, str):
        every = read.size(key, family.full_every)
        return [(i + 1) % every != 0 for i in range(num_layers)]
    letters = [found[i % len(found)] for i in range(num_layers)] if found else []
    if not set(letters) <= {"L", "G"} or letters[-1:] != ["G"]:
        expected = "a positive whole number, or letters L and G, with G for the last layer"
        raise CheckpointError(f"{key}: expected {expected}, got {short(found)}")
    return [letter == "L" for letter in letters]


def _mlp_size(read: ConfigReading) -> int:
    """The intermediate size of MLPs."""
    if read.family.experts:
        return read.family.experts.mlp_size(read, read.found.num_experts)
    each = read.get("intermediate_size")
    if read.family.streams and isinstance(each, list) and each:  # one of each layer: `sizes_of` reads them
        return Size("intermediate_size")(Entries({"intermediate_size": each[0]}))
    size = read.size("intermediate_size")
    return _adjusted(read, size) if read.default("block_multiple_of") else size


def _experts(read: ConfigReading) -> ExpertSizes | None:
    kind, number = read.family.experts, read.found.num_experts
    return kind.sizes(read, number) if kind and number else None


def _per_token(read: ConfigReading) -> int:
    """How many experts a token has: at most those that are open to it."""
    kind, experts = read.family.experts, read.found.experts
    if kind is None or experts is None:
        return 0
    return kind.per_token._replace(most=experts.choice.open_to(read.found.num_experts))(read)


def _mlps(read: ConfigReading) -> tuple[Mlp, ...]:
    """The MLPs of the layers: experts, or an MLP in their place in layers that have none."""
    kind, count = read.family.experts, read.num_layers
    if read.family.paired:
        return tuple("" if mixer == "state" else "mlp" for mixer in read.found.mixers)
    has = kind.has_experts(read, count) if kind and read.found.num_experts else [False] * count
    return mlps_of(read.listed, read.found.mixers, has)


def _sizes(read: ConfigReading) -> tuple[LayerSizes, ...]:
    """The sizes of each layer."""
    found = read.found
    usual = LayerSizes(found.num_kv_heads, found.head_dim, found.intermediate_size, found.num_heads)
    if found.latent is None and "v_head_dim" in read.family.defaults:
        channels = read.size("v_head_dim", most=found.head_dim)
        usual = usual._replace(value_dim=channels if channels < found.head_dim else 0)
    sizes = sizes_of(read.config, read.family, found.windows, usual)
    if found.latent is not None:
        check_sizes((found.latent.latent, found.latent.turned), "kv_lora_rank")
    for dim in {each.head_dim for each in sizes} if found.latent is None else ():
        check_sizes((dim,), "head_dim")
    return sizes


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


def _layer_inputs(read: ConfigReading) -> int:
    """The size of the inputs of each layer, in families that have them; 0 or null: there are none."""
    key = "hidden_size_per_layer_input"
    return 0 if read.default(key) is None or read.get(key) in (None, 0) else read.size(key)


def _layer_input_tokens(read: ConfigReading) -> int:
    """The rows of the table of inputs, which has all tokens but in networks with streams."""
    if not read.found.layer_inputs:
        return 0
    rows, tokens = read.size("vocab_size_per_layer_input"), read.found.vocab_size
    if rows != tokens and not read.family.streams:
        raise CheckpointError(f"vocab_size_per_layer_input: expected vocab_size, {tokens}, got {rows}")
    return rows


def _next_layer(read: ConfigReading) -> NextLayer | None:
    """How MTP layers are made: as the first of them, which alone is read; None: no layer attends as it does."""
    found, family = read.found, read.family
    kind, mlp = (_first_of(read, key, known) for key, known in (
        ("mtp_layer_types", (_FULL, _SLIDING)), ("mtp_mlp_layer_types", ("dense", "sparse")),
    ))
    slides = {"full": False, "window": True, "first": found.windows[0] is not None}[family.next_like]
    slides = slides if kind is None else kind == _SLIDING
    alike = [i for i, (mixer, window) in enumerate(zip(found.mixers, found.windows, strict=True))
             if mixer == "attention" and (window is not None) == slides]
    if not alike:
        return None
    usual: Mlp = family.next_mlp or found.mlps[-1]
    own: Mlp = usual if mlp is None else "mlp" if mlp == "dense" else "experts"
    return NextLayer(alike[-1], own, family.next_turned or found.rotated[alike[-1]], family.next_raw)


def _first_of(read: ConfigReading, key: str, known: tuple[str, ...]) -> str | None:
    """The first of a list of words; None: there is none."""
    listed = read.get(key) or [None]
    if not isinstance(listed, list) or listed[0] not in (None, *known):
        raise CheckpointError(f"{key}: expected a list of {' or '.join(known)}, got {short(listed)}")
    found: str | None = listed[0]
    return found


def _eos(read: ConfigReading) -> tuple[int, ...]:
    """The ids in `eos_token_id` (an id, a list or null), ascending."""
    eos = read.config.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int and 0 <= token < 2**32 for token in ids):
        raise CheckpointError(f"eos_token_id: expected token ids, got {short(eos)}")
    return tuple(sorted(set(ids)))


FIELDS: dict[str, ConfigField] = {
    "hidden_size": ConfigField(Size("hidden_size"), "embedding_length"),
    "num_heads": ConfigField(Size("num_attention_heads"), "attention.head_count"),
    "latent": ConfigField(lambda read: LatentSizes.of(read) if read.family.latent else None),
    "num_kv_heads": ConfigField(_num_kv_heads, "attention.head_count_kv", ("num_key_value_heads",)),
    "head_dim": ConfigField(_head_dim, "attention.key_length", ("head_dim",)),
    "max_position_embeddings": ConfigField(Size("max_position_embeddings"), "context_length"),
    "num_layers": ConfigField(ConfigReading.layers, "block_count", ("num_hidden_layers",)),
    "index": ConfigField(_index),
    "mixers": ConfigField(lambda read: mixers_of(read.config, read.listed, read.family.recurrence, read.num_layers)),
    "recurrence": ConfigField(_recurrence),
    "causal": ConfigField(_causal, "attention.causal", ("is_causal",)),
    "multipliers": ConfigField(lambda read: Multipliers.of(read) if read.family.paired else None),
    "windows": ConfigField(_windows, "attention.sliding_window", ("sliding_window",)),
    "gates": ConfigField(_gates),
    "qkv_bias": ConfigField(partial(_bias, part=0)),
    "output_bias": ConfigField(partial(_bias, part=1)),
    "mlp_bias": ConfigField(partial(_bias, part=2)),
    "num_experts": ConfigField(
        lambda read: read.family.experts.number(read, read.listed or []) if read.family.experts else 0
    ),
    "intermediate_size": ConfigField(_mlp_size, "feed_forward_length", ("intermediate_size",)),
    "experts": ConfigField(_experts),
    "sizes": ConfigField(_sizes),
    "rope": ConfigField(lambda read: read.ropes.rope, "rope.freq_base", ("rope_theta",)),
    "window_rope": ConfigField(lambda read: read.ropes.window_rope, "rope.freq_base_swa", ("rope_local_base_freq",)),
    "rotary_dim": ConfigField(lambda read: read.ropes.rotary_dim),
    "window_rotary_dim": ConfigField(lambda read: read.ropes.window_rotary_dim),
    "attention_scale": ConfigField(_attention_scale, "attention.scale", ("attention_multiplier",), optional=True),
    "vocab_size": ConfigField(Size("vocab_size")),
    "norm": ConfigField(_norm),
    "rms_norm_eps": ConfigField(
        lambda read: read.number(
            "rms_norm_eps" if read.found.norm != read.family.norm else read.family.eps_key, 1e-6
        ), "attention.layer_norm_rms_epsilon", ("rms_norm_eps",)
    ),
    "mlps": ConfigField(_mlps),
    "post_norm_eps": ConfigField(
        lambda read: read.number("post_norm_eps") if read.default("post_norm_eps") else read.found.rms_norm_eps
    ),
    "rotated": ConfigField(_rotated),
    "unrotated_growth": ConfigField(_unrotated_growth),
    "attention_softcap": ConfigField(Cap("attn_logit_softcapping"), "attn_logit_softcapping", optional=True),
    "qk_norm": ConfigField(_qk_norm),
    "value_scale": ConfigField(_value_scale, "attention.value_scale", ("attention_value_scale",), optional=True),
    "activation": ConfigField(_activation),
    "clamped_alpha": ConfigField(Number("swiglu_alpha", 1.702)),
    "clamped_limit": ConfigField(Number("swiglu_limit", 7.0)),
    "limits": ConfigField(_limits),
    "experts_per_token": ConfigField(_per_token),
    "layer_inputs": ConfigField(_layer_inputs),
    "layer_input_tokens": ConfigField(_layer_input_tokens),
    "streams": ConfigField(lambda read: StreamSizes.of(read) if read.family.streams else None),
    "embedding_scale": ConfigField(
        _embedding_scale, "embedding_scale", ("embedding_multiplier", "scale_emb"), optional=True
    ),
    "residual_scale": ConfigField(_residual_scale, "residual_scale", ("residual_multiplier",), optional=True),
    "logit_scale": ConfigField(_logit_scale, "logit_scale", ("logit_scale", "logits_scaling"), optional=True),
    "logit_softcap": ConfigField(Cap("final_logit_softcapping"), "final_logit_softcapping", optional=True),
    "head_bias": ConfigField(lambda read: read.has_default("lm_head_bias") and read.flag("lm_head_bias", False)),
    "tie_word_embeddings": ConfigField(
        lambda read: read.flag("tie_embedding", read.flag("tie_word_embeddings", False))
    ),
    "eos_token_ids": ConfigField(_eos),
    "next_layer": ConfigField(_next_layer),
    "next_layers": ConfigField(
        lambda read: read.size(read.family.next_layers, 0, at_least=0) if read.family.next_layers else 0
    ),
}
# The fields that a family fixes.
_OF_FAMILY = (
    "sinks", "embedding_norm", "paired", "attention_gate", "gate_curve", "value_norm", "norm_bias", "norms", "mlp_gate",
    "layer_scales", "chunked",
)
