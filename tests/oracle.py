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
