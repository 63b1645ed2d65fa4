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
    wide, packed = weights.astype(np.float64), MATRIX_FORMATS[format].packed
    if packed:
        used = rounded(x, activations == "exact")[0]
    else:
        used = (rounded_to_bf16(x) if (format, activations) == ("bf16", "bf16") else x).astype(np.float64)
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


def _without_denormals(x):
    """float32, where what is below 2^-126 is zero."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


def _fused(total, x, w):
    """total + x * w with one rounding: float64 is exact, or nowhere near the middle between two floats."""
    exact = x.astype(np.float64) * w + _without_denormals(total)
    return np.where(np.abs(exact) < 2.0**-126 - 2.0**-151, np.copysign(0.0, exact), exact).astype(np.float32)


def _to_odd(a, b):
    """a + b of float64: towards zero to 24 bits, the last of which is 1 if that is not exact."""
    total = a + b
    of_b = total - a
    lost = (a - (total - of_b)) + (b - of_b)
    bits = total.view(np.uint64).copy()
    exact = (bits & 0x1FFFFFFF == 0) & (lost == 0)
    bits -= (lost != 0) & (np.signbit(lost) != np.signbit(total))
    bits = bits & ~np.uint64(0x1FFFFFFF) | np.uint64(1 << 29) * ~exact
    odd = np.where(np.isfinite(total) & (total != 0), bits.view(np.float64), total)
    return _without_denormals(odd.astype(np.float32)).astype(np.float64)


def bf16_product(x, weights, order):
    """`x` `(n, columns)` times weights of bf16 `(rows, columns)`, bit for bit as an order of kvc_matrix.h adds."""
    step = {"pairs": 2, "tiles": 32, "quads": 2}[order]
    wide = -(-x.shape[1] // 32) * 32
    a, b = np.zeros((len(x), 1, wide), np.float32), np.zeros((1, len(weights), wide), np.float32)
    a[:, 0, : x.shape[1]], b[0, :, : x.shape[1]] = rounded_to_bf16(x), weights
    a, b = _without_denormals(a), _without_denormals(b)
    result = np.zeros((len(x), len(weights)), np.float32)
    for block in range(0, wide, 256):
        own = np.zeros_like(result)
        for k in range(block, min(block + 256, wide), step):
            if order == "pairs":
                own = _fused(_fused(own, a[..., k + 1], b[..., k + 1]), a[..., k], b[..., k])
            elif order == "quads":
                products = [_to_odd(a[..., i].astype(np.float64) * b[..., i], np.float64(0)) for i in (k, k + 1)]
                own = _to_odd(own.astype(np.float64), _to_odd(*products)).astype(np.float32)
            else:
                even, odd = np.zeros_like(result), np.zeros_like(result)
                for i in range(k, k + 32, 2):
                    even = _fused(even, a[..., i], b[..., i])
                    odd = _fused(odd, a[..., i + 1], b[..., i + 1])
                one = np.float32(1)
                own = _fused(own, _fused(even, odd, one), one)
        result = own if block == 0 else result + own
    return result
