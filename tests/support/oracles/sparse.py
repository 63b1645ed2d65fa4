"""Sparse attention in NumPy: which pages each KV head chooses for a query, and attention to these (kvc_sparse.h)."""

import numpy as np

PAGE, NEWEST, LEAST, OTHER = 16, 64, 4, 0.25
F32 = np.float32


def bounds_of(keys):
    """The bounds of pages: codes of the largest and the smallest, uint8 `(pages, dim)` each, and scales `(pages,)`.

    keys: float32 `(tokens, dim)` of one head, whole pages.
    """
    pages = np.asarray(keys, F32).reshape(-1, PAGE, np.shape(keys)[-1])
    most, least = pages.max(1), pages.min(1)
    steps = np.maximum(np.abs(most), np.abs(least)).max(1) / F32(7.5)
    scales = ((steps.view(np.uint32) + 0xFFFF) >> 16 << 16).astype(np.uint32).view(F32)
    inverse = np.divide(F32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return *((np.minimum(x * inverse[:, None] + F32(8), F32(15))).astype(np.uint8) for x in (most, least)), scales


def bound_scores(query, codes, scale):
    """Scores of pages for one query row, float32, in powers of two; the query is rounded to bytes."""
    query = np.asarray(query, F32)
    factor = F32(scale) * F32(1.4426950408889634)
    most = np.abs(query).max() * np.abs(factor)
    x = query * factor * (F32(127) / most)
    own, other = (np.trunc(np.where(x < 0, y - F32(0.5), y + F32(0.5))).astype(np.int64) for y in (x, x * F32(OTHER)))
    above, below, scales = codes
    sums = (above * np.where(x > 0, own, other) + below * np.where(x > 0, other, own)).sum(1)
    return (F32(sums) - F32(7.5) * F32((own + other).sum())) * scales * (most / F32(127))


def losses_of(scores):
    """How far each column lies below the best of a row, for the row that wants it most."""
    return (scores.max(1, keepdims=True) - scores).min(0)


def least_of(losses, count):
    """Indices of the smallest losses, ascending; of equal ones the first."""
    return np.sort(np.argsort(losses, kind="stable")[:count])


def choose(queries, keys, seen, top_tokens, scale, first=0):
    """The tokens of [first, seen) that one KV head attends to, ascending.

    Args:
        queries: `(group, dim)`, those of its query heads.
        keys: `(tokens, dim)`, as they are stored.
    """
    begin, end = max(1, -(-first // PAGE)), (seen - NEWEST) // PAGE
    if end <= begin or (end - begin) * PAGE // LEAST < top_tokens:
        return np.arange(first, seen)
    codes = bounds_of(keys[begin * PAGE : end * PAGE])
    ranks = losses_of(np.array([bound_scores(query, codes, scale) for query in queries]))
    pages = least_of(ranks, -(-9 * top_tokens // (4 * PAGE))) + begin
    chosen = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
    return np.concatenate([np.arange(first, begin * PAGE), chosen, np.arange(end * PAGE, seen)])


def attend(queries, keys, values, top_tokens, scale):
    """Attention of queries `(n, query heads, dim)` at the last n positions to what each KV head chooses; float64."""
    n, query_heads, _ = queries.shape
    tokens, heads, _ = keys.shape
    group = query_heads // heads
    out = np.zeros((n, query_heads, values.shape[2]))
    for j in range(n):
        for h in range(heads):
            own = np.asarray(queries[j, h * group : (h + 1) * group])
            picked = choose(own, keys[:, h], tokens - n + j + 1, top_tokens, scale)
            scores = np.float64(own) @ np.float64(keys)[picked, h].T * scale
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out[j, h * group : (h + 1) * group] = weights @ np.float64(values)[picked, h]
    return out
