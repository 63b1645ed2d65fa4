"""The configuration of a network: `config.json` of its checkpoint, read strictly.

An option that changes the network's result is either supported or refused by name. Absent keys have the defaults
of the transformers library, which wrote the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvcache.core.arguments import short
from kvcache.errors import CheckpointError
from kvcache.networks.files import read_json
from kvcache.networks.rope import Rope

__all__ = ["ModelConfig"]


class _Family(NamedTuple):
    """The fixed options of one architecture, and its defaults for absent keys."""

    qkv_bias: bool | None  # None: the key attention_bias, which also sets the bias of the output projection
    mlp_bias: bool | None  # None: the key mlp_bias
    qk_norm: bool
    num_kv_heads: int | None  # None: num_attention_heads
    head_dim: int | None  # None: hidden_size // num_attention_heads
    sliding_window: int | None
    window_switch: bool  # sliding_window applies only if use_sliding_window is true


_FAMILIES = {
    "LlamaForCausalLM": _Family(None, None, False, None, None, None, False),
    "MistralForCausalLM": _Family(False, False, False, 8, None, 4096, False),
    "Qwen2ForCausalLM": _Family(True, False, False, 32, None, 4096, True),
    "Qwen3ForCausalLM": _Family(None, False, True, 32, 128, 4096, True),
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MAX_SIZE = 2**31 - 1  # of any one dimension: keeps products inside int64
_MAX_NUMBER = 1e30  # of any factor: keeps products inside float64
_LEAST_BETA = 1e-6  # of YaRN's betas (rotations over the context): keeps the wavelengths finite


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama kind.

    Attributes:
        architecture: the class name in the checkpoint, e.g. "LlamaForCausalLM".
        num_heads, num_kv_heads, head_dim: query heads, KV heads (a divisor), channels of one head.
        max_position_embeddings: positions are in [0, max_position_embeddings).
        qkv_bias, output_bias, mlp_bias: which projections add a bias.
        qk_norm: whether queries and keys pass through an RMSNorm per head.
        tie_word_embeddings: whether the output matrix is the embedding.
        rope: the rotary position embedding.
        eos_token_ids: tokens that end a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """Read `config.json`, and `generation_config.json` if it exists, from a checkpoint directory.

        Raises:
            FileNotFoundError: there is no `config.json`.
            CheckpointError: not JSON, a key is missing or of the wrong type, or an option is not supported.
        """
        directory = Path(directory)
        config = read_json(directory / "config.json")
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
        architecture = _architecture(config)
        family = _FAMILIES[architecture]
        read = _Reader(config)
        hidden_size = read.size("hidden_size")
        num_heads = read.size("num_attention_heads")
        num_kv_heads = read.size("num_key_value_heads", family.num_kv_heads or num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"num_key_value_heads: expected a divisor of {num_heads} attention heads, got {num_kv_heads}"
            )
        # null always means the quotient; an absent key means the family's default, if it has one.
        absent = family.head_dim if "head_dim" not in config else None
        head_dim = read.size("head_dim", absent or hidden_size // num_heads)
        if head_dim % 2 or not head_dim:
            raise CheckpointError(f"head_dim: expected an even number (RoPE turns pairs), got {head_dim}")
        positions = read.size("max_position_embeddings")
        attention_bias = read.flag("attention_bias", False)
        _refuse_unsupported(config, read, family, positions)
        return cls(
            architecture=architecture,
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.size("intermediate_size"),
            num_layers=read.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positions,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6, at_least=0.0),
            rope=_rope(config, positions),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=read.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            eos_token_ids=_eos(config),
        )


class _Reader:
    """Typed reads of one JSON object; every error names the key. A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    def _get(self, key: str, default: Any, accept: Callable[[Any], bool], expected: str) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self._where}{key}: expected {expected}, got nothing")
            return default
        if not accept(value):
            raise CheckpointError(f"{self._where}{key}: expected {expected}, got {short(value)}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        found: int = self._get(
            key,
            default,
            lambda value: type(value) is int and 0 < value <= _MAX_SIZE,
            "a positive whole number",
        )
        return found

    def number(self, key: str, default: float | None = None, *, at_least: float = 0.0) -> float:
        def accept(value: Any) -> bool:
            return type(value) in (int, float) and at_least <= value <= _MAX_NUMBER

        return float(self._get(key, default, accept, f"a finite number of at least {at_least:g}"))

    def flag(self, key: str, default: bool) -> bool:
        found: bool = self._get(key, default, lambda value: isinstance(value, bool), "true or false")
        return found


