"""Sampling: the distribution of the tokens, step by step, and refused settings."""

from __future__ import annotations

import itertools
import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_engine import sampling_distribution

from kvcache.engine import SamplingParams
from kvcache.engine.sampling import Sampler, _top_k

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0)
# Ties at the top and at the border of top_k 4, both signs, and one token with probability 0.
LOGITS = np.array([1.5, -0.5, 2.0, 2.0, 0.25, 1.0, 1.0, -2.0, 0.0, 1.0, -np.inf, 0.75], np.float32)
HISTORY = np.array([2, 7, 2, 4], np.uint32)


def settings_of(params):
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "repetition_penalty": params.repetition_penalty,
    }


def draw(params, logits, history, count, seed=0):
    """`count` draws at the same step, all with one sampler, which is faster than a new one each time."""
    sampler = Sampler(params, np.random.default_rng(seed), len(logits), history)
    seen = sampler._seen.copy()
    tokens = np.empty(count, np.int64)
    for i in range(count):
        sampler._seen[:] = seen
        tokens[i] = sampler.sample(logits)
    return tokens


def chi_square_tail(statistic, freedom):
    """P(chi-square with `freedom` degrees > statistic), by the series of the lower incomplete gamma function."""
    a, x = freedom / 2, statistic / 2
    if x <= 0:
        return 1.0
    term = total = 1 / a
    for n in range(1, 1000):
        term *= x / (a + n)
        total += term
    return 1 - total * math.exp(a * math.log(x) - x - math.lgamma(a))


def test_chi_square_tail_on_tabled_values():
    assert chi_square_tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-4)
    assert chi_square_tail(29.588, 10) == pytest.approx(0.001, abs=1e-5)


def assert_drawn_from(probabilities, tokens):
    """Chi-square test at 1 in 10 000, with rare tokens counted together. Tokens of probability 0 are never drawn."""
    probabilities = np.array(probabilities)
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), np.flatnonzero(counts * (probabilities == 0))
    expected = probabilities * len(tokens)
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) > 1:
        statistic = float(((observed - expected) ** 2 / expected).sum())
        assert chi_square_tail(statistic, len(expected) - 1) > 1e-4, (observed, expected)


COMBINATIONS = list(itertools.product((0.4, 2.5), (0, 1, 4, 5, 50), (0.05, 0.6, 1.0), (0.8, 1.0, 1.7)))


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "penalty"), COMBINATIONS)
def test_distribution(temperature, top_k, top_p, penalty):
    params = SamplingParams(temperature, top_k, top_p, penalty)
    tokens = draw(params, LOGITS, HISTORY, 1500, seed=COMBINATIONS.index((temperature, top_k, top_p, penalty)))
    assert_drawn_from(sampling_distribution(LOGITS, HISTORY, **settings_of(params)), tokens)


def test_distribution_closely():
    """Few settings with many draws, which would reveal an error of a percent."""
    for seed, params in enumerate([PLAIN, SamplingParams(), replace(PLAIN, temperature=1.7, top_p=0.8)]):
        tokens = draw(params, LOGITS, HISTORY, 30_000, seed)
        assert_drawn_from(sampling_distribution(LOGITS, HISTORY, **settings_of(params)), tokens)


def test_the_chi_square_test_has_power():
    """Leaving out any step changes the distribution by more than the test accepts."""
    params = SamplingParams(temperature=0.8, top_k=8, top_p=0.9, repetition_penalty=1.3)
    tokens = draw(params, LOGITS, HISTORY, 1500)
    right = settings_of(params)
    for change in ({"temperature": 1.0}, {"top_k": 4}, {"top_p": 1.0}, {"repetition_penalty": 1.0}):
        with pytest.raises(AssertionError):
            assert_drawn_from(sampling_distribution(LOGITS, HISTORY, **(right | change)), tokens)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5001, 1.0, 4.0, -math.inf]), min_size=1, max_size=40).filter(
        lambda logits: max(logits) > -math.inf
    ),
    st.floats(0.05, 5.0),
    st.integers(0, 45),
    st.floats(0.01, 1.0),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 2**32),
)
def test_only_possible_tokens(logits, temperature, top_k, top_p, penalty, seed):
    params = SamplingParams(temperature, top_k, top_p, penalty)
    history = np.arange(0, len(logits), 3, dtype=np.uint32)
    probabilities = sampling_distribution(logits, history, **settings_of(params))
    for token in draw(params, np.array(logits, np.float32), history, 5, seed):
        assert probabilities[token] > 0


