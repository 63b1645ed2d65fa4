"""Attention over random caches against float64: shapes, formats, holes, forks, threads; 12,000 calls with --long."""

import numpy as np
from oracles import kernels as oracle

from kvcache import PagedKvCache, get_num_threads, set_num_threads

# Relative to the largest output of a row, as stated in kvc_attend.c and, for integer products, in kvc_tiles.h.
TOLERANCE = {"f32": 5e-6, "f16": 5e-6, "q8": 0.01, "q6": 0.01, "q5": 0.01, "q4": 0.01, "q3": 0.01, "q2": 0.01}
FORMATS = list(TOLERANCE)


def one(rng):
    """Test one call over all sequences of a cache; some are truncated, forked or have holes."""
    heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 9))
    dim = int(rng.choice([8, 16, 24, 40, 64, 72, 128, 256, 320, 512]))
    value_dim = int(rng.choice([8, 24, 32, 64, 96, 128, 256, 512])) if rng.random() < 0.5 else dim
    size = int(rng.choice([1, 3, 8, 16, 17, 32, 64, 256]))
    keys_as, values_as = rng.choice(FORMATS, 2)
    lengths = [int(2 ** rng.uniform(0, 8)) for _ in range(int(rng.integers(1, 4)))]
    blocks = 2 * sum(-(-n // size) for n in lengths) + 8
    formats = {"key_dtype": keys_as, "value_dtype": values_as}
    cache = PagedKvCache(blocks, size, heads, dim, **formats, value_head_dim=value_dim)

    def rows(n):
        return [rng.standard_normal((n, heads, d)).astype(np.float32) for d in (dim, value_dim)]

    spread = float(rng.choice([0.3, 1.0, 3.0]))
    for seq, n in enumerate(lengths):
        cache.allocate(seq, n)
        cache.write(0, seq, *rows(n))
        if rng.random() < 0.3:
            cache.keep_tokens(seq, np.flatnonzero(np.append(rng.random(n - 1) < 0.8, True)))
        if rng.random() < 0.3:
            cache.fork(seq, 100 + seq)
            cache.free(seq)
            cache.swap(100 + seq, 100 + seq)
            cache.fork(100 + seq, seq)
        if rng.random() < 0.3:
            cache.append(seq, 1)
            cache.write(0, seq, *rows(1))
    ids = rng.permutation(len(lengths))
    held = [cache.get_sequence(seq).num_tokens for seq in ids]
    counts = [int(rng.integers(0, min(n, 40) + 1)) for n in held]
    queries = (spread * rng.standard_normal((sum(counts), heads * group, dim))).astype(np.float32)
    set_num_threads(int(rng.integers(1, 4)))
    options = {}
    if rng.random() < 0.5:
        options = {"window": int(2 ** rng.uniform(0, 9)), "softcap": 10 ** rng.uniform(-1, 3), "sinks": None}
        options["sinks"] = rng.standard_normal(heads * group).astype(np.float32)
        options = {name: options[name] for name in options if rng.random() < 0.7}
    starts = rng.integers(0, 5000, len(ids)) if rng.random() < 0.5 else None
    out, scores = cache.attention(0, queries, ids, query_lens=counts, return_scores=True, starts=starts, **options)
    expected, mass = [], []
    for seq, part in zip(ids, np.split(queries, np.cumsum(counts)[:-1]), strict=True):
        got, weights = oracle.attention(part, *cache.read(0, seq), dim**-0.5, **options)
        expected.append(got), mass.append(weights)
    tolerance = max(TOLERANCE[keys_as], TOLERANCE[values_as])
    expected, mass = np.concatenate(expected), np.concatenate(mass)
    largest = np.abs(expected).max(-1, keepdims=True, initial=1e-3)
    case = f"{heads} x {group} heads of {dim} and {value_dim}, blocks of {size}, {keys_as} {values_as}, "
    case += f"{held} tokens, {counts} queries, {options}"
    assert (np.abs(out - expected) <= tolerance * largest).all(), case
    np.testing.assert_allclose(scores, mass, rtol=4 * tolerance, atol=4 * tolerance, err_msg=case)


def test_random_calls(long):
    before = get_num_threads()
    try:
        rng = np.random.default_rng(11)
        for _ in range(4_000 if long else 60):
            one(rng)
    finally:
        set_num_threads(before)
