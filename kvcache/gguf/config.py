"""The configuration of a network in a GGUF file, in the keys of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kvcache.core.arguments import short
from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile

__all__ = ["ARCHITECTURES", "KEYS", "NEUTRAL", "Architecture", "architecture_of", "config_of"]


class Architecture(NamedTuple):
    """What `general.architecture` says.

    Attributes:
        model_type: of the Hugging Face library.
        permuted: whether rows of q and k are in the order of interleaved RoPE.
    """

    model_type: str
    permuted: bool


ARCHITECTURES = {
    "llama": Architecture("llama", True),  # Mistral and SmolLM2 too
    "qwen2": Architecture("qwen2", False),
    "qwen3": Architecture("qwen3", False),
}

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
}
_REQUIRED = ("num_attention_heads", "rms_norm_eps")  # those that config.json may leave out
# Options that change the result and are not implemented, and the value that has no effect.
NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
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
    "nextn_predict_layers": 0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}


def architecture_of(file: GgufFile) -> Architecture:
    """Raises CheckpointError for an architecture that is not supported."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture: expected one of {', '.join(ARCHITECTURES)}, got {short(name)}"
        )
    return ARCHITECTURES[name]


def config_of(file: GgufFile) -> dict[str, Any]:
    """The contents of a `config.json` for the network in `file`. Sizes are as the file says, not checked.

    `eos_token_id` is left out; the factors of the tensor `rope_freqs.weight` are not included.

    Raises:
        CheckpointError: an option that is not supported, a part of a file that was split. Messages name the entry, not
            the file.
    """
    architecture = architecture_of(file)
    _refuse(file, "split.count", 1, 0)
    read = _Entries(file)
    for key, neutral in NEUTRAL.items():
        read.refuse(key, neutral)
    found: dict[str, Any] = {"model_type": architecture.model_type, "architectures": None}
    for key, name in KEYS.items():
        value = read.get(name)
        if value is None and key in _REQUIRED:
            read.fail(name, "a number")
        if value is not None:
            found[key] = value
    heads, hidden = found["num_attention_heads"], found.get("hidden_size")
    if "head_dim" not in found and type(heads) is int and type(hidden) is int and heads > 0:
        found["head_dim"] = hidden // heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if read.get(name) not in (None, found.get("head_dim")):
            read.fail(name, f"{short(found.get('head_dim'))} as in every head")
    if found.get("sliding_window") == 0:
        del found["sliding_window"]
    found["use_sliding_window"] = "sliding_window" in found
    found["tie_word_embeddings"] = "output.weight" not in file
    if "token_embd.weight" in file:
        found["vocab_size"] = file["token_embd.weight"].shape[0]
    found["rope_scaling"] = _scaling(read)
    return found


class _Entries:
    """The entries of the file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.prefix = f"{file.metadata['general.architecture']}."
        self._file = file

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an entry. Raises CheckpointError for an array: layers of different sizes are not supported."""
        found = self._file.metadata.get(self.prefix + name, default)
        if isinstance(found, (list, np.ndarray)):
            raise CheckpointError(f"{self.prefix}{name}: expected one value for all layers, got {short(found)}")
        return found

    def refuse(self, name: str, *neutral: Any) -> None:
        _refuse(self._file, self.prefix + name, *neutral)

    def fail(self, name: str, expected: str) -> NoReturn:
        value = self.get(name)
        found = "nothing" if value is None else short(value)
        raise CheckpointError(f"{self.prefix}{name}: expected {expected}, got {found}")


def _refuse(file: GgufFile, key: str, *neutral: Any) -> None:
    """Raise CheckpointError if the file has the key, with another value than these."""
    found = file.metadata.get(key, neutral[0])
    if not isinstance(found, (bool, int, float)) or found not in neutral:
        raise CheckpointError(f"{key}: expected {neutral[0]}, got {short(found)}")


def _scaling(read: _Entries) -> Mapping[str, Any] | None:
    """`rope_scaling` of a `config.json`."""
    factor = read.get("rope.scaling.factor", read.get("rope.scale_linear"))
    kind = read.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return None
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
    return {key: value for key, value in scaling.items() if value is not None}
