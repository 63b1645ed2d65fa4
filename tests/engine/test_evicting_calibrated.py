"""Engines that evict with a calibration: the keys of each layer are rounded by what is known of that layer."""

import numpy as np
import pytest
from engines import Failing
from evicting_engines import H2O, POLICIES, PROMPT, assert_same, layers, make, state
from oracles.evicting import DenseEvictingEngine, DenseStreamingEngine
from places import GOLDEN

from kvcache import Calibration, EvictionPolicy, InferenceEngine, PagedKvCache
from kvcache.calibration.calibrating import measure
from kvcache.demo import DIRECTORY
from kvcache.engine import Transformer
from kvcache.errors import OutOfMemoryError

pytestmark = pytest.mark.one_build

STREAM = EvictionPolicy.StreamingLLM(4, 12)


@pytest.fixture(scope="module")
def known(network):
    return measure(network, np.random.default_rng(5).integers(0, 256, 300).astype(np.uint32))


@pytest.fixture(scope="module")
def demo():
    return InferenceEngine.from_pretrained(DIRECTORY).model


class Watched:
    """A network that keeps the keys and values of every call."""

    def __init__(self, network):
        self.network, self.config = network, network.config
        self.rows = [[] for _ in range(network.config.num_layers)]

    def forward(self, tokens, positions, attend, logits, *, sink_positions=None):
        def watched(layer, queries, keys, values, *more):
            self.rows[layer].append((keys.copy(), values.copy()))
            return attend(layer, queries, keys, values, *more)

        return self.network.forward(tokens, positions, watched, logits, sink_positions=sink_positions)

    def keys(self, layer):
        return np.concatenate([keys for keys, _ in self.rows[layer]])


def stored_as(config, dtype, calibration):
    """The rows of a layer as a cache of all layers returns them."""
    rows = PagedKvCache(
        8, 16, config.num_kv_heads, config.head_dim, num_layers=config.num_layers, dtype=dtype, calibration=calibration
    )

    def stored(layer, keys, values):
        rows.allocate(0, len(keys))
        rows.write(layer, 0, keys, values)
        found = rows.read(layer, 0)
        rows.free(0)
        return found

    return stored


@pytest.mark.parametrize("dtype", ["q4", "q2"])
@pytest.mark.parametrize("name", [*POLICIES, "streaming"])
def test_survivors_are_rounded_by_the_calibration_of_their_layer(network, known, name, dtype):
    policy, naive = POLICIES.get(name, (STREAM, None))
    centred = known.without_centres([*range(len(known.centres))]) if naive is None else known
    watched, stored = Watched(network), stored_as(network.config, dtype, centred)
    engine = make(watched, policy, 16, prefill_chunk=16, dtype=dtype, calibrate=known)
    twin = (
        DenseStreamingEngine(network, 4, 12, 16, stored) if naive is None
        else DenseEvictingEngine(network, naive, 16, 16, stored)
    )
    logits, expected = engine.prefill_from_pos(PROMPT, 0), twin.extend(PROMPT)[-1]
    for token in range(20):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=0.01)
        logits, expected = engine.decode_step(token, engine.num_tokens), twin.extend([token])[-1]
    for layer in layers(engine):
        held = engine.cache.read(layer, layer)[0]
        whole = np.concatenate([stored(layer, *rows)[0] for rows in watched.rows[layer]])
        np.testing.assert_array_equal(held, whole[engine.kept_positions(layer)])
    assert engine.cache.calibration.fingerprint == centred.fingerprint
    engine.check()


@pytest.mark.parametrize("dtype", ["q8", "q4", "q2"])
def test_errors_of_scores_are_smaller_than_without_in_every_layer(demo, dtype):
    rng, errors = np.random.default_rng(5), []
    text, fresh = (rng.integers(0, demo.config.vocab_size, count).astype(np.uint32) for count in (300, 140))
    known = measure(demo, text)
    for calibrate in (known, False):
        watched = Watched(demo)
        engine = make(watched, EvictionPolicy.SlidingWindow(60, 4), None, dtype=dtype, calibrate=calibrate)
        engine.prefill_from_pos(fresh, 0)
        rows = [
            engine.cache.read(layer, layer)[0] - watched.keys(layer)[engine.kept_positions(layer)]
            for layer in layers(engine)
        ]
        errors.append([np.einsum("nhd,hde,nhe->", e, m, e) for e, m in zip(rows, known.moments, strict=True)])
    ratio = np.array(errors[0]) / np.array(errors[1])
    assert (ratio < 0.9).all()


@pytest.mark.parametrize("error", [OutOfMemoryError(1, 0), KeyboardInterrupt()], ids=repr)
def test_failures_change_nothing(network, known, error):
    model = Failing(network, error)
    engine = make(model, prefill_chunk=7, block_size=5, dtype="q4", calibrate=known)
    for held, attends in ((0, 1), (10, 2), (40, 2), (40, 3)):
        engine.reset()
        if held:
            engine.prefill_from_pos(PROMPT[:held], 0)
        before = state(engine)
        model.countdown = attends
        with pytest.raises(type(error)):
            engine.prefill_from_pos(PROMPT[:30], held)
        assert_same(state(engine), before)
    engine.enlarge(3)
    fresh = make(network, prefill_chunk=7, block_size=5, dtype="q4", calibrate=known)
    np.testing.assert_array_equal(engine.prefill_from_pos(PROMPT, 0), fresh.prefill_from_pos(PROMPT, 0))


def test_what_is_refused_and_what_is_counted(network, known):
    for wrong, message in (
        (known.of_layers([0]), r"^calibrate: expected one of \("),
        ([1] * 10, r"^calibrate: expected a text of at least 64 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            make(network, H2O, dtype="q4", calibrate=wrong)
    losses = Calibration(known.centres, known.moments, np.ones((len(known.centres), 2)))
    with pytest.raises(ValueError, match=r"^dtype: expected formats with an eviction_policy, got 'auto:4.0'"):
        make(network, H2O, dtype="auto:4.0", calibrate=losses)
    assert make(network, H2O, dtype="f16", calibrate=known).cache.calibration is None
    one, other = (make(network, H2O, dtype="q4", calibrate=each) for each in (known, False))
    assert one.memory()["kv"] == other.memory()["kv"] == one.cache.total_blocks * one.cache.block_memory_bytes


@pytest.mark.parametrize("policy", [EvictionPolicy.SlidingWindow(60, 4), EvictionPolicy.H2O()], ids=str)
def test_what_biases_add_to_keys_is_centred_without_a_calibration(policy):
    network = Transformer.from_pretrained(GOLDEN / "llama_biases")
    config = network.config
    text = np.random.default_rng(3).integers(0, config.vocab_size, 100).astype(np.uint32)
    first = config.num_heads * config.head_dim
    for layer in network.weights.layers:
        bias = np.zeros_like(layer.qkv_bias)
        slow = bias[first : first + config.num_kv_heads * config.head_dim].reshape(-1, 2, config.head_dim // 2)
        slow[:, :, -1] = 60
        object.__setattr__(layer, "qkv_bias", bias)
    zeros = Calibration(np.zeros((config.num_layers, config.num_kv_heads, config.head_dim)))
    exact, centred, plain = (
        make(network, policy, 64, prefill_chunk=100, **options).score(text)
        for options in ({}, {"dtype": "q4"}, {"dtype": "q4", "calibrate": zeros})
    )
    assert np.abs(centred - exact).mean() < 0.7 * np.abs(plain - exact).mean()
