"""Engines that evict: the survivors of every layer, the logits, the memory, and the state after failures."""

from __future__ import annotations

import numpy as np
import pytest
from engines import GREEDY
from evicting_engines import (
    H2O,
    POLICIES,
    PROMPT,
    assert_bounded,
    assert_same,
    assert_same_steps,
    layers,
    make,
    state,
    stored_as,
)
from oracles.evicting import DenseEvictingEngine
from places import GOLDEN

from kvcache.engine import InferenceEngine, Transformer
from kvcache.errors import InvalidOperationError
from kvcache.eviction import EvictionPolicy
from kvcache.texts.budgets import most_blocks, survivors


@pytest.fixture(params=POLICIES, ids=str)
def policies(request):
    return POLICIES[request.param]


# ---------------------------------------------------------------- comparison with the naive engine


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 512), (5, 16), (16, 7), (16, 1)])
def test_same_survivors_and_logits(network, policies, block_size, chunk):
    policy, naive = policies
    engine = make(network, policy, block_size=block_size, prefill_chunk=chunk)
    twin = DenseEvictingEngine(network, naive, 16, chunk)
    assert_same_steps(engine, twin, 40)
    assert engine.num_tokens == 110
    engine.check()


def test_several_prompts_in_one_text(network, policies):
    """Continue with a long piece: forks of the survivors exist during the call and are freed after it."""
    policy, naive = policies
    engine = make(network, policy, block_size=3, prefill_chunk=11)
    twin = DenseEvictingEngine(network, naive, 16, 11)
    for start in (0, 25, 26, 50):
        piece = PROMPT[start : start + 25] if start != 25 else PROMPT[25:26]
        logits = engine.prefill_from_pos(piece, engine.num_tokens)
        np.testing.assert_allclose(logits, twin.extend(piece)[-1], rtol=0, atol=1e-4)
        for layer in layers(engine):
            assert engine.kept_positions(layer).tolist() == twin.positions(layer)
        assert_bounded(engine)
        engine.check()


@pytest.mark.parametrize("name", ["llama_biases", "mistral_yarn", "qwen3_tied"])
def test_other_networks(name):
    network = Transformer.from_pretrained(GOLDEN / name)
    tokens = PROMPT % network.config.vocab_size
    engine, twin = make(network, prefill_chunk=20), DenseEvictingEngine(network, ("H2O", 0.5), 16, 20)
    np.testing.assert_allclose(engine.prefill_from_pos(tokens, 0), twin.extend(tokens)[-1], rtol=0, atol=1e-4)
    for layer in layers(engine):
        assert engine.kept_positions(layer).tolist() == twin.positions(layer)


def test_pyramid_budgets_are_held(network):
    engine = make(network, EvictionPolicy.PyramidKV(2), 15)
    engine.prefill_from_pos(PROMPT, 0)
    assert [engine.alive_tokens(layer) for layer in layers(engine)] == [20, 10]
    assert engine.eviction_policy == EvictionPolicy.PyramidKV(2)
    assert engine.kv_budget == 15


def test_score(network, policies):
    policy, naive = policies
    logits = DenseEvictingEngine(network, naive, 16, 9).extend(PROMPT[:-1]).astype(float)
    expected = logits[np.arange(69), PROMPT[1:]] - np.log(np.exp(logits).sum(axis=1))
    engine = make(network, policy, prefill_chunk=9)
    np.testing.assert_allclose(engine.score(PROMPT), expected, rtol=0, atol=1e-4)
    assert_bounded(engine)


def test_a_budget_beyond_the_text_changes_nothing(network, policies):
    policy = policies[0]
    if policy.window is not None:
        policy = EvictionPolicy.SlidingWindow(300, 10)
    plain, engine = InferenceEngine(network, prefill_chunk=16), make(network, policy, 400, prefill_chunk=16)
    np.testing.assert_array_equal(engine.score(PROMPT), plain.score(PROMPT))
    assert engine.generate(PROMPT, GREEDY) == plain.generate(PROMPT, GREEDY)
    for layer in layers(engine):
        np.testing.assert_array_equal(engine.kept_positions(layer), plain.kept_positions(layer))
    np.testing.assert_array_equal(engine.prefill_from_pos(PROMPT, 20), plain.prefill_from_pos(PROMPT, 20))
    assert engine.num_tokens == plain.num_tokens == engine.alive_tokens(1) == plain.alive_tokens(1) == 90


def test_generate_and_stream(network, policies):
    policy, naive = policies
    engine, twin = make(network, policy, prefill_chunk=16), DenseEvictingEngine(network, naive, 16, 16)
    row, expected = twin.extend(PROMPT)[-1], []
    for _ in range(10):
        expected.append(int(np.argmax(row)))
        row = twin.extend(expected[-1:])[-1]
    assert engine.generate(PROMPT, GREEDY) == list(engine.stream(PROMPT, GREEDY)) == expected
    assert engine.num_tokens == 79
    assert engine.prefill_token_count == 140