def _architecture(config: Mapping[str, Any]) -> str:
    """The class that wrote the checkpoint: `architectures`, or `model_type` if that is absent."""
    known = ", ".join(_FAMILIES)
    named = config.get("architectures")
    if not named:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
            raise CheckpointError(f"model_type: expected one of {', '.join(_MODEL_TYPES)}, got {short(model_type)}")
        return _MODEL_TYPES[model_type]
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in _FAMILIES:
        raise CheckpointError(f"architectures: expected one of {known}, got {short(named)}")
    return named[0]


def _refuse_unsupported(config: Mapping[str, Any], read: _Reader, family: _Family, positions: int) -> None:
    """Raise CheckpointError for an option that changes the result and is not implemented."""
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act: expected 'silu', got {short(activation)}")
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise CheckpointError(f"{key}: expected an unquantised checkpoint, got {short(config[key])}")
    slides = read.flag("use_sliding_window", False) if family.window_switch else True
    window = config.get("sliding_window", family.sliding_window) if slides else None
    if window is not None and (type(window) is not int or window < positions):
        raise CheckpointError(
            f"sliding_window: expected none, or at least all {positions} positions, got {short(window)}"
        )
    kinds = config.get("layer_types")
    allowed = ["full_attention"] if window is None else ["full_attention", "sliding_attention"]
    if kinds is not None and not (isinstance(kinds, list) and all(kind in allowed for kind in kinds)):
        raise CheckpointError(f"layer_types: expected only 'full_attention', got {short(kinds)}")


def _rope(config: Mapping[str, Any], positions: int) -> Rope:
    """The rotary embedding: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    scaling = config.get(name)
    scaling = {} if scaling is None else scaling
    if not isinstance(scaling, dict):
        raise CheckpointError(f"{name}: expected an object, got {short(scaling)}")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise CheckpointError(f"{name}: expected one kind for all layers, got one per layer type: {short(scaling)}")
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"partial_rotary_factor: expected 1, got {short(partial)}")

    read = _Reader(scaling, f"{name}.")
    theta = read.number("rope_theta", _Reader(config).number("rope_theta", 10000.0, at_least=1.0), at_least=1.0)
    if theta <= 1:
        raise CheckpointError(f"rope_theta: expected more than 1, got {theta}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(f"{name}.rope_type: expected default, linear, llama3 or yarn, got {short(kind)}")
    if kind == "linear":
        return Rope(kind="linear", theta=theta, factor=read.number("factor", at_least=1.0))

    original = read.size("original_max_position_embeddings", positions)
    if kind == "llama3":
        low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
        if low >= high:
            raise CheckpointError(f"{name}: expected low_freq_factor < high_freq_factor, got {low} and {high}")
        factor = read.number("factor", at_least=1.0)
        return Rope("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)

    factor = read.number("factor", max(positions / original, 1.0), at_least=1.0)
    fast, slow = read.number("beta_fast", 32.0), read.number("beta_slow", 1.0)
    if not _LEAST_BETA <= slow <= fast:
        raise CheckpointError(f"{name}: expected {_LEAST_BETA:g} <= beta_slow <= beta_fast, got {slow} and {fast}")
    return Rope(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_yarn_attention_factor(scaling, read, factor),
        truncate=read.flag("truncate", True),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], read: _Reader, factor: float) -> float:
    """The temperature of YaRN (arXiv 2309.00071, section 3.4: `0.1 ln(s) + 1`), read or computed.

    `mscale` and `mscale_all_dim` are DeepSeek's refinement: the ratio of the two temperatures.
    """

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return read.number("attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(read.number("mscale")) / temperature(read.number("mscale_all_dim"))
    return temperature(1.0)


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids in `eos_token_id` (an id, a list or null), ascending."""
    eos = config.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int and 0 <= token < 2**32 for token in ids):
        raise CheckpointError(f"eos_token_id: expected token ids, got {short(eos)}")
    return tuple(sorted(set(ids)))
