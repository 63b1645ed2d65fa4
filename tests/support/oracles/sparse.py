"""Sparse attention in NumPy: which pages each KV head chooses for a query, and attention to these (kvc_sparse.h)."""

import numpy as np

PAGE, NEWEST, LEAST, DEVIATIONS = 16, 64, 4, 2.0
F32 = np.float32


def _codes(x, top, middle):
    """Codes of rows up to `top`, a step of each row's scale apart, and the scales, powers of two."""
    steps = np.abs(x).max(1) / F32(top - middle)
    scales = ((steps.view(np.uint32) + 0x7FFFFF) >> 23 << 23).astype(np.uint32).view(F32)
    inverse = np.divide(F32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return np.minimum(x * inverse[:, None] + F32(middle + 0.5), F32(top)).astype(np.uint8), scales


def summaries_of(keys):
    """The summaries of pages: codes and scales of the means, uint8 `(pages, dim)` and `(pages,)`, and of the variances.

    keys: float32 `(tokens, dim)` of one head, whole pages.
    """
    pages, share = np.asarray(keys, F32).reshape(-1, PAGE, np.shape(keys)[-1]), F32(1 / PAGE)
    means, variances = np.zeros((2, len(pages), pages.shape[2]), F32)
    for t in range(PAGE):  # in the order of the kernels
        means += pages[:, t] * share
    for t in range(PAGE):
        variances += (pages[:, t] - means) ** 2 * share
    return *_codes(means, 31, 15.5), *_codes(variances, 7, 0)


def estimates(query, summaries, scale):
    """Scores of pages for one query row, float32, in powers of two; NaN for a row that wants none.

    The query is rounded to bytes.
    """
    query = np.asarray(query, F32)
    factor = F32(scale) * F32(1.4426950408889634)
    most = np.abs(query).max() * np.abs(factor)
    if not 2**-100 <= most < np.inf:
        return np.full(len(summaries[0]), np.nan, F32)
    x = query * factor * (F32(127) / most)
    own, squares = (np.trunc(y + np.copysign(F32(0.5), y)).astype(np.int64) for y in (x, x * x / F32(127)))
    means, scales, variances, wide = summaries
    mean = (F32((means * own).sum(1)) - F32(15.5) * F32(own.sum())) * scales * (most / F32(127))
    return mean + np.sqrt(F32((variances * squares).sum(1)) * wide) * (F32(DEVIATIONS) * F32(0.088735651) * most)


def losses_of(scores):
    """How far each column lies below the best of a row, for the row that wants it most."""
    return np.nan_to_num(scores.max(1, keepdims=True) - scores, nan=np.finfo(F32).max).min(0)


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
    codes = summaries_of(keys[begin * PAGE : end * PAGE])
    ranks = losses_of(np.array([estimates(query, codes, scale) for query in queries]))
    pages = least_of(ranks, -(-7 * top_tokens // (4 * PAGE))) + begin
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
