"""A small `PagedKvCache`, and rows for it."""

import numpy as np

from kvcache import PagedKvCache


def cache(num_blocks=100, **keywords):
    return PagedKvCache(num_blocks, 16, 32, 128, **keywords)


def rows(rng, n, heads=2, dim=8):
    return rng.standard_normal((n, heads, dim)).astype(np.float32)


def written(num_tokens, block_size, dtype):
    """A cache of 8 blocks whose sequence 1 has random rows, as K and as V, and those rows."""
    paged = PagedKvCache(8, block_size, 2, 8, dtype=dtype)
    paged.allocate(1, num_tokens)
    k = rows(np.random.default_rng(0), num_tokens)
    paged.write(0, 1, k, k)
    return paged, k
