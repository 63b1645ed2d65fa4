"""Engines for comparisons and failures, and the state that a failing call must not change."""

from __future__ import annotations

import numpy as np
from oracles.engine import DenseKvCache

from kvcache.engine import InferenceEngine, SamplingParams

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=10)
PROMPT = np.arange(3, 40, dtype=np.uint32)


class DenseEngine(InferenceEngine):
    def _make_cache(self, **options):
        return DenseKvCache(**options)


def state(engine):
    """The state that a failing call must not change."""
    engine.check()
    cache, seq = engine.cache, engine.seq_id
    held = [np.array(rows) for layer in range(engine.config.num_layers) for rows in read(cache, layer, seq)]
    return engine.num_tokens, engine.prefill_token_count, cache.free_block_count, held


def read(cache, layer, seq):
    if isinstance(cache, DenseKvCache):
        return cache.sequences[seq][layer]
    return cache.read(layer, seq)


def assert_same_state(engine, before):
    now = state(engine)
    assert now[:3] == before[:3]
    for a, b in zip(now[3], before[3], strict=True):
        np.testing.assert_array_equal(a, b)


class Failing:
    """A network that fails before or after a chosen call of `attend`, counted over all forward passes."""

    def __init__(self, network, error):
        self.network, self.config, self.error = network, network.config, error
        self.countdown, self.after = -1, False

    def forward(self, tokens, positions, attend, logits):
        def counted(*args):
            self.countdown -= 1
            if self.countdown == 0 and not self.after:
                raise self.error
            mixed = attend(*args)
            if self.countdown == 0:
                raise self.error
            return mixed

        return self.network.forward(tokens, positions, counted, logits)
