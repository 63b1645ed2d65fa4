"""The name that a model's K and V go by in a saved cache."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from kvcache.engine.model import Transformer
from kvcache.engine.weights import LayerWeights

__all__ = ["fingerprint"]

_PIECES, _PIECE = 64, 64  # of one array, values each; an array of up to as many values is taken whole


def fingerprint(model: Any) -> str:
    """A name for a `Transformer`, such as "LlamaForCausalLM-6x256-3f0c...": 128 bits of BLAKE2 over what it computes.

    That is every option of its configuration that changes K and V, the shape of every weight, and of its values 64
    pieces of 64 spread over each array, or all of a smaller one. So it costs milliseconds, whatever the size. Two
    models that differ in any option or shape, or that were trained apart, have different names. A change of single
    weights between the pieces is not seen, and nobody is kept from making a model with the name of another.

    Raises:
        TypeError: another kind of model.
    """
    if not isinstance(model, Transformer):
        raise TypeError(f"model: expected a Transformer, or a name for another model, got {type(model).__name__}")
    config, weights = model.config, model.weights
    digest = hashlib.blake2b(digest_size=16)
    options = asdict(config)
    del options["eos_token_ids"]  # where a text ends is no part of its K and V
    digest.update(repr(sorted(options.items())).encode())
    _add(digest, weights.embedding)
    for layer in weights.layers:
        for field in fields(LayerWeights):
            _add(digest, getattr(layer, field.name))
    _add(digest, weights.norm)
    _add(digest, weights.head)
    return f"{config.architecture}-{config.num_layers}x{config.hidden_size}-{digest.hexdigest()}"


def _add(digest: Any, array: Any) -> None:
    if array is None:
        digest.update(b"none")
        return
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    if array.size <= _PIECES * _PIECE:
        digest.update(array.tobytes())
        return
    # Pieces of rows, however the array lies in memory.
    starts = np.linspace(0, array.size - _PIECE, _PIECES).astype(np.int64)
    places = np.unravel_index(starts[:, None] + np.arange(_PIECE), array.shape)
    digest.update(array[places].tobytes())
