"""The name by which a saved cache identifies its model."""

from __future__ import annotations

import hashlib
import math
from dataclasses import is_dataclass
from inspect import signature
from typing import Any

import numpy as np

from kvcache.kernels.matrix import MATRIX_FORMATS
from kvcache.networks.config import ModelConfig
from kvcache.networks.model import Transformer
from kvcache.networks.padded_heads import stored_sizes

__all__ = ["fingerprint"]

# These do not change K and V of the layers that count.
_WITHOUT_EFFECT = ("eos_token_ids", "next_layers", "next_layer", "draft_layers")
_PIECES, _PIECE = 64, 64  # samples of one array, values in each; smaller arrays are hashed whole


def fingerprint(model: Any) -> str:
    """A name for a `Transformer`, such as "LlamaForCausalLM-6x256-3f0c...", with 128 bits of BLAKE2.

    The hash covers every option of the configuration that changes K and V and is not its default, the shape of every
    weight, and 64 samples of 64 values spread over each array (all values of a smaller array). It takes milliseconds
    for a model of any size.
    Models that differ in an option or a shape, in the format of packed weights, in the activations that meet their
    weights, or that were trained separately, have different names. Floats count as float32, however they are kept. A
    change of single weights between the samples goes unnoticed, and a name can be forged. It says the true size of
    heads that a cache pads.

    Raises:
        TypeError: another kind of model.
    """
    if not isinstance(model, Transformer):
        raise TypeError(f"model: expected a Transformer, or a name for another model, got {type(model).__name__}")
    config, weights = model.config, model.weights
    digest = hashlib.blake2b(digest_size=16)
    options = [(name, value) for name, value in _differing(config) if name not in _WITHOUT_EFFECT]
    digest.update(repr(options).encode())
    formats = [array.format for array in weights.arrays() if not isinstance(array, np.ndarray)]
    packed = [format for format in formats if any(MATRIX_FORMATS[part].packed for part in format.split("+"))]
    if model.activations == "bf16":
        kind = "bf16" if {*formats} == {"bf16"} else "all in bf16"
        digest.update(repr((kind, formats)).encode())
    elif packed:
        digest.update(repr((packed, "exact" if model.activations == "exact" else "int8")).encode())
    _add(digest, weights.embedding)
    for layer in weights.layers:
        for array in layer.arrays():
            _add(digest, array)
    _add(digest, weights.norm)
    if weights.inputs is not None:
        for each in (weights.inputs.table, weights.inputs.projection, weights.inputs.norm):
            _add(digest, each)
    for each in () if weights.ends is None else (*weights.ends.begin, *weights.ends.end):
        _add(digest, each)
    _add(digest, weights.head)
    return f"{config.architecture}-{config.num_layers}x{config.hidden_size}{_padded_heads(config)}-{digest.hexdigest()}"


def _differing(value: Any) -> Any:
    """A part of a configuration as pairs of names and values, without the values that are defaults of their fields.

    So a new field with a default changes no name of the networks that were there before it. A default must stay what
    it is: with another one, networks of both would have one name.
    """
    if is_dataclass(value) or hasattr(value, "_fields"):  # a NamedTuple
        defaults = {name: each.default for name, each in signature(type(value)).parameters.items()}
        given = {name: getattr(value, name) for name in defaults}
        return sorted((name, _differing(each)) for name, each in given.items() if each != defaults[name])
    return tuple(map(_differing, value)) if isinstance(value, tuple) else value


def _padded_heads(config: ModelConfig) -> str:
    """The true sizes of heads that a cache pads, which has the padded ones."""
    parts = dict.fromkeys(config.head_parts(i) for i, mixer in enumerate(config.mixers) if mixer == "attention")
    return "".join(f"-heads{'+'.join(map(str, each))}" for each in parts if stored_sizes(each) != each)


def _add(digest: Any, array: Any) -> None:
    if array is None:
        digest.update(b"none")
        return
    digest.update(f"<f4{array.shape}".encode())
    size = math.prod(array.shape)
    if size <= _PIECES * _PIECE:
        digest.update((array if isinstance(array, np.ndarray) else array.to_float32()).tobytes())
        return
    starts = np.linspace(0, size - _PIECE, _PIECES).astype(np.int64)
    for rows, *columns in zip(*np.unravel_index(starts[:, None] + np.arange(_PIECE), array.shape), strict=True):
        # The values of a piece follow each other, and so do their rows.
        digest.update(array[np.arange(rows[0], rows[-1] + 1)][(rows - rows[0], *columns)].tobytes())
