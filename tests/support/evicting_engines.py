"""Engines that evict under each policy, and the state that a failing call must not change."""

from __future__ import annotations

import numpy as np

from kvcache.engine import InferenceEngine
from kvcache.eviction import EvictionPolicy
from kvcache.paged.cache import PagedKvCache
from kvcache.texts.budgets import most_blocks

PROMPT = np.random.default_rng(7).integers(0, 256, 70).astype(np.uint32)

POLICIES = {
    "h2o": (EvictionPolicy.H2O(), ("H2O", 0.5)),
    "h2o_heavy": (EvictionPolicy.H2O(0.0), ("H2O", 0.0)),
    "h2o_recent": (EvictionPolicy.H2O(1.0), ("H2O", 1.0)),
    "window": (EvictionPolicy.SlidingWindow(12, 4), ("SlidingWindow", 12, 4)),
    "window_cut": (EvictionPolicy.SlidingWindow(100, 4), ("SlidingWindow", 100, 4)),
    "pyramid": (EvictionPolicy.PyramidKV(2, 0.25), ("PyramidKV", 2, 0.25)),
}
H2O = EvictionPolicy.H2O()


def make(network, policy=H2O, kv_budget=16, **options):
    return InferenceEngine(network, eviction_policy=policy, kv_budget=kv_budget, **options)


def layers(engine):
    return range(engine.config.num_layers)


def state(engine):
    engine.check()
    held = [engine.cache.read(0, layer) for layer in layers(engine)]
    scores = [alive.scores for alive in engine._sequence.text.places[0].alive]
    positions = [engine.kept_positions(layer) for layer in layers(engine)]
    return engine.num_tokens, engine.prefill_token_count, positions, scores, held


def assert_same(found, expected):
    np.testing.assert_equal(found, expected)


def assert_bounded(engine):
    """Between calls every layer is within its budget, in at most `most_blocks` blocks, and no other block is in use."""
    used = 0
    for layer in layers(engine):
        blocks = engine.cache.get_sequence(layer).num_blocks
        assert blocks <= most_blocks(engine.alive_tokens(layer), engine.cache.block_size)
        used += blocks
    assert engine.cache.used_block_count == used


def assert_same_steps(engine, twin, steps):
    """A prompt and the likeliest tokens: each layer keeps the tokens of a naive engine, and the logits are near."""
    logits, expected = engine.prefill_from_pos(PROMPT, 0), twin.extend(PROMPT)[-1]
    for _ in range(steps):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        for layer in layers(engine):
            assert engine.kept_positions(layer).tolist() == twin.positions(layer)
        assert_bounded(engine)
        engine.check()
        token = int(np.argmax(logits))
        logits, expected = engine.decode_step(token, engine.num_tokens), twin.extend([token])[-1]


def stored_as(config, dtype):
    """The rows as a cache of this format returns them; this does not depend on other rows."""
    rows = PagedKvCache(8, 16, config.num_kv_heads, config.head_dim, dtype=dtype)

    def stored(layer, keys, values):
        rows.allocate(0, len(keys))
        rows.write(0, 0, keys, values)
        found = rows.read(0, 0)
        rows.free(0)
        return found

    return stored
