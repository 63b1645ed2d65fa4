"""Failures and invalid arguments with an engine that evicts: a failing call changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from engines import GREEDY, Failing
from evicting_engines import H2O, POLICIES, PROMPT, assert_bounded, assert_same, make, state
from places import GOLDEN

from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.eviction import EvictionPolicy, EvictionStrategy
from kvcache.texts.budgets import Budgets

pytestmark = pytest.mark.one_build


@pytest.fixture(params=POLICIES, ids=str)
def policies(request):
    return POLICIES[request.param]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [OutOfMemoryError(1, 0), RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("after", [False, True])
def test_failures_change_nothing(network, policies, error, after):
    model = Failing(network, error)
    engine = make(model, policies[0], prefill_chunk=7, block_size=5)
    model.after = after
    for held, attends in itertools.product((0, 10, 40), (1, 2, 3, 6)):
        engine.reset()
        if held:
            engine.prefill_from_pos(PROMPT[:held], 0)
        before, used = state(engine), engine.cache.used_block_count
        model.countdown = attends
        with pytest.raises(type(error)):
            engine.prefill_from_pos(PROMPT[:30], held)
        assert_same(state(engine), before)
        assert engine.cache.used_block_count == used
        if attends <= 2:
            model.countdown = attends
            with pytest.raises(type(error)):
                engine.decode_step(1, held)
            assert_same(state(engine), before)
            model.countdown = attends
            with pytest.raises(type(error)):  # cut, then the failure
                engine.prefill_from_pos(PROMPT[:30], 0)
            assert_same(state(engine), before)
    expected = make(network, policies[0], prefill_chunk=7, block_size=5)
    expected.prefill_from_pos(PROMPT[:40], 0)
    np.testing.assert_array_equal(engine.prefill_from_pos(PROMPT, 40), expected.prefill_from_pos(PROMPT, 40))


@pytest.mark.parametrize("step", range(4))
def test_interrupted_during_evictions(network, monkeypatch, step):
    """Half of the layers have already evicted: they are restored too."""
    engine = make(network, prefill_chunk=16)
    engine.prefill_from_pos(PROMPT, 0)
    before, calls = state(engine), itertools.count()
    keep = engine.cache.keep_tokens

    def interrupted(*args):
        if next(calls) == step:
            raise KeyboardInterrupt
        keep(*args)

    monkeypatch.setattr(engine.cache, "keep_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.prefill_from_pos(PROMPT[:40], 70)
    assert_same(state(engine), before)


def test_memory_runs_out(network):
    engine = make(network, block_size=4, prefill_chunk=16)
    engine.prefill_from_pos(PROMPT, 0)
    before, free = state(engine), engine.cache.free_block_count
    engine.cache.allocate(99, 4 * (free - 3))
    with pytest.raises(OutOfMemoryError):
        engine.prefill_from_pos(PROMPT[:40], 70)
    assert_same(state(engine), before)
    asked = []

    def reclaim(error):
        asked.append(error.requested)
        engine.cache.free(99)
        return True

    engine.reclaim = reclaim
    engine.prefill_from_pos(PROMPT[:40], 70)
    assert len(asked) == 1
    assert_bounded(engine)


def test_failed_generate_leaves_an_empty_sequence(network):
    model = Failing(network, RuntimeError("broken"))
    engine = make(model, prefill_chunk=16)
    expected = engine.generate(PROMPT, GREEDY)
    for call, attends in ((engine.generate, 5), (engine.generate, 15), (engine.score, 5)):
        model.countdown = attends
        with pytest.raises(RuntimeError, match="broken"):
            call(PROMPT)
        assert engine.num_tokens == engine.cache.used_block_count == 0
        engine.check()
        assert engine.generate(PROMPT, GREEDY) == expected


# ---------------------------------------------------------------- invalid arguments


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"eviction_policy": H2O}, ValueError, "expected a kv_budget"),
        ({"kv_budget": 5}, ValueError, "expected an eviction_policy"),
        ({"eviction_policy": H2O, "kv_budget": 0}, ValueError, "kv_budget: expected an int >= 1, got 0"),
        ({"eviction_policy": H2O, "kv_budget": 1.5}, TypeError, "kv_budget: expected an int, got float"),
        ({"eviction_policy": "H2O", "kv_budget": 5}, TypeError, "an EvictionPolicy or an object with `keep`, got str"),
        ({"eviction_policy": EvictionStrategy.LRU(), "kv_budget": 5}, TypeError, "got EvictionStrategy"),
        ({"eviction_policy": EvictionPolicy.PyramidKV(3), "kv_budget": 5}, ValueError, r"expected PyramidKV\(2\)"),
    ],
    ids=str,
)
def test_bad_options(network, options, error, match):
    with pytest.raises(error, match=match):
        InferenceEngine(network, **options)


def test_no_prefix_cache_over_it(network):
    engine = make(network)
    blocks = engine.cache.total_blocks
    with pytest.raises(ValueError, match="engine: expected none with an eviction_policy"):
        PrefixCachedEngine(engine, 8)
    assert engine.cache.total_blocks == blocks


def test_calls_that_need_one_sequence_for_all_layers_are_refused(network):
    engine = make(network)
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    with pytest.raises(InvalidOperationError, match="one sequence per layer"):
        _ = engine.seq_id
    with pytest.raises(InvalidOperationError, match="one sequence per layer"):
        engine.begin(lambda cache, seq_id: 0)
    assert_same(state(engine), before)


@pytest.mark.parametrize("evicting", [False, True])
def test_layers_are_checked(network, evicting):
    engine = make(network) if evicting else InferenceEngine(network)
    engine.prefill_from_pos(PROMPT, 0)
    for ask in (engine.alive_tokens, engine.kept_positions):
        for layer, error in ((2, IndexError), (-1, IndexError), (0.5, TypeError), (True, TypeError), (None, TypeError)):
            with pytest.raises(error, match="layer"):
                ask(layer)
    engine.kept_positions(0)[:] = -1  # a copy
    engine.check()


def test_from_pretrained():
    engine = InferenceEngine.from_pretrained(GOLDEN / "llama", eviction_policy=H2O, kv_budget=8)
    assert len(engine.generate(PROMPT, GREEDY)) == 10
    assert engine.alive_tokens(0) == engine.alive_tokens(1) == 8
    assert InferenceEngine.from_pretrained(GOLDEN / "llama").eviction_policy is None


def test_a_huge_budget_is_no_limit(network):
    budgets = Budgets.of(H2O, 10**15, network)
    assert budgets.peak_blocks(16, 512, 512) == 2 * 2 * 41 + 41 + 2 * 33
    assert len(make(network, H2O, 10**15).generate(PROMPT, GREEDY)) == 10
