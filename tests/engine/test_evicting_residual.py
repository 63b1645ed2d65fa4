"""Engines that evict and read the newest tokens of every layer unpacked: `residual_length` and `eviction_policy`."""

import numpy as np
import pytest
from engines import Failing
from evicting_engines import POLICIES, PROMPT, assert_same, layers, make, state, stored_as
from oracles.evicting import DenseEvictingEngine

from kvcache import EvictionPolicy, InferenceEngine
from kvcache.calibration.calibrating import measure
from kvcache.calibration.residual import residual_bytes
from kvcache.errors import OutOfMemoryError
from kvcache.policies import SnapKV

pytestmark = pytest.mark.one_build


class Residual(DenseEvictingEngine):
    """Every query reads the tokens of its own group as f16 has them, and others as `packed` has them."""

    def __init__(self, network, policy, kv_budget, chunk, packed, length):
        super().__init__(network, policy, kv_budget, chunk, stored_as(network.config, "f16"))
        self.packed, self.length = packed, length
        self.rows = [{} for _ in self.layers]  # of each layer: position -> packed K and V

    def attend(self, layer, queries, keys, values, places):
        rows = [*zip(*self.packed(layer, keys, values), strict=True)]
        self.rows[layer] |= dict(zip(map(int, places), rows, strict=True))
        super().attend(layer, queries[:0], keys, values, places)
        held, out = self.layers[layer], []
        for query, place in zip(queries.astype(float), places, strict=True):
            seen = [token for token in held if token.position <= place]
            k, v = (
                np.array([rows[i] for rows in (
                    (t.key, t.value) if t.position >= place - place % self.length else self.rows[layer][t.position]
                    for t in seen
                )], float)
                for i in (0, 1)
            )
            group = len(query) // k.shape[1]
            scores = np.einsum("hd,khd->hk", query, k.repeat(group, 1)) / np.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out.append(np.einsum("hk,khd->hd", weights, v.repeat(group, 1)))
            for token, mass in zip(seen, weights.sum(0), strict=True):
                token.drawn += mass
        return np.array(out, np.float32)


@pytest.mark.parametrize(("chunk", "length"), [(512, 16), (16, 5), (7, 16), (1, 4)])
@pytest.mark.parametrize("name", POLICIES)
def test_same_survivors_and_logits_as_a_naive_engine(network, name, chunk, length):
    policy, naive = POLICIES[name]
    engine = make(network, policy, block_size=5, prefill_chunk=chunk, dtype="q2", residual_length=length)
    assert engine.residual_length == engine.cache.residual_length == length
    twin = Residual(network, naive, 16, chunk, stored_as(network.config, "q2"), length)
    plain = DenseEvictingEngine(network, naive, 16, chunk, stored_as(network.config, "q2"))
    logits, expected, other = engine.prefill_from_pos(PROMPT, 0), twin.extend(PROMPT)[-1], plain.extend(PROMPT)[-1]
    differs = 0.0
    for token in range(40):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=0.01)
        differs = max(differs, np.abs(other - expected).max())
        for layer in layers(engine):
            assert engine.kept_positions(layer).tolist() == twin.positions(layer)
        logits = engine.decode_step(token, engine.num_tokens)
        expected, other = twin.extend([token])[-1], plain.extend([token])[-1]
    assert differs > 0.05
    engine.check()


@pytest.mark.parametrize("chunk", [512, 16, 3])
@pytest.mark.parametrize("name", [*POLICIES, "snapkv"])
def test_exact_rows_give_what_an_engine_without_a_residual_gives(network, name, chunk):
    """K and V in f32 are the same in both parts, so every attention, score and survivor is."""
    policy = SnapKV(6, 5) if name == "snapkv" else POLICIES[name][0]
    engines = [make(network, policy, prefill_chunk=chunk, residual_length=length) for length in (0, 7)]
    for tokens in (PROMPT, *[[token] for token in range(30)]):
        logits = [engine.prefill_from_pos(tokens, engine.num_tokens) for engine in engines]
        np.testing.assert_allclose(*logits, rtol=0, atol=1e-4)
        for layer in layers(engines[0]):
            assert_same(*(engine.kept_positions(layer) for engine in engines))


