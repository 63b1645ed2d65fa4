"""Endless text under StreamingLLM: agrees with re-rotated keys, in constant memory, beyond all positions."""

from __future__ import annotations

import numpy as np
import pytest
from evicting_engines import layers, stored_as
from oracles.evicting import DenseEvictingEngine, DenseStreamingEngine
from places import GOLDEN

from kvcache import CacheManager, KVCacheConfig
from kvcache.engine import InferenceEngine, SamplingParams, Transformer
from kvcache.errors import InvalidOperationError
from kvcache.eviction import EvictionPolicy
from kvcache.texts.budgets import most_blocks

TEXT = np.random.default_rng(11).integers(0, 256, 4000).astype(np.uint32)
STREAM = EvictionPolicy.StreamingLLM(4, 20)


def make(network, policy=STREAM, **options):
    return InferenceEngine(network, eviction_policy=policy, **{"block_size": 4, "prefill_chunk": 16, **options})


# ---------------------------------------------------------------- comparison with the naive engine


@pytest.mark.parametrize("name", ["llama", "llama_biases", "mistral_yarn", "qwen3_tied"])
@pytest.mark.parametrize(("sinks", "window", "chunk"), [(4, 20, 16), (4, 20, 1), (1, 3, 7), (0, 12, 5)])
def test_results_are_those_of_keys_rotated_to_their_cache_positions(name, sinks, window, chunk):
    network = Transformer.from_pretrained(GOLDEN / name)
    text = TEXT[:120] % network.config.vocab_size
    engine = make(network, EvictionPolicy.StreamingLLM(sinks, window), prefill_chunk=chunk)
    twin = DenseStreamingEngine(network, sinks, window, chunk)
    for start, stop in ((0, 50), (50, 51), (51, 52), (52, 120)):
        logits, expected = engine.prefill_from_pos(text[start:stop], start), twin.extend(text[start:stop])[-1]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        for layer in layers(engine):
            assert engine.kept_positions(layer).tolist() == twin.positions(layer)
    assert engine.alive_tokens(0) == sinks + window
    engine.check()


@pytest.mark.parametrize("dtype", ["f16", "q8", "q4"])
def test_on_packed_keys(network, dtype):
    """The naive engine has the keys as the cache stored them once: no key is written twice."""
    engine = make(network, dtype=dtype)
    twin = DenseStreamingEngine(network, 4, 20, 16, stored_as(network.config, dtype))
    found, expected = engine.score(TEXT[:200]), twin.extend(TEXT[:199]).astype(float)
    expected = expected[np.arange(199), TEXT[1:200]] - np.log(np.exp(expected).sum(axis=1))
    bound = {"f16": 1e-3, "q8": 0.01, "q4": 0.05}[dtype]  # the kernel's rounding after two layers
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
    before = engine.cache.read(0, 0, 0, 4)
    engine.prefill_from_pos(TEXT[200:300], engine.num_tokens)
    np.testing.assert_array_equal(engine.cache.read(0, 0, 0, 4), before)


def test_the_distance_of_the_sinks_matters(network):
    """With the sinks at their distance in the text, or without sinks, the results differ."""
    near = make(network).score(TEXT[:300])
    far = make(network, EvictionPolicy.SlidingWindow(20, 4), kv_budget=24).score(TEXT[:300])
    none = make(network, EvictionPolicy.StreamingLLM(0, 24)).score(TEXT[:300])
    np.testing.assert_array_equal(near[:24], far[:24])
    assert np.abs(near - far)[40:].max() > 1e-2
    assert np.abs(near - none)[40:].max() > 1e-2


def test_without_sinks_distances_are_those_of_a_plain_window(network):
    plain = make(network, EvictionPolicy.SlidingWindow(24, 0), kv_budget=24).score(TEXT[:300])
    np.testing.assert_allclose(make(network, EvictionPolicy.StreamingLLM(0, 24)).score(TEXT[:300]), plain, atol=1e-4)


def test_without_evictions_it_equals_any_other_engine(network):
    plain, engine = InferenceEngine(network, prefill_chunk=16), make(network, EvictionPolicy.StreamingLLM(4, 300))
    np.testing.assert_array_equal(engine.score(TEXT[:300]), plain.score(TEXT[:300]))
    twin = DenseEvictingEngine(network, ("SlidingWindow", 300, 4), 304, 16)
    np.testing.assert_allclose(engine.decode_step(5, 299), twin.extend([*TEXT[:299], 5])[-1], rtol=0, atol=1e-4)


# ---------------------------------------------------------------- long texts


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_far_beyond_the_positions_of_the_network(network, dtype):
    """The memory is that of sinks, window and one piece; neither the blocks nor the table of angles grow."""
    engine = make(network, dtype=dtype)
    assert len(TEXT) > 7 * network.config.max_position_embeddings
    engine.prefill_from_pos(TEXT, 0)
    blocks = engine.cache.stats().peak_blocks_used
    assert engine.num_tokens == 4000
    assert engine.kept_positions(1).tolist() == [0, 1, 2, 3, *range(3980, 4000)]
    for _ in range(100):
        engine.decode_step(int(TEXT[engine.num_tokens % 100]), engine.num_tokens)
    assert engine.cache.stats().peak_blocks_used == blocks <= engine.cache.total_blocks
    assert engine.cache.used_block_count == sum(engine.cache.get_sequence(i).num_blocks for i in layers(engine))
    assert all(engine.cache.get_sequence(i).num_blocks <= most_blocks(24, 4) for i in layers(engine))
    assert len(network._rope._table[0]) <= network.config.max_position_embeddings
    engine.check()