def test_quantised_rows(network, policies):
    """q4: the naive engine has the rows as the format stores them. The kernel's sums are rounded, so survivors by
    score may differ where scores are close."""
    policy, naive = policies
    engine = make(network, policy, dtype="q4", prefill_chunk=16, block_size=5)
    twin = DenseEvictingEngine(network, naive, 16, 16, stored_as(network.config, "q4"))
    logits, expected = engine.prefill_from_pos(PROMPT, 0), twin.extend(PROMPT)[-1]
    for layer in layers(engine):
        same = set(engine.kept_positions(layer).tolist()) & set(twin.positions(layer))
        assert len(same) >= 0.75 * engine.alive_tokens(layer) == 0.75 * len(twin.positions(layer))
        if not policy.by_score:
            assert len(same) == 16
            np.testing.assert_allclose(logits, expected, rtol=0, atol=0.05)
    for token in PROMPT[:40]:
        engine.decode_step(token, engine.num_tokens)
        assert_bounded(engine)
    engine.check()


# ---------------------------------------------------------------- survivors


def test_ties_go_to_the_earliest():
    rule = H2O.rule(4)
    assert survivors(np.zeros(8), rule, True).tolist() == [4, 5, 6, 7]
    assert survivors(np.array([3.0, 1, 2, 2, 0, 9, 0, 0]), rule, True).tolist() == [0, 5, 6, 7]
    assert survivors(np.array([3.0, 1, 2, 2, 0, 1, 0, 0]), rule, True).tolist() == [0, 3, 6, 7]
    rule = EvictionPolicy.SlidingWindow(2, 1).rule(10)
    assert survivors(np.arange(5.0), rule, False).tolist() == [0, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_survivors_by_sorting(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        n = int(rng.integers(2, 60))
        rule = EvictionPolicy.H2O(float(rng.random())).rule(int(rng.integers(1, n)))
        scores = rng.integers(0, 6, n).astype(float)
        middle = sorted(range(n - rule.back), key=lambda i: (scores[i], i))
        expected = sorted([*middle[n - rule.limit :], *range(n - rule.back, n)])
        assert survivors(scores, rule, True).tolist() == expected


# ---------------------------------------------------------------- memory


@pytest.mark.one_build
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_memory_is_freed(network, policies, block_size):
    """The peak is a budget and a chunk per layer for a text of any length; most of it is free after every call."""
    engine = make(network, policies[0], block_size=block_size, prefill_chunk=16, kv_budget=20)
    text = np.resize(PROMPT, 400)
    engine.prefill_from_pos(text, 0)
    chunk = -(-16 // block_size) + 1
    rest = sum(most_blocks(rule.limit, block_size) for rule in engine._budgets.rules)
    assert engine.cache.stats().peak_blocks_used <= rest + 2 * chunk
    assert_bounded(engine)
    for token in text[:100]:
        engine.decode_step(token, engine.num_tokens)
        assert_bounded(engine)
    assert engine.cache.stats().peak_blocks_used <= rest + 2 * chunk
    engine.reset()
    assert engine.cache.used_block_count == 0
    engine.check()


@pytest.mark.one_build
def test_default_pool_is_enough_for_any_order_of_calls(network, policies):
    rng = np.random.default_rng(3)
    engine = make(network, policies[0], block_size=4, prefill_chunk=9, kv_budget=24)
    assert engine.cache.total_blocks < 2 * 60
    for _ in range(60):
        count = int(rng.choice([1, 5, 9, 30, 60]))
        if engine.num_tokens + count > 512:
            engine.reset()
        engine.prefill_from_pos(rng.integers(0, 256, count), engine.num_tokens)
        assert_bounded(engine)
    engine.check()


def test_enlarge_and_reset(network):
    engine = make(network, num_blocks=8)
    engine.prefill_from_pos(PROMPT[:16], 0)
    engine.enlarge(20)
    assert (engine.cache.total_blocks, engine.num_tokens, engine.alive_tokens(0)) == (28, 0, 0)
    engine.check()
    assert engine.generate(PROMPT[:30], GREEDY) == make(network).generate(PROMPT[:30], GREEDY)
    engine.reset()
    engine.check()
    assert engine.num_tokens == engine.cache.used_block_count == 0


# ---------------------------------------------------------------- going back


def test_going_back_before_any_eviction(network):
    engine = make(network, EvictionPolicy.SlidingWindow(30, 4), 40)
    expected = engine.prefill_from_pos(PROMPT[:30], 0)
    np.testing.assert_allclose(engine.decode_step(PROMPT[29], 29), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(engine.prefill_from_pos(PROMPT[10:30], 10), expected, rtol=0, atol=1e-4)
    assert engine.num_tokens == 30
    engine.check()


def test_going_back_behind_evicted_tokens(network):
    engine = make(network, EvictionPolicy.SlidingWindow(12, 4), 40)
    expected = engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    for pos in (5, 60, 69):
        with pytest.raises(InvalidOperationError, match="has evicted tokens"):
            engine.prefill_from_pos(PROMPT[:3], pos)
        with pytest.raises(InvalidOperationError, match="reset"):
            engine.decode_step(1, pos)
        assert_same(state(engine), before)
    # None of the sinks was evicted.
    engine.prefill_from_pos(PROMPT[4:], 4)
    engine.check()
    np.testing.assert_array_equal(engine.prefill_from_pos(PROMPT, 0), expected)
    assert_same(state(engine)[2:], before[2:])


def test_restart_at_0_after_the_first_token_was_evicted(network):
    engine = make(network, EvictionPolicy.SlidingWindow(12, 0), 12)
    expected = engine.prefill_from_pos(PROMPT, 0)
    np.testing.assert_array_equal(engine.prefill_from_pos(PROMPT, 0), expected)
    engine.check()
