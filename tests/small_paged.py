"""A small `PagedKvCache`, and rows for it."""

import numpy as np

from kvcache import PagedKvCache


def cache(num_blocks=100, **keywords):
    return PagedKvCache(num_blocks, 16, 32, 128, **keywords)


def rows(rng, n, heads=2, dim=8):
    return rng.standard_normal((n, heads, dim)).astype(np.float32)
