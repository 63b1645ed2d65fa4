"""Activations without a kernel of their own, in float64: the bits of a row do not depend on other rows."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["clamped_swiglu", "geglu", "softcap"]

Float32 = NDArray[np.float32]


def geglu(x: Float32) -> Float32:
    """GELU of the left half of `x` `(n, 2 * dim)`, by its approximation with tanh, times the right half."""
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)))
    out: Float32 = (gelu * up).astype(np.float32)
    return out


def clamped_swiglu(x: Float32, alpha: float, limit: float) -> Float32:
    """`gate * sigmoid(alpha * gate) * (up + 1)` of the halves of `x` `(n, 2 * dim)`, held to `limit`."""
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    out: Float32 = (gate / (1 + np.exp(np.minimum(-alpha * gate, 700.0))) * (up + 1)).astype(np.float32)
    return out


def softcap(x: Float32, cap: float) -> Float32:
    """`cap * tanh(x / cap)`."""
    return (cap * np.tanh(x.astype(np.float64) / cap)).astype(np.float32)
