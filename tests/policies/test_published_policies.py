"""Policies of the literature beside naive twins, and in the engines."""

import numpy as np
import pytest
from engines import GREEDY

from kvcache.engine import InferenceEngine
from kvcache.policies import TOVA, AdaKV, ExpectedAttention, KeyDiff, Ranked, SnapKV
from kvcache.serving import BatchEngine

pytestmark = pytest.mark.one_build


def snapkv_twin(scores, budget, window, kernel):
    window = min(window, budget)
    heads, before, reach = len(scores), scores.shape[1] - window, kernel // 2
    pooled = []
    for token in range(before):
        near = range(max(0, token - reach), min(before, token + reach + 1))
        pooled.append(sum(scores[head, other] for head in range(heads) for other in near) / kernel)
    best = sorted(range(before), key=lambda token: (-pooled[token], token))[: budget - window]
    return sorted(best) + list(range(before, scores.shape[1]))


def tova_twin(scores, budget):
    last = scores.shape[1] - 1
    order = sorted(range(last), key=lambda token: (-sum(scores[:, token]), token))
    return [*sorted(order[: budget - 1]), last]


@pytest.mark.parametrize("seed", range(20))
def test_the_survivors_are_those_of_a_twin(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 60))
    budget, window, kernel = int(rng.integers(1, n)), int(rng.integers(1, 40)), int(rng.choice([3, 5, 7]))
    scores = rng.random((3, n))
    if seed % 2:  # with ties, which a division would break by its rounding
        scores, kernel = np.floor(4 * scores) / 4, 1
    positions = np.sort(rng.choice(200, n, replace=False))
    kept = SnapKV(window, kernel).keep(0, scores, positions, budget)
    assert kept.tolist() == snapkv_twin(scores, budget, window, kernel)
    assert TOVA().keep(0, scores, positions, budget).tolist() == tova_twin(scores, budget)


def keydiff_twin(keys, budget):
    def unit(row):
        return row / np.sqrt((row * row).sum())

    likeness = np.zeros(keys.shape[1])
    for head in keys.astype(np.float64):
        anchor = unit(np.mean([unit(row) for row in head], axis=0))
        likeness += [unit(row) @ anchor for row in head]
    return sorted(np.argsort(likeness)[:budget].tolist())


@pytest.mark.parametrize("seed", range(8))
def test_keydiff_is_its_twin(seed):
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((3, 30, 8)).astype(np.float32) + rng.standard_normal((3, 1, 8)).astype(np.float32)
    budget = int(rng.integers(1, 30))
    assert KeyDiff().keep(0, np.zeros((3, 30)), np.arange(30), budget, keys).tolist() == keydiff_twin(keys, budget)
    KeyDiff().keep(0, np.zeros((3, 30)), np.arange(30), budget, keys * 0)  # nothing to divide by


def expected_twin(keys, values, queries, end, sinks, future, frequencies):
    """Worths in one KV head by matrices: every rotation is one, and queries are turned back by its transpose."""
    dim = keys.shape[1]

    def rotation(position):
        turn = np.eye(dim)
        for pair, frequency in enumerate(frequencies):
            at = [pair, pair + len(frequencies)]
            cos, sin = np.cos(position * frequency), np.sin(position * frequency)
            turn[np.ix_(at, at)] = [[cos, -sin], [sin, cos]]
        return turn

    mean_rotation = np.mean([rotation(end + i) for i in range(future)], axis=0)
    places = [end - len(queries) + i for i in range(len(queries))]
    back = np.array([rotation(at).T @ row.T for at, row in zip(places, queries, strict=True) if at >= sinks])
    attention = []
    for head in range(queries.shape[1]):
        rows = back[:, :, head]
        mean, spread = mean_rotation @ rows.mean(axis=0), np.cov(rows.T, bias=True)
        spread = mean_rotation @ spread @ mean_rotation.T
        weights = np.exp([mean @ key / np.sqrt(dim) + key @ spread @ key / dim / 2 for key in keys])
        attention.append(weights / weights.sum())
    return np.mean(attention, axis=0) * np.linalg.norm(values, axis=1)


