"""The product with weights in NumPy: the twin of ckernels/kvc_activations.c and kvc_matmul.c."""

import numpy as np

from kvcache.kernels.matrix import MATRIX_FORMATS

GROUP = 32


def groups(x):
    """`(n, columns)` as `(n, groups, 32)`, filled up with zeros."""
    padded = np.zeros((len(x), -(-x.shape[1] // GROUP) * GROUP), x.dtype)
    padded[:, : x.shape[1]] = x
    return padded.reshape(len(x), padded.shape[1] // GROUP, GROUP)


def rounded(x, exact):
    """The numbers that meet packed weights, times their scales: float64 of x's shape, and the scales per group."""
    most = np.float32(127 * 128 if exact else 127)
    parts = groups(x)
    largest = np.abs(parts).max(axis=2, keepdims=True)
    per_step = np.divide(most, largest, out=np.zeros_like(largest), where=largest > 2.0**-100)
    numbers = np.clip(np.round(parts * per_step), -most, most)
    scales = (largest / most).astype(np.float64)
    whole = (numbers * scales).reshape(len(x), scales.shape[1] * GROUP)
    return whole[:, : x.shape[1]], scales[..., 0]


def rounded_to_bf16(x):
    """float32 rounded half to even to 8 bits of mantissa."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def product(x, weights, bias=None, *, format, activations="int8"):
    """`(result, bound)`: the product in float64, and the largest error of each output."""
    in_bf16 = activations == "bf16"
    packed = MATRIX_FORMATS[format].packed and not in_bf16
    wide = (rounded_to_bf16(weights) if in_bf16 else weights).astype(np.float64)
    if packed:
        used = rounded(x, activations == "exact")[0]
    else:
        used = (rounded_to_bf16(x) if in_bf16 else x).astype(np.float64)
    mass = np.abs(used) @ np.abs(wide).T
    result, columns = used @ wide.T, weights.shape[1]
    if packed:
        # With minima the sum of the numbers is taken out of each group: two terms that may cancel.
        parts = np.abs(groups(used)).sum(axis=2) @ np.abs(groups(wide)).max(axis=2).T
        bound = (6 + columns / MATRIX_FORMATS[format].channels) * 2.0**-23 * (mass + 3 * parts)
    else:
        bound = (258 + columns / 256) * 2.0**-24 * mass
    if bias is not None:
        result = result + bias
        bound = bound + 2.0**-23 * (np.abs(bias) + mass)
    return result, bound + 1e-37
