"""Prompts, sampling, and a check between requests, for the tests of `PrefixCachedEngine`."""

import gc

import numpy as np

from kvcache.engine import SamplingParams

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=64)
SHORT = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=4)


def prompt(seed, n):
    return np.random.default_rng(seed).integers(0, 250, n).astype(np.uint32)


def settled(cached):
    """Verify that no block is pinned and none is lost."""
    gc.collect()
    cached.check()
    prefixes = cached.prefix_cache.cache
    assert prefixes.references().sum() == len(prefixes)