@pytest.mark.parametrize("seed", range(4))
def test_expected_attention_is_its_twin(network, seed):
    rng, config = np.random.default_rng(seed), network.config
    n, dim, sinks = 30, config.head_dim, seed
    keys, values = rng.standard_normal((2, n, dim)).astype(np.float32)
    queries = rng.standard_normal((12, 2, dim)).astype(np.float32)
    positions = np.r_[np.arange(5), np.sort(rng.choice(np.arange(5, 99), n - 6, replace=False)), 99]
    policy = ExpectedAttention(12, future=7, sinks=sinks).of_network(network)
    found = policy.worth(1, np.zeros(n), positions, 10, keys, values, queries)
    rows = keys[sinks:].astype(float), values[sinks:].astype(float), queries.astype(float)
    wanted = expected_twin(*rows, 100, sinks, 7, config.rope.frequencies(dim))
    assert np.isinf(found[:sinks]).all()
    np.testing.assert_allclose(found[sinks:], wanted, rtol=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_adakv_is_its_twin(seed):
    """Each head has its share, and the rest goes to the highest worths of all heads, one by one."""
    rng = np.random.default_rng(seed)
    lens, budget, least = rng.integers(4, 40, 3), 9, seed / 10
    scores = [np.floor(20 * rng.random(n)) for n in lens]
    order = sorted((-scores[h][i], h, i) for h in range(3) for i in range(lens[h]))
    wanted, share = [[], [], []], max(1, int(budget * least))
    for _, head, i in order:
        if len(wanted[head]) < share:
            wanted[head].append(i)
    for _, head, i in order:
        if i not in wanted[head] and sum(map(len, wanted)) < 3 * budget:
            wanted[head].append(i)

    class Scores(Ranked):
        def worth(self, layer, scores, positions, budget):
            return scores.copy()

    kept = AdaKV(Scores(), least).keep(0, scores, [np.arange(n) for n in lens], budget)
    assert [each.tolist() for each in kept] == [sorted(each) for each in wanted]


@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_keys_that_a_policy_reads(network, dtype):
    """They are those of its tokens, as the cache has them: what stays is read again afterwards."""
    asked = {}

    class Watching(KeyDiff):
        def keep(self, layer, scores, positions, budget, /, keys=None):
            kept = super().keep(layer, scores, positions, budget, keys)
            assert keys.shape == (network.config.num_kv_heads, len(positions), network.config.head_dim)
            asked[layer] = keys[:, kept].copy()
            return kept

    engine = InferenceEngine(network, eviction_policy=Watching(), kv_budget=24, prefill_chunk=16, dtype=dtype)
    engine.prefill_from_pos(np.random.default_rng(3).integers(0, 250, 50), 0)
    assert asked.keys() == set(range(network.config.num_layers))
    for layer, keys in asked.items():
        (seq_id,) = [each for each in engine.cache.sequence_ids() if each % network.config.num_layers == layer]
        np.testing.assert_array_equal(engine.cache.read(layer, seq_id)[0], keys.swapaxes(0, 1))


@pytest.mark.parametrize("policy", [SnapKV(8, 3), TOVA(), KeyDiff()], ids=lambda each: type(each).__name__)
def test_in_the_engines(network, policy):
    """A batch gives what an engine alone gives, and every layer keeps its budget."""
    prompt = np.random.default_rng(2).integers(0, 250, 150)
    engine = InferenceEngine(network, eviction_policy=policy, kv_budget=24, prefill_chunk=16)
    answer = engine.generate(prompt, GREEDY)
    assert [engine.alive_tokens(layer) for layer in range(engine.config.num_layers)] == [24] * engine.config.num_layers
    assert isinstance(policy, KeyDiff) or engine.kept_positions(0)[-1] == engine.num_tokens - 1
    with BatchEngine(network, eviction_policy=policy, kv_budget=24) as batch:
        alone = InferenceEngine(network, eviction_policy=policy, kv_budget=24).generate(prompt, GREEDY)
        assert batch.generate_batch([prompt] * 2, GREEDY, progress=False) == [alone] * 2
    assert len(answer) == GREEDY.max_tokens


def test_settings_are_checked():
    for settings, message in (
        ({"window": 0}, "window: expected an int >= 1, got 0"), ({"window": 5000}, "window: expected an int <= 4096"),
        ({"kernel": 4}, "kernel: expected an odd number, got 4"), ({"kernel": -1}, "kernel: expected an int >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            SnapKV(**settings)
    with pytest.raises(ValueError, match="queries: expected an int >= 1, got 0"):
        ExpectedAttention(0)
    assert isinstance(AdaKV().policy, SnapKV)
    with pytest.raises(TypeError, match="policy: expected a Ranked, got int"):
        AdaKV(3)
    with pytest.raises(ValueError, match="least: expected a finite number of at least 0 and of at most 1, got 2"):
        AdaKV(TOVA(), 2)