@pytest.mark.parametrize("name", POLICIES)
def test_a_calibration_reads_first_and_newest_tokens_unpacked(network, name):
    policy = POLICIES[name][0]
    known = measure(network, np.random.default_rng(5).integers(0, 256, 300).astype(np.uint32))
    options, packed = {"kv_budget": 40, "prefill_chunk": 16}, {"dtype": "q2", "calibrate": known}
    exact, bare, kept = (
        make(network, policy, **options, **more).score(np.tile(PROMPT, 3))
        for more in ({}, packed, {**packed, "residual_length": 16})
    )
    assert np.abs(kept - exact).mean() < 0.8 * np.abs(bare - exact).mean()
    engine = make(network, policy, **options, **packed, residual_length=16)
    assert engine.cache.first_tokens == 16
    engine.prefill_from_pos(PROMPT[:20], 0)
    engine.check()


def test_going_back_to_the_start_of_a_group_gives_what_a_new_text_gives(network):
    options = {"kv_budget": 60, "prefill_chunk": 7, "dtype": "q2", "residual_length": 16}
    engine, fresh = (make(network, **options) for _ in range(2))
    engine.prefill_from_pos(PROMPT[:50], 0)
    again = engine.prefill_from_pos(PROMPT[20:40], 16)
    fresh.prefill_from_pos(PROMPT[:16], 0)
    np.testing.assert_allclose(again, fresh.prefill_from_pos(PROMPT[20:40], 16), rtol=0, atol=1e-4)
    for _ in range(2):
        engine.reset()
        engine.prefill_from_pos(PROMPT, 0)
        engine.check()
    new = make(network, **options)
    new.prefill_from_pos(PROMPT, 0)
    assert_same(state(engine)[2:], state(new)[2:])


@pytest.mark.parametrize("error", [OutOfMemoryError(1, 0), KeyboardInterrupt()], ids=repr)
def test_failures_change_nothing(network, error):
    model, options = Failing(network, error), {"prefill_chunk": 7, "block_size": 5, "dtype": "q2", "residual_length": 8}
    engine = make(model, **options)

    def all_of_it():
        rows = [engine.cache.read_unpacked(0, layer) for layer in layers(engine)]
        return state(engine), [engine.cache.unpacked_tokens(layer) for layer in layers(engine)], rows

    for held, attends in ((0, 1), (10, 2), (40, 2), (40, 3)):
        engine.reset()
        if held:
            engine.prefill_from_pos(PROMPT[:held], 0)
        before = all_of_it()
        model.countdown = attends
        with pytest.raises(type(error)):
            engine.prefill_from_pos(PROMPT[:30], held)
        assert_same(all_of_it(), before)
    engine.enlarge(3)
    np.testing.assert_array_equal(
        engine.prefill_from_pos(PROMPT, 0), make(network, **options).prefill_from_pos(PROMPT, 0)
    )


@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_counted_and_bounded(network, name):
    options = {"dtype": "q4", "residual_length": 16, "prefill_chunk": 40, "block_size": 4}
    engine = make(network, POLICIES[name][0], **options)
    rows = residual_bytes(network.config, ("q4", "q4"), 16, 40)
    packed = engine.cache.total_blocks * engine.cache.block_memory_bytes
    limited = make(network, POLICIES[name][0], max_memory_bytes=packed + rows, **options)
    assert limited.cache.total_blocks == engine.cache.total_blocks
    for tokens in (np.tile(PROMPT, 6)[:230], *[[token] for token in range(60)]):
        limited.prefill_from_pos(tokens, limited.num_tokens)
        assert packed < limited.memory()["kv"] <= packed + rows
    with pytest.raises(ValueError, match="max_memory_bytes: expected at least"):
        make(network, POLICIES[name][0], max_memory_bytes=rows, **options)


def test_streaming_has_none(network):
    with pytest.raises(ValueError, match="residual_length: expected 0 or none with an eviction_policy without end"):
        InferenceEngine(network, eviction_policy=EvictionPolicy.StreamingLLM(4, 12), residual_length=16)