def test_large_vocabulary():
    """The nucleus is the same when the tail is not sorted."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal(20_000) * 3).astype(np.float32)
    params = replace(PLAIN, top_p=0.9)
    probabilities = np.array(sampling_distribution(logits, [], **settings_of(params)))
    tokens = draw(params, logits, [], 600)
    assert (probabilities[tokens] > 0).all()
    assert len(np.unique(tokens)) > 100
    likely = np.argsort(-probabilities)[:20]
    share = probabilities[likely].sum()
    assert np.isin(tokens, likely).mean() == pytest.approx(share, abs=5 * math.sqrt(share / 600))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 640, 1000])
@pytest.mark.parametrize("levels", [2, 30, 10**6])
def test_top_k_against_sorting(size, levels):
    """Sizes around the size of a group; few different values make ties at every border."""
    logits = np.random.default_rng(size).integers(0, levels, size).astype(np.float32)
    ranked = np.lexsort((np.arange(size), -logits))
    for k in (0, 1, 2, 9, 10, 11, 15, 16, 64, max(size - 1, 1), size, size + 1):
        kept = _top_k(logits, k)
        if k == 0 or k >= size:
            assert kept is None
        else:
            np.testing.assert_array_equal(kept, np.sort(ranked[:k]))


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 9.9e-7])
def test_greedy_takes_the_lowest_of_equals(temperature):
    params = replace(PLAIN, temperature=temperature)
    assert set(draw(params, LOGITS, [], 20)) == {2}
    assert set(draw(params, np.zeros(7, np.float32), [], 20)) == {0}


def test_greedy_applies_the_penalty():
    params = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    sampler = Sampler(params, np.random.default_rng(0), len(LOGITS), np.array([], np.uint32))
    assert [sampler.sample(LOGITS) for _ in range(4)] == [2, 3, 2, 2]


def test_penalty_counts_the_prompt_and_every_draw_once():
    params = SamplingParams(temperature=0.0, repetition_penalty=3.0)
    logits = np.array([3.0, 2.0, 1.5, -1.0], np.float32)
    sampler = Sampler(params, np.random.default_rng(0), 4, np.array([0, 0, 0], np.uint32))
    # Token 0 counts 1.0 however often it occurred; then 1 counts 2/3 and 2 counts 0.5.
    assert [sampler.sample(logits) for _ in range(5)] == [1, 2, 0, 0, 0]


def test_penalty_makes_negative_logits_less_likely():
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    sampler = Sampler(params, np.random.default_rng(0), 2, np.array([1], np.uint32))
    assert sampler.sample(np.array([-1.5, -1.0], np.float32)) == 0


def test_logits_are_not_changed():
    before = LOGITS.copy()
    draw(SamplingParams(), LOGITS, HISTORY, 3)
    np.testing.assert_array_equal(LOGITS, before)


def test_tiny_and_huge_temperatures():
    assert set(draw(replace(PLAIN, temperature=1e-5), LOGITS, [2], 50)) == {2, 3}
    assert_drawn_from(
        [1 / 11 if x > -np.inf else 0 for x in LOGITS], draw(replace(PLAIN, temperature=1e30), LOGITS, [], 3000)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [PLAIN, SamplingParams(), SamplingParams(temperature=0.0)])
def test_logits_without_a_largest(bad, params):
    logits = LOGITS.copy()
    logits[5] = bad
    with pytest.raises(ValueError, match="at token 5"):
        draw(params, logits, [], 1)
    with pytest.raises(ValueError, match="finite maximum"):
        draw(params, np.full(4, -np.inf, np.float32), [], 1)


def test_defaults():
    params = SamplingParams()
    assert settings_of(params) == {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
    assert (params.max_tokens, params.seed, params.stop_token_ids) == (128, None, ())
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3


def test_numpy_numbers_and_any_iterable():
    params = SamplingParams(np.float32(0.5), np.int64(3), seed=np.uint8(7), stop_token_ids=np.array([1, 2]))
    assert params == SamplingParams(0.5, 3, seed=7, stop_token_ids=[1, 2])
    assert hash(params) == hash(SamplingParams(0.5, 3, seed=7, stop_token_ids={1, 2}))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("temperature", -0.1, ValueError),
        ("temperature", math.nan, ValueError),
        ("temperature", math.inf, ValueError),
        ("temperature", "1", TypeError),
        ("temperature", None, TypeError),
        ("top_k", -1, ValueError),
        ("top_k", 2.0, TypeError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.1, ValueError),
        ("top_p", math.nan, ValueError),
        ("repetition_penalty", 0, ValueError),
        ("repetition_penalty", -1, ValueError),
        ("max_tokens", -1, ValueError),
        ("max_tokens", None, TypeError),
        ("seed", -1, ValueError),
        ("seed", 1.5, TypeError),
        ("stop_token_ids", 3, TypeError),
        ("stop_token_ids", (1.5,), TypeError),
        ("stop_token_ids", (-1,), ValueError),
    ],
)
def test_refused_settings(name, value, error):
    with pytest.raises(error, match=name):
        SamplingParams(**{name: value})
