"""Policies in Python: their scores and survivors are those of a naive engine, and a failing one changes nothing."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from evicting_engines import H2O, PROMPT, assert_same, assert_same_steps, layers, make, state
from oracles.evicting import DenseHeadsEngine, DensePolicyEngine
from places import GOLDEN

from kvcache.engine import InferenceEngine, Policy, Transformer
from kvcache.errors import InvalidOperationError
from kvcache.policies import AdaKV, ExpectedAttention, KeyDiff, SnapKV
from kvcache.texts.budgets import survivors
from kvcache.texts.policy import of_network

pytestmark = pytest.mark.one_build


class Watched:
    """A policy that notes what it is asked."""

    def __init__(self, policy):
        self.policy, self.asked = policy, []
        for name in ("score_queries", "budgets"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))

    def keep(self, layer, scores, positions, budget):
        self.asked.append((layer, scores.copy(), positions.copy(), budget))
        return self.policy.keep(layer, scores, positions, budget)


class Bare:
    """`keep` alone; keeps fewer than it may."""

    def keep(self, layer, scores, positions, budget):
        return np.sort(np.argsort(-scores.max(axis=0), kind="stable")[: budget - 3])


class HeavyHitters(Policy):
    score_queries = None

    def keep(self, layer, scores, positions, budget):
        return survivors(scores.sum(axis=0), H2O.rule(budget), True)


class Layered(HeavyHitters):
    """Every layer has a budget of its own."""

    def budgets(self, kv_budget, num_layers):
        return [kv_budget - 5 + 3 * layer for layer in range(num_layers)]


class Latest(Policy):
    score_queries = 0

    def keep(self, layer, scores, positions, budget):
        assert not scores.any()
        return range(len(positions) - budget, len(positions))


POLICIES = {"snapkv": SnapKV(6, 5), "bare": Bare(), "layered": Layered(), "latest": Latest()}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("block_size", "chunk"), [(5, 16), (16, 1), (3, 512)])
def test_like_a_naive_engine(network, name, block_size, chunk):
    policy, twins = Watched(POLICIES[name]), Watched(POLICIES[name])
    engine = make(network, policy, block_size=block_size, prefill_chunk=chunk)
    twin = DensePolicyEngine(network, twins, 16, chunk)
    assert_same_steps(engine, twin, 12)
    assert len(policy.asked) == len(twins.asked) > 4
    for (layer, scores, positions, budget), (*where, theirs, others, limit) in zip(
        policy.asked, twins.asked, strict=True
    ):
        assert (layer, positions.tolist(), budget) == (*where, others.tolist(), limit)
        assert scores.shape == (network.config.num_kv_heads, len(positions))
        np.testing.assert_allclose(scores, theirs, rtol=0, atol=2e-6)


def test_h2o_in_python_is_h2o(network):
    ours, theirs = make(network, H2O, prefill_chunk=16), make(network, HeavyHitters(), prefill_chunk=16)
    np.testing.assert_array_equal(ours.score(PROMPT), theirs.score(PROMPT))
    for layer in layers(ours):
        np.testing.assert_array_equal(ours.kept_positions(layer), theirs.kept_positions(layer))


def test_going_back_forgets_the_queries_that_are_cut_off(network):
    asked = []
    for steps in (((0, 30), (20, 36)), ((0, 20), (20, 36))):
        policy = Watched(SnapKV(6, 3))
        engine = make(network, policy, 36)
        for start, stop in steps:
            engine.prefill_from_pos(PROMPT[start:stop], start)
        engine.decode_step(1, 36)
        asked.append(policy.asked)
    assert len(asked[0]) == len(layers(engine))
    np.testing.assert_equal(asked[0], asked[1])


def test_scores_are_counted_as_memory(network):
    scored = Failing()
    scored.score_queries = 6
    engines = [make(network, Latest()), make(network, scored)]
    for engine in engines:
        engine.prefill_from_pos(PROMPT, 0)
    plain, more = (engine.memory()["bookkeeping"] for engine in engines)
    config = network.config
    assert more - plain == config.num_layers * config.num_kv_heads * 16 * (6 * 4 - 8)


class Reading(Policy):
    """A choice per head of all that a policy can read: uneven, and below the budget."""

    score_queries, per_head, reads_keys, reads_values, reads_queries = 3, True, True, True, 5

    def keep(self, layer, scores, positions, budget, keys, values, queries):
        kept = []
        for head, (score, key, value, asking) in enumerate(zip(scores, keys, values, queries, strict=True)):
            assert asking.shape[0] == min(5, positions[head][-1] + 1)
            worth = score + np.abs(value).mean(axis=1) + (key @ asking[0].T + key @ asking[-1].T).max(axis=1)
            kept.append(np.sort(np.argsort(-worth, kind="stable")[: budget + (4 if head % 2 else -5)]))
        return kept


PER_HEAD = {
    "snapkv": lambda: SnapKV(6, 5, per_head=True), "adakv": lambda: AdaKV(SnapKV(6, 3)), "reading": Reading,
    "expected": lambda: AdaKV(ExpectedAttention(20, future=30)), "keydiff": lambda: AdaKV(KeyDiff(), 0.5),
}


@pytest.mark.parametrize("name", PER_HEAD)
@pytest.mark.parametrize(("block_size", "chunk"), [(5, 16), (16, 1)])
def test_heads_are_like_a_naive_engine(network, name, block_size, chunk):
    """Survivors and logits agree, also after going back to a token before which nothing was evicted."""
    policy = PER_HEAD[name]()
    engine = make(network, policy, block_size=block_size, prefill_chunk=chunk)
    twin = DenseHeadsEngine(network, of_network(policy, network), 16, chunk)
    engine.prefill_from_pos(PROMPT[:14], 0)
    engine.prefill_from_pos(PROMPT[9:13], 9)
    logits, expected = engine.prefill_from_pos(PROMPT[13:], 13), twin.extend(PROMPT)[-1]
    heads, size = network.config.num_kv_heads, network.config.head_dim
    for _ in range(8):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        for layer in layers(engine):
            assert [set(engine.kept_positions(layer, head)) for head in range(heads)] == twin.heads[layer]
            assert engine.kept_positions(layer).tolist() == twin.positions(layer)
            assert sum(engine.alive_tokens(layer, head) for head in range(heads)) <= 16 * heads
        engine.check()
        token = int(np.argmax(logits))
        logits, expected = engine.decode_step(token, engine.num_tokens), twin.extend([token])[-1]
    held = sum(len(head) for own in twin.heads for head in own)
    blocks = engine.cache.used_block_count
    assert engine.cache.block_memory_bytes == 2 * 4 * size * block_size  # of one head
    assert held <= blocks * block_size <= 1.25 * held + 2 * block_size * heads * len(twin.heads)
    if name == "reading":
        with pytest.raises(IndexError, match=rf"head: expected an int in \[0, {heads}\)"):
            engine.kept_positions(0, heads)


def test_heads_with_room_for_all_tokens_change_nothing(network):
    plain = InferenceEngine(network, prefill_chunk=35, dtype="q8")
    whole = make(network, AdaKV(SnapKV()), 200, prefill_chunk=35, dtype="q8")
    np.testing.assert_array_equal(whole.score(PROMPT), plain.score(PROMPT))


def test_one_head_of_its_own():
    """A network with one KV head has one list of tokens either way."""
    single = Transformer.from_pretrained(GOLDEN / "llama_biases")
    alike = [make(single, SnapKV(6, 5, per_head=each), prefill_chunk=16) for each in (False, True)]
    np.testing.assert_array_equal(*(engine.score(PROMPT) for engine in alike))


HEADS_BAD = {
    "int": (3, TypeError, "keep: expected indices of each of 2 KV heads, got 3"),
    "one row": ([[0, 1]], ValueError, "keep: expected indices of each of 2 KV heads, got 1 rows"),
    "empty": ([[], [1]], ValueError, "keep[0]: expected 1 to 32 indices, got 0"),
    "twice": ([[1], [2, 2]], ValueError, "keep[1]: expected ascending indices from 0 to 69, got [2, 2]"),
    "too many": ([range(20), range(13)], ValueError, "keep: expected at most 32 indices of 2 KV heads, got 33"),
    "beyond": ([[1], [70]], ValueError, "keep[1]: expected ascending indices from 0 to 69, got [70]"),
}


@pytest.mark.parametrize("name", HEADS_BAD)
def test_what_keep_returns_for_heads_is_checked(network, name):
    found, error, message = HEADS_BAD[name]
    policy = type("Own", (Reading,), {"keep": lambda *arguments: found})()
    engine = make(network, policy)
    engine.prefill_from_pos(PROMPT[:10], 0)
    before = state(engine)
    with pytest.raises(error, match="^" + re.escape(message)):
        engine.prefill_from_pos(np.resize(PROMPT, 60), 10)
    assert_same(state(engine), before)


def test_a_policy_for_the_network(network):
    """The policy that `of_network` returns evicts; a network that does not say how it turns queries is refused."""
    bound = ExpectedAttention().of_network(network)
    assert (bound is not None and bound.reads_queries, bound.per_head) == (512, False)
    with pytest.raises(InvalidOperationError, match="expected of_network"):
        ExpectedAttention().keep(0, np.zeros((1, 3)), np.arange(3), 2, *[np.zeros((1, 3, 8), np.float32)] * 3)
    hidden = SimpleNamespace(config=SimpleNamespace(num_layers=2, num_kv_heads=2), forward=network.forward)
    with pytest.raises(TypeError, match=r"expected a network with a Rope as config\.rope, got SimpleNamespace"):
        ExpectedAttention().of_network(hidden)
    policy = type("Own", (Bare,), {"of_network": lambda self, model: 3})()
    with pytest.raises(TypeError, match="of_network: expected an object with `keep`, got int"):
        make(network, policy)


BAD = {
    "none": (None, ValueError, "keep: expected one dimension, got shape ()"),
    "floats": ([0.0, 1.0], TypeError, "keep: expected integers, got float64"),
    "mask": (np.ones(70, bool), TypeError, "keep: expected integers, got bool"),
    "no token": ([], ValueError, "keep: expected 1 to 16 indices, got 0"),
    "too many": (range(17), ValueError, "keep: expected 1 to 16 indices, got 17"),
    "not sorted": ([1, 0], ValueError, "keep: expected ascending indices from 0 to 69, got [1, 0]"),
    "twice": ([1, 1], ValueError, "keep: expected ascending indices from 0 to 69, got [1, 1]"),
    "beyond": ([3, 70], ValueError, "keep: expected ascending indices from 0 to 69, got [3, 70]"),
    "before": ([-1, 3], ValueError, "keep: expected ascending indices from 0 to 69, got [-1, 3]"),
    "raises": (RuntimeError("broken"), RuntimeError, "broken"),
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt, ""),
}


class Failing(Policy):
    """Fails in one layer, when it is told to."""

    failure, layer = None, 0

    def keep(self, layer, scores, positions, budget):
        if self.failure is None or layer != self.layer:
            return range(len(positions) - budget, len(positions))
        if isinstance(self.failure, BaseException):
            raise self.failure
        return self.failure


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("layer", [0, 1])
def test_what_keep_returns_is_checked(network, name, layer):
    failure, error, message = BAD[name]
    policy = Failing()
    policy.layer, engine = layer, make(network, policy)
    for held in (0, 40):
        engine.reset()
        if held:
            engine.prefill_from_pos(PROMPT[:held], 0)
        before, text = state(engine), np.resize(PROMPT, 70 if held == 0 else 54)
        policy.failure = np.empty(()) if failure is None else failure
        with pytest.raises(error, match="^" + re.escape(message)):
            engine.prefill_from_pos(text, held)
        policy.failure = None
        assert_same(state(engine), before)
        engine.prefill_from_pos(text, held)
        engine.check()


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"score_queries": 1.5}, TypeError, "score_queries: expected an int, got float"),
        ({"score_queries": -1}, ValueError, "score_queries: expected an int >= 0, got -1"),
        ({"score_queries": 5000}, ValueError, "score_queries: expected an int <= 4096, got 5000"),
        ({"budgets": lambda budget, count: [3]}, ValueError, "budgets: expected one for each of 2 layers, got 1"),
        ({"budgets": lambda budget, count: 3}, TypeError, "budgets: expected 2 ints, got int"),
        ({"budgets": lambda budget, count: [3, 0]}, ValueError, "budgets: expected an int >= 1, got 0"),
        ({"budgets": lambda budget, count: [3, "x"]}, TypeError, "budgets: expected an int, got str"),
        ({"reads_queries": 5000}, ValueError, "reads_queries: expected an int <= 4096, got 5000"),
        ({"reads_queries": None}, TypeError, "reads_queries: expected an int, got None"),
        ({"keep": 3}, TypeError, "eviction_policy: expected an EvictionPolicy or an object with `keep`, got Policy"),
    ],
    ids=str,
)
def test_settings_are_checked(network, settings, error, match):
    policy = type("Policy", (), {"keep": lambda *arguments: [0]})()
    vars(policy).update(settings)
    with pytest.raises(error, match="^" + re.escape(match)):
        make(network, policy)


def test_a_class_is_no_policy(network):
    with pytest.raises(TypeError, match=r"^eviction_policy: expected an EvictionPolicy or an object with `keep`, got"):
        make(network, SnapKV)
    with pytest.raises(TypeError, match=r"got the class SnapKV$"):
        make(network, SnapKV)
    with pytest.raises(ValueError, match="expected a kv_budget"):
        InferenceEngine(network, eviction_policy=SnapKV())