def test_exact_after_a_long_text(network):
    engine, twin = make(network, EvictionPolicy.StreamingLLM(2, 6)), DenseStreamingEngine(network, 2, 6, 16)
    found, expected = engine.prefill_from_pos(TEXT[:1500], 0), twin.extend(TEXT[:1500])[-1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_generation_continues_beyond_all_positions(network):
    endless = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=700)
    engine, plain = make(network), InferenceEngine(network)
    limit = plain.config.max_position_embeddings
    assert len(plain.generate(TEXT[:10], endless)) < 700
    assert len(engine.generate(TEXT[:10], endless)) == 700 > limit
    assert "endless" in repr(engine)
    assert str(limit) in repr(plain)


def test_pieces_are_as_long_as_positions_allow(network):
    """Sinks, window and one piece fit within the network's positions."""
    limit = network.config.max_position_embeddings
    seen = []

    class Watching:
        config = network.config

        def forward(self, tokens, positions, attend, logits, *, sink_positions=None):
            seen.append(len(tokens))
            assert sink_positions is None or sink_positions.max() < limit
            assert sink_positions is None or positions[0] - sink_positions[0] > 0
            return network.forward(tokens, positions, attend, logits, sink_positions=sink_positions)

    engine = make(Watching(), EvictionPolicy.StreamingLLM(4, limit - 10), prefill_chunk=100)
    engine.prefill_from_pos(TEXT[: 2 * limit], 0)
    assert set(seen) <= {6, 2 * limit % 6}


# ---------------------------------------------------------------- going back, failures, invalid arguments


def test_going_back(network):
    engine, twin = make(network), DenseStreamingEngine(network, 4, 20, 16)
    expected = twin.extend(TEXT[:100])[-1]
    engine.prefill_from_pos(TEXT[:60], 0)
    with pytest.raises(InvalidOperationError, match="evicted"):
        engine.prefill_from_pos(TEXT[:10], 50)
    engine.prefill_from_pos(TEXT[3:4], 3)  # into the sinks, none of which was evicted
    assert (engine.num_tokens, engine.alive_tokens(0)) == (4, 4)
    np.testing.assert_allclose(engine.prefill_from_pos(TEXT[:100], 0), expected, rtol=0, atol=1e-4)
    engine.check()


def test_failures_change_nothing(network):
    class Failing:
        config = network.config
        fail = False

        def forward(self, tokens, positions, attend, logits, *, sink_positions=None):
            def counted(layer, *args):
                if self.fail and layer == 1:
                    raise RuntimeError("broken")
                return attend(layer, *args)

            return network.forward(tokens, positions, counted, logits, sink_positions=sink_positions)

    model = Failing()
    engine = make(model)
    engine.prefill_from_pos(TEXT[:60], 0)
    before = [(engine.kept_positions(layer), engine.cache.read(0, layer)) for layer in layers(engine)]
    for count in (1, 40):
        model.fail = True
        with pytest.raises(RuntimeError, match="broken"):
            engine.prefill_from_pos(TEXT[60 : 60 + count], 60)
        model.fail = False
        engine.check()
        after = [(engine.kept_positions(layer), engine.cache.read(0, layer)) for layer in layers(engine)]
        np.testing.assert_equal(after, before)
    expected = DenseStreamingEngine(network, 4, 20, 16)
    expected.extend(TEXT[:60])
    np.testing.assert_allclose(
        engine.prefill_from_pos(TEXT[60:90], 60), expected.extend(TEXT[60:90])[-1], rtol=0, atol=1e-4
    )


def test_a_network_without_sink_positions_is_refused(network):
    class Plain:
        config = network.config

        def forward(self, tokens, positions, attend, logits):
            return network.forward(tokens, positions, attend, logits)

    with pytest.raises(TypeError, match=r"sink_positions.*got Plain"):
        make(Plain())
    assert len(make(Plain(), EvictionPolicy.SlidingWindow(20, 4), kv_budget=24).score(TEXT[:40])) == 39


def test_budgets_and_positions(network):
    limit = network.config.max_position_embeddings
    assert make(network).kv_budget == 24
    assert make(network, EvictionPolicy.SlidingWindow(10, 2)).kv_budget == 12
    engine = make(network, kv_budget=10)
    engine.score(TEXT[:100])
    assert engine.kept_positions(0).tolist() == [0, 1, 2, 3, *range(93, 99)]
    with pytest.raises(ValueError, match=f"below max_position_embeddings \\({limit}\\).*got {limit}"):
        make(network, EvictionPolicy.StreamingLLM(4, limit - 4))
    for policy in (EvictionPolicy.H2O(), EvictionPolicy.SlidingWindow(20, 4)):
        with pytest.raises(ValueError, match="expected positions below max_position_embeddings"):
            make(network, policy, kv_budget=24).prefill_from_pos(np.zeros(limit + 1, int), 0)


def test_the_policy():
    assert str(STREAM) == "StreamingLLM(sink=4, window=20)"
    assert STREAM.rule(100) == (24, 4, 20)
    for bad, error in (((-1, 5), ValueError), ((4, 0), ValueError), ((4, 2.5), TypeError)):
        with pytest.raises(error):
            EvictionPolicy.StreamingLLM(*bad)
    with pytest.raises(ValueError, match="needs an engine"):
        CacheManager(KVCacheConfig(max_seq_len=24, num_heads=1, head_dim=8, eviction_policy=STREAM))
