"""Obviously right answers: NumPy in float64, dicts, heaps. Slow on purpose."""

import numpy as np

# ---- Kernels: attention over one sequence whose K and V lie in plain arrays.


def to_format(rows, name):
    """What f32 or f16 storage gives back."""
    return np.asarray(rows, np.float32 if name == "f32" else np.float16).astype(np.float64)


def attention(queries, keys, values, scale, *, sink_queries=None, sink_tokens=0):
    """queries (n, query heads, dim) standing on the last n tokens of keys, values (tokens, heads, dim).

    Returns the output, shaped like queries, and each token's weight summed over queries and query heads.
    """
    queries, keys, values = (np.asarray(x, np.float64) for x in (queries, keys, values))
    count, query_heads, dim = queries.shape
    tokens, heads, _ = keys.shape
    out, mass = np.zeros((count, query_heads, dim)), np.zeros(tokens)
    for h in range(query_heads):
        k, v = keys[:, h // (query_heads // heads)], values[:, h // (query_heads // heads)]
        scores = queries[:, h] @ k.T * scale
        if sink_queries is not None and sink_tokens:
            scores[:, :sink_tokens] = np.asarray(sink_queries, np.float64)[:, h] @ k[:sink_tokens].T * scale
        unseen = np.arange(tokens)[None, :] > (tokens - count + np.arange(count))[:, None]
        scores[unseen] = -np.inf
        for j in range(count):
            if unseen[j].all():
                continue
            weights = np.exp(scores[j] - scores[j].max())
            weights /= weights.sum()
            out[j, h] = weights @ v
            mass += weights
    return out, mass


# ---- Quantisation, rotation.


def hadamard(dim):
    """The matrix of +-1 in natural order; H @ H == dim * I."""
    h = np.ones((1, 1))
    while len(h) < dim:
        h = np.block([[h, h], [h, -h]])
    return h


def quantise(row, bits):
    """float32 row -> codes, scale, minimum as the kernels store them: float32 steps in their order."""
    f32 = np.float32
    row, top = np.asarray(row, f32), 2**bits - 1
    low, high = row.min(), row.max()
    minimum = f32(np.float16(low))
    if low == high:
        return np.zeros(len(row), int), f32(0), minimum
    reach = max(high - minimum, f32(0))
    scale = np.float16(reach / f32(top))
    if f32(scale) * (f32(top) + f32(0.5)) < reach:
        scale = np.nextafter(scale, np.float16(np.inf))
    scale = f32(scale)
    codes = np.rint(np.clip((row - minimum) / scale, 0, top)) if scale else np.zeros(len(row))
    return codes.astype(int), scale, minimum


def stored(row, bits, rotated):
    """What a row of a quantised format is read as, in float64, and the bound on its error per value.

    The bound: half a step, or half the spacing of halves at the minimum where that is more (kvc_quant.c).
    Un-rotating adds up the errors of all values.
    """
    row = np.asarray(row, np.float32)
    dim, h = len(row), hadamard(len(row)) if rotated else None
    if rotated and row.min() == row.max():
        return np.full(dim, np.float64(np.float16(row[0]))), 2.0**-11 * abs(row[0]) + 2.0**-25
    x = (h @ row.astype(np.float64) / dim).astype(np.float32) if rotated else row
    codes, scale, minimum = quantise(x, bits)
    back = np.float64(minimum) + np.float64(scale) * codes
    half_ulp = np.spacing(np.minimum(np.abs(np.float16(x.min())), np.float16(65472))).astype(np.float64) / 2
    bound = max(scale / 2, half_ulp) + 2.0**-22 * np.abs(x).max()
    return (h @ back, bound * dim) if rotated else (back, bound)
