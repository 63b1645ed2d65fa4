"""Simple reference implementations: NumPy in float64, dicts, heaps. Slow on purpose."""

import zlib
from functools import cache

import numpy as np

# ---- Kernels: attention over one sequence with K and V in plain arrays.


def to_format(rows, name):
    """Values as f32 or f16 storage returns them."""
    return np.asarray(rows, np.float32 if name == "f32" else np.float16).astype(np.float64)


def attention(queries, keys, values, scale, **options):
    """The output of `attend`, and each token's weight summed over queries and query heads."""
    out, mass, _ = attend(queries, keys, values, scale, **options)
    return out, mass.sum(0)


def attend(
    queries, keys, values, scale, *, sink_queries=None, sink_tokens=0, shown=None, window=None, softcap=None,
    sinks=None, causal=True, parents=None, chunked=False, start=0, firsts=None,
):
    """Attention of queries (n, query heads, dim) at the last n positions of keys (tokens, heads, dim) and of values
    (tokens, heads, value dim).

    Only the first `shown` tokens are seen, and of these the last `window` up to a query's own position; if `chunked`,
    those of its own chunk of `window` positions, with the first token at position `start`. Scores become
    softcap * tanh(score / softcap). sinks (query heads), or of each query, are scores of a token without a value.
    Without `causal`, every query sees all shown tokens, or those at a distance below `window`. parents: of each query,
    -1 for none; it sees its ancestors instead of all before it. firsts: of each query, the first token that it may see.

    Returns the output, (n, query heads, value dim); each shown token's weight summed over queries, (query heads,
    shown); and the logarithm of each sum of exp(score), (n, query heads).
    """
    queries, keys, values = (np.asarray(x, np.float64) for x in (queries, keys, values))
    count, query_heads, _ = queries.shape
    tokens, heads, _ = keys.shape
    shown = tokens if shown is None else shown
    sees = window, causal, parents, chunked, start
    seen = np.array([seen_by(j, count, tokens, *sees)[:shown] for j in range(count)], bool).reshape(count, shown)
    if firsts is not None:
        seen &= np.arange(shown) >= np.asarray(firsts)[:, None]
    values = np.where(seen.any(0)[:, None, None], values[:shown], 0)
    out, mass = np.zeros((count, query_heads, values.shape[2])), np.zeros((query_heads, shown))
    lse = np.full((count, query_heads), -np.inf)
    for h in range(query_heads):
        k, v = keys[:shown, h // (query_heads // heads)], values[:, h // (query_heads // heads)]
        scores = queries[:, h] @ k.T * scale
        if sink_queries is not None and sink_tokens:
            scores[:, :sink_tokens] = np.asarray(sink_queries, np.float64)[:, h] @ k[:sink_tokens].T * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores[~seen] = -np.inf
        sink = -np.inf if sinks is None else np.broadcast_to(np.float64(sinks), lse.shape)[:, h]
        lse[:, h] = np.logaddexp(log_of_sums(scores), sink)
        weights = np.exp(scores - np.where(lse[:, h] > -np.inf, lse[:, h], 0)[:, None])
        out[:, h] = weights @ v
        mass[h] = weights.sum(0)
    return out, mass, lse


def seen_by(query, count, tokens, window, causal, parents, chunked, start):
    """The tokens that query `query` of `count` at the last positions sees, `(tokens,)`; arguments as in `attend`."""
    positions, own = np.arange(tokens), tokens - count + query
    if parents is not None:
        line = [query]
        while parents[line[-1]] >= 0:
            line.append(parents[line[-1]])
        positions[tokens - count :] = tokens  # after all
        positions[[tokens - count + i for i in line]] = tokens - count + np.arange(len(line))[::-1]
        own = positions[own]
    seen = positions <= (own if causal else own + window - 1 if window else tokens)
    if chunked:
        return seen & ((positions + start) // window == (own + start) // window)
    return seen if window is None else seen & (positions > own - window)


def log_of_sums(scores):
    """The logarithm of each row's sum of exp(score); -inf if all scores are."""
    largest = scores.max(1, initial=-np.inf)
    largest = np.where(largest > -np.inf, largest, 0)
    sums = np.exp(scores - largest[:, None]).sum(1)
    return largest + np.log(sums, out=np.full(len(sums), -np.inf), where=sums > 0)


def log_sum_exp(queries, keys, scale):
    """ln of the sum of exp(score) over all keys, (n, query heads); -inf without keys."""
    queries, keys = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    group = queries.shape[1] // keys.shape[1]
    scores = np.einsum("qhd,thd->qht", queries, keys.repeat(group, 1)) * scale
    return np.logaddexp.reduce(scores, axis=2, initial=-np.inf)


# ---- Quantisation, rotation.


@cache
def hadamard(dim):
    """The matrix of +-1 in natural order; H @ H == dim * I. Read-only."""
    h = np.ones((1, 1))
    while len(h) < dim:
        h = np.block([[h, h], [h, -h]])
    h.flags.writeable = False
    return h


LEFT_OUT = {5: (0.002, 0.02), 4: (0.016, 0.048), 3: (0.036, 0.108), 2: (0.0675, 0.2025)}


def quantise(row, bits):
    """float32 row -> codes, scale, minimum as the kernels store them: over the whole range, or for 5 bits and fewer
    with the minimum and scale of `fit`."""
    f32 = np.float32
    row = np.asarray(row, f32)
    codes, scale, minimum = quantise_range(row, bits)
    if bits in LEFT_OUT and scale and abs(minimum - row.min()) < scale / 2:
        minimum, scale = fit(row, bits, minimum, scale)
        codes = np.rint(np.clip((row - minimum) / scale, f32(0), f32(2**bits - 1))).astype(int)
    return codes, scale, minimum


def fit(row, bits, minimum, scale):
    """kvc_fit.h, in its float32 arithmetic: four starts, least squares, the best once more. Returns its line rounded to
    halves, or the given minimum and scale if that saves less than 2^-12 of a squared step per value."""
    f32, n, top = np.float32, np.float32(len(row)), 2**bits - 1
    step, lowest = f32(2 ** (15 - bits)), row.min()
    first, whole = step - f32(1), f32(top) * step
    finest, unit = whole / (row.max() - lowest), (row.max() - lowest) / whole
    u = np.rint((row - lowest) * finest).astype(np.int64) + int(first)
    mean = f32(u.sum()) * (f32(1) / n)

    def sums(low, step):
        cut = int(np.rint(np.clip(low - step / f32(2), f32(0), f32(32767))))
        times = int(np.rint(np.minimum(f32(2**24) / step, f32(32767))))
        codes = np.minimum((np.maximum(u - cut, 0) * times + 2**14 >> 15) >> 9, top)
        return f32(codes.sum()), f32((codes**2).sum()), f32((codes * u).sum()) - f32(codes.sum()) * mean

    def refit(low, step):
        codes, squares, products = sums(low, step)
        spread = n * squares - codes * codes
        if spread <= 0 or products <= 0:
            return f32(0), low, step
        step = n * products / spread
        return products * step, mean - step * (codes * (f32(1) / n)), step

    def error(low, step):
        codes, squares, products = sums(low, step)
        away = low - mean
        return n * (away * away) + step * (f32(2) * (away * codes - products) + step * squares)

    best = f32(0), first, step
    for above in LEFT_OUT[bits]:
        for below in LEFT_OUT[bits]:
            left = f32(1) - f32(below) - f32(above)
            line = refit(first + f32(below) * whole, left * step)
            best = line if line[0] > best[0] else best
    _, low, wide = refit(*best[1:])
    line = np.clip(lowest + (low - first) * unit, f32(-65504), f32(65504)), wide * unit
    low, wide = (f32(np.float16(part)) for part in line)
    if not wide:
        return minimum, scale
    fitted = error((low - lowest) * finest + first, wide * finest) + n * step * step * f32(2.0**-12)
    return (low, wide) if fitted < error((minimum - lowest) * finest + first, scale * finest) else (minimum, scale)


def factor(moments):
    """The factor of the encoder for E[q q'], by its definition: the rows of U over their diagonal, H^-1 = U' U."""
    h = np.asarray(moments, np.float64)
    h = h + 0.01 * np.trace(h) / len(h) * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    return upper / np.diag(upper)[:, None]


def quantise_steered(row, bits, steer):
    """`quantise` with feedback by the factor `steer` (kvc_feedback.h), in float32, one channel after another."""
    f32, top = np.float32, 2**bits - 1
    x, steer = np.array(row, f32), np.asarray(steer, f32)
    codes, scale, minimum = quantise(x, bits)
    if x.min() == x.max():
        return codes, scale, minimum
    if bits < 4:
        wider = f32({3: 1.15, 2: 1.2}[bits])
        low = minimum - scale * f32(top / 2) * (wider - f32(1))
        minimum, scale = f32(np.float16(np.clip(low, -65504, 65504))), f32(np.float16(scale * wider))
    inverse = f32(1) / scale
    for d in range(len(x)):
        codes[d] = np.rint(np.clip((x[d] - minimum) * inverse, f32(0), f32(top)))
        error = x[d] - (minimum + scale * f32(codes[d]))
        x[d + 1 :] -= error * steer[d, d + 1 :]
    return codes, scale, minimum


def quantise_range(row, bits):
    """`quantise` over the whole range, in float32 in the kernels' order."""
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
    """A row of a quantised format as it is read, in float64, and the bound on the root of its mean squared error.

    The bound is half a step of the range, or half the spacing of halves at the minimum if that is more (kvc_quant.c);
    a fitted row exceeds it by at most a 64th of a step. Reversing the rotation adds up the errors of all values.
    """
    row = np.asarray(row, np.float32)
    dim, h = len(row), hadamard(len(row)) if rotated else None
    if rotated and row.min() == row.max():
        return np.full(dim, np.float64(np.float16(row[0]))), 2.0**-11 * abs(row[0]) + 2.0**-25
    x = (h @ row.astype(np.float64) / dim).astype(np.float32) if rotated else row
    codes, scale, minimum = quantise(x, bits)
    back = np.float64(minimum) + np.float64(scale) * codes
    half_ulp = np.spacing(np.minimum(np.abs(np.float16(x.min())), np.float16(65472))).astype(np.float64) / 2
    step = quantise_range(x, bits)[1]
    bound = max(step / 2, half_ulp) + step / 64 + 2.0**-22 * np.abs(x).max()
    return (h @ back, bound * np.sqrt(dim)) if rotated else (back, bound)


# ---- Files.


def read_pages(content, offsets, lengths, checksums):
    """`(good, arrays)`: pages of a file as bytes, each cut into arrays of `lengths` bytes; undefined for a bad page."""
    good, arrays = [], []
    for offset, parts, checksum in zip(offsets, lengths, checksums, strict=True):
        page = content[offset : offset + sum(parts)]
        good.append(len(page) == sum(parts) and zlib.crc32(page) == checksum)
        ends = np.cumsum(parts, dtype=int).tolist()
        arrays.append([page[end - n : end] for n, end in zip(parts, ends, strict=True)])
    return good, arrays
