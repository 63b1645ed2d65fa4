"""Engines that evict: the survivors of every layer, the logits, the memory, and what failures leave behind."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from oracle_evicting import DenseEvictingEngine

from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer
from kvcache.engine.evicting import Budgets, most_blocks, survivors
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.eviction import EvictionPolicy, EvictionStrategy
from kvcache.paged import PagedKvCache

GOLDEN = Path(__file__).parent / "golden"
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=10)
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


@pytest.fixture(scope="module")
def network():
    return Transformer.from_pretrained(GOLDEN / "llama")


@pytest.fixture(params=POLICIES, ids=str)
def policies(request):
    return POLICIES[request.param]


def make(network, policy=H2O, kv_budget=16, **options):
    return InferenceEngine(network, eviction_policy=policy, kv_budget=kv_budget, **options)


def layers(engine):
    return range(engine.config.num_layers)


def state(engine):
    engine.check()
    held = [engine.cache.read(0, layer) for layer in layers(engine)]
    scores = [alive.scores for alive in engine._sequence._alive]
    positions = [engine.kept_positions(layer) for layer in layers(engine)]
    return engine.num_tokens, engine.prefill_token_count, positions, scores, held


def assert_same(found, expected):
    np.testing.assert_equal(found, expected)


def assert_bounded(engine):
    """Between calls: every layer within its budget, in at most `most_blocks` blocks; nothing else is in use."""
    used = 0
    for layer in layers(engine):
        blocks = engine.cache.get_sequence(layer).num_blocks
        assert blocks <= most_blocks(engine.alive_tokens(layer), engine.cache.block_size)
        used += blocks
    assert engine.cache.used_block_count == used


# ---------------------------------------------------------------- the twin


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 512), (5, 16), (16, 7), (16, 1)])
def test_same_survivors_and_logits(network, policies, block_size, chunk):
    policy, naive = policies
    engine = make(network, policy, block_size=block_size, prefill_chunk=chunk)
    twin = DenseEvictingEngine(network, naive, 16, chunk)
    logits, expected = engine.prefill_from_pos(PROMPT, 0), twin.extend(PROMPT)[-1]
    for _ in range(40):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        for layer in layers(engine):
            assert engine.kept_positions(layer).tolist() == twin.positions(layer)
        assert_bounded(engine)
        token = int(np.argmax(logits))
        logits, expected = engine.decode_step(token, engine.num_tokens), twin.extend([token])[-1]
    assert engine.num_tokens == 110
    engine.check()


def test_several_prompts_in_one_text(network, policies):
    """Going on with a long piece: forks of the survivors are kept meanwhile, and let go."""
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
    """q4: rows as a cache of their own gives them back; the sums of the kernel are rounded, so survivors by score
    may differ from the twin's where scores are close."""
    policy, naive = policies
    config = network.config
    rows = PagedKvCache(1, 64, config.num_kv_heads, config.head_dim, dtype="q4")

    def stored(layer, keys, values):
        rows.allocate(0, len(keys))
        rows.write(0, 0, keys, values)
        found = rows.read(0, 0)
        rows.free(0)
        return found

    engine = make(network, policy, dtype="q4", prefill_chunk=16, block_size=5)
    twin = DenseEvictingEngine(network, naive, 16, 16, stored)
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


# ---------------------------------------------------------------- who stays


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


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_memory_is_given_back(network, policies, block_size):
    """The peak is a budget and a chunk per layer, however long the text; most of it is free after every call."""
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


def test_going_back_before_anything_left(network):
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
    # Up to the sinks nothing is missing.
    engine.prefill_from_pos(PROMPT[4:], 4)
    engine.check()
    np.testing.assert_array_equal(engine.prefill_from_pos(PROMPT, 0), expected)
    assert_same(state(engine)[2:], before[2:])


def test_restart_at_0_after_the_first_token_left(network):
    engine = make(network, EvictionPolicy.SlidingWindow(12, 0), 12)
    expected = engine.prefill_from_pos(PROMPT, 0)
    np.testing.assert_array_equal(engine.prefill_from_pos(PROMPT, 0), expected)
    engine.check()


# ---------------------------------------------------------------- failures


class Failing:
    """A network that fails at a chosen call of `attend`, before or after it."""

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
def test_interrupted_while_tokens_leave(network, monkeypatch, step):
    """Half of the layers are already held to their budget: they too are as before."""
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


# ---------------------------------------------------------------- mistakes of the caller


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"eviction_policy": H2O}, ValueError, "expected a kv_budget"),
        ({"kv_budget": 5}, ValueError, "expected an eviction_policy"),
        ({"eviction_policy": H2O, "kv_budget": 0}, ValueError, "kv_budget: expected at least 1, got 0"),
        ({"eviction_policy": H2O, "kv_budget": 1.5}, TypeError, "kv_budget: expected a whole number"),
        ({"eviction_policy": "H2O", "kv_budget": 5}, TypeError, "expected an EvictionPolicy, got str"),
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
    with pytest.raises(ValueError, match="without eviction_policy"):
        PrefixCachedEngine(engine, 8)
    assert engine.cache.total_blocks == blocks


def test_what_needs_one_sequence_for_all_layers_says_so(network):
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
