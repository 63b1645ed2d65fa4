"""The weights of two networks, compared."""

from __future__ import annotations

import numpy as np


def float32(array):
    return array if isinstance(array, np.ndarray) else array.to_float32()


def assert_same_weights(found, expected, lost=0.0):
    """`lost`: the error that is allowed, as a share of the largest weight of a matrix."""
    for a, b in zip(found.weights.arrays(), expected.weights.arrays(), strict=True):
        a, b = float32(a), float32(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=lost * np.abs(b).max())
