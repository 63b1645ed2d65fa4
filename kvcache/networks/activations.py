"""The activations of MLPs: what becomes of the rows between their two products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.layers import clamped_swiglu, gate, geglu, gelu, swiglu, xielu
from kvcache.networks.config import ModelConfig

__all__ = ["activation_of", "limited_swiglu"]

Float32 = NDArray[np.float32]


def activation_of(config: ModelConfig) -> Callable[..., Float32]:
    """The activation of the first half of the columns, times the second half; without a gate of all columns.

    "xielu" takes the curve of an MLP too.
    """
    if config.activation == "clamped":
        return partial(clamped_swiglu, alpha=config.clamped_alpha, limit=config.clamped_limit)
    found: dict[str, Callable[..., Float32]] = {
        "silu": swiglu, "gelu_tanh": geglu if config.mlp_gate else gelu, "relu2": _squared_relu, "xielu": xielu,
    }
    return found[config.activation]


def limited_swiglu(both: Float32, limit: Float32) -> Float32:
    """`swiglu` with the silu of the gate at most `limit`, and up from `-limit` to it."""
    gates, up = np.split(both, 2, axis=1)
    limited: Float32 = np.minimum(gate(gates, gates, False), limit)
    limited *= np.clip(up, -limit, limit)
    return limited


def _squared_relu(x: Float32) -> Float32:
    positive = np.maximum(x, np.float32(0))
    return positive * positive
