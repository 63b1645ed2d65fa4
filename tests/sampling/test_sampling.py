"""Sampling: the distribution of the tokens, step by step, and refused settings."""

from __future__ import annotations

import itertools
import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.engine import sampling_distribution

from kvcache.engine import SamplingParams
from kvcache.grammar import regex
from kvcache.kernels.functions import UNIT, shares
from kvcache.sampling.sampling import Sampler, _top_k

pytestmark = pytest.mark.one_build
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
        "min_p": params.min_p,
        "logit_bias": params.logit_bias,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }


def draw(params, logits, history, count, seed=0, num_drawn=0):
    """`count` draws at the same step, all with one sampler, which is faster than a new one each time."""
    sampler = Sampler(params, np.random.default_rng(seed), len(logits), np.array(history, np.uint32), num_drawn)
    seen, drawn = sampler._seen.copy(), sampler._drawn.copy()
    tokens = np.empty(count, np.int64)
    for i in range(count):
        sampler._seen[:], sampler._drawn = seen, drawn.copy()
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


BIASED = ((0, 1.5), (2, -math.inf), (10, 9.0))
COMBINATIONS = list(itertools.product((0.4, 2.5), (0, 1, 4, 5, 50), (0.05, 0.6, 1.0), (0.8, 1.0, 1.7)))


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "penalty"), COMBINATIONS)
def test_distribution(temperature, top_k, top_p, penalty):
    params = SamplingParams(temperature, top_k, top_p, penalty)
    tokens = draw(params, LOGITS, HISTORY, 1500, seed=COMBINATIONS.index((temperature, top_k, top_p, penalty)))
    assert_drawn_from(sampling_distribution(LOGITS, HISTORY, **settings_of(params)), tokens)


@pytest.mark.parametrize("min_p", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.4, 5, 1.0), (2.5, 0, 0.7)])
@pytest.mark.parametrize("logit_bias", [(), BIASED])
def test_distribution_with_min_p_and_biases(temperature, top_k, top_p, min_p, logit_bias):
    params = SamplingParams(temperature, top_k, top_p, 1.2, min_p=min_p, logit_bias=logit_bias)
    tokens = draw(params, LOGITS, HISTORY, 1500, seed=int(100 * (temperature + min_p)) + top_k)
    assert_drawn_from(sampling_distribution(LOGITS, HISTORY, **settings_of(params)), tokens)


@pytest.mark.parametrize(("presence", "frequency"), [(0.0, 0.7), (1.3, 0.0), (-2.0, 0.4), (0.5, -1.5), (2.0, 2.0)])
@pytest.mark.parametrize("num_drawn", [0, 3, 4])
def test_distribution_with_penalties_of_what_was_drawn(presence, frequency, num_drawn):
    params = SamplingParams(
        0.9, 8, 0.95, 1.2, logit_bias=BIASED[:1], presence_penalty=presence, frequency_penalty=frequency
    )
    tokens = draw(params, LOGITS, HISTORY, 1500, seed=int(10 * (presence + frequency) + 50), num_drawn=num_drawn)
    wanted = sampling_distribution(LOGITS, HISTORY, **settings_of(params), num_drawn=num_drawn)
    assert_drawn_from(wanted, tokens)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=6), st.integers(-8, 8), st.integers(-8, 8),
    st.sampled_from([1.0, 2.0]), st.lists(st.integers(0, 1), max_size=3), st.integers(0, 20),
)
def test_texts_under_penalties(logits, presence, frequency, repetition, prompt, resumed_at):
    """Greedy texts over the same logits are those of the twin, also of a sampler that continues in the middle."""
    params = SamplingParams(
        0.0, repetition_penalty=repetition, presence_penalty=presence / 4, frequency_penalty=frequency / 4
    )
    row, text = np.array(logits, np.float32) / 4, [*prompt]
    sampler = Sampler(params, np.random.default_rng(0), len(row), np.array(prompt, np.uint32))
    for number in range(24):
        if number == resumed_at:
            sampler = sampler.resumed(np.array(text, np.uint32), number)
        wanted = sampling_distribution(row, text, **settings_of(params), num_drawn=number).index(1.0)
        assert sampler.sample(row) == wanted
        text.append(wanted)


@pytest.mark.exhaustive
def test_distribution_closely():
    """Few settings with many draws, which would reveal an error of two percent."""
    for seed, params in enumerate([PLAIN, SamplingParams(), replace(PLAIN, temperature=1.7, top_p=0.8)]):
        tokens = draw(params, LOGITS, HISTORY, 15_000, seed)
        assert_drawn_from(sampling_distribution(LOGITS, HISTORY, **settings_of(params)), tokens)


def test_the_chi_square_test_has_power():
    """Leaving out any step changes the distribution by more than the test accepts."""
    nucleus = SamplingParams(temperature=0.8, top_k=8, top_p=0.9, repetition_penalty=1.3)
    likely = SamplingParams(0.8, 0, 1.0, 1.0, min_p=0.25, logit_bias={5: 0.8})
    rarely = SamplingParams(0.8, 0, 1.0, 1.0, presence_penalty=0.8, frequency_penalty=0.8)
    for params, changes in (
        (nucleus, {"temperature": 1.0, "top_k": 4, "top_p": 1.0, "repetition_penalty": 1.0}),
        (likely, {"temperature": 1.0, "min_p": 0.0, "logit_bias": ()}),
        (rarely, {"presence_penalty": 0.0, "frequency_penalty": 0.0, "num_drawn": 0}),
    ):
        tokens = draw(params, LOGITS, HISTORY, 1500, num_drawn=4)
        for name, value in changes.items():
            with pytest.raises(AssertionError):
                assert_drawn_from(
                    sampling_distribution(
                        LOGITS, HISTORY, **(settings_of(params) | {"num_drawn": 4} | {name: value})
                    ), tokens
                )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5001, 1.0, 4.0, -math.inf]), min_size=1, max_size=40).filter(
        lambda logits: max(logits) > -math.inf
    ),
    st.floats(0.05, 5.0),
    st.integers(0, 45),
    st.floats(0.01, 1.0),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.floats(0.0, 1.0),
    st.integers(0, 2**32),
)
def test_only_possible_tokens(logits, temperature, top_k, top_p, penalty, min_p, seed):
    params = SamplingParams(temperature, top_k, top_p, penalty, min_p=min_p)
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


@pytest.mark.parametrize("allowed", [1, 5, 39, 40, 41, 3000])
def test_top_k_where_few_tokens_may_follow(allowed):
    """It keeps those that may, at most k of them, and no others."""
    rng = np.random.default_rng(allowed)
    logits, tokens = np.full(20_000, -np.inf, np.float32), rng.choice(20_000, allowed, replace=False)
    logits[tokens] = rng.integers(-9, 9, allowed)
    want = sorted(sorted(tokens, key=lambda token: (-logits[token], token))[:40])
    assert _top_k(logits, 40).tolist() == want


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


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_the_largest_biases_and_penalties_leave_a_largest_logit(penalty):
    biases = dict.fromkeys(range(len(LOGITS)), -1e30) | {3: 1e30}
    params = SamplingParams(temperature=1.0, repetition_penalty=penalty, logit_bias=biases)
    with np.errstate(over="raise", invalid="raise"):
        assert set(draw(params, np.full(len(LOGITS), -9.0, np.float32), range(len(LOGITS)), 9)) == {3}


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


def sampler_of(params, history=()):
    return Sampler(params, np.random.default_rng(0), len(LOGITS), np.array(history, np.uint32))


def test_a_processor_gets_the_text_and_logits_of_its_own():
    calls = []

    def only_odd(tokens, logits):
        calls.append(tokens.tolist())
        assert tokens.dtype == np.uint32
        assert not tokens.flags.writeable
        logits[::2] = -np.inf

    sampler = sampler_of(SamplingParams(temperature=0.0, repetition_penalty=100.0, logits_processor=only_odd), [3, 3])
    drawn = [sampler.sample(LOGITS) for _ in range(70)]
    assert drawn[:4] == [5, 9, 11, 3]
    assert calls == [[3, 3, *drawn[:i]] for i in range(70)]
    assert LOGITS[2] == 2.0


def test_a_processor_may_return_logits():
    processor = SamplingParams(temperature=0.0, logits_processor=lambda tokens, logits: [-x for x in logits.tolist()])
    with pytest.raises(ValueError, match="finite maximum, got inf at token 10"):
        sampler_of(processor).sample(LOGITS)
    negate = SamplingParams(temperature=0.0, logits_processor=lambda tokens, logits: -np.maximum(logits, -9.0))
    assert sampler_of(negate).sample(LOGITS) == 10


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (np.zeros(3, np.float32), ValueError, r"logits_processor: expected shape \(12\), got \(3,\)"),
        ("what", TypeError, "logits_processor: expected a float dtype"),
        (0.0, ValueError, r"logits_processor: expected shape \(12\), got \(\)"),
    ],
)
def test_what_a_processor_must_not_return(result, error, message):
    sampler = sampler_of(SamplingParams(logits_processor=lambda tokens, logits: result))
    with pytest.raises(error, match=message):
        sampler.sample(LOGITS)


def test_steps_before_the_penalty_come_in_their_order():
    seen = []
    params = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, logit_bias={1: 5.0}, logits_processor=lambda _, x: seen.append(x[1])
    )
    # Token 1 has -0.5 + 5, halved by the penalty to 2.25, and then is the largest; without the bias 2 would be.
    assert sampler_of(params, [1, 2]).sample(LOGITS) == 1
    assert seen == [-0.5]


def test_defaults():
    params = SamplingParams()
    off = {"repetition_penalty": 1.0, "min_p": 0.0, "logit_bias": (), "presence_penalty": 0, "frequency_penalty": 0}
    assert settings_of(params) == {"temperature": 0.7, "top_k": 40, "top_p": 0.9} | off
    assert (params.max_tokens, params.seed, params.stop_token_ids, params.stop) == (128, None, (), ())
    assert (params.logprobs, params.logits_processor) == (None, None)
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3


def test_numpy_numbers_and_any_iterable():
    params = SamplingParams(np.float32(0.5), np.int64(3), seed=np.uint8(7), stop_token_ids=np.array([1, 2]))
    assert params == SamplingParams(0.5, 3, seed=7, stop_token_ids=[1, 2])
    assert hash(params) == hash(SamplingParams(0.5, 3, seed=7, stop_token_ids={1, 2}))
    assert SamplingParams(stop="end") == SamplingParams(stop=["end"])
    biased = SamplingParams(logit_bias={np.int64(3): np.float32(0.5), 1: -math.inf})
    assert biased == SamplingParams(logit_bias=[(3, 0.5), (1, -math.inf)]) == replace(biased)
    assert hash(biased) == hash(replace(biased))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("temperature", -0.1, ValueError),
        ("temperature", math.nan, ValueError),
        ("temperature", math.inf, ValueError),
        ("temperature", "1", TypeError),
        ("temperature", None, TypeError),
        ("top_k", -2, ValueError),
        ("top_k", 2.0, TypeError),
        ("top_p", -0.1, ValueError),
        ("top_p", 1.1, ValueError),
        ("top_p", math.nan, ValueError),
        ("repetition_penalty", 0, ValueError),
        ("repetition_penalty", -1, ValueError),
        ("repetition_penalty", 1e-38, ValueError),
        ("repetition_penalty", 1e39, ValueError),
        ("presence_penalty", -2.1, ValueError),
        ("presence_penalty", math.nan, ValueError),
        ("frequency_penalty", 2.1, ValueError),
        ("frequency_penalty", "1", TypeError),
        ("max_tokens", -1, ValueError),
        ("max_tokens", None, TypeError),
        ("seed", -(2**63) - 1, ValueError),
        ("seed", 1.5, TypeError),
        ("stop_token_ids", 3, TypeError),
        ("stop_token_ids", (1.5,), TypeError),
        ("stop_token_ids", (-1,), ValueError),
        ("min_p", -0.1, ValueError),
        ("min_p", 1.1, ValueError),
        ("min_p", math.nan, ValueError),
        ("logit_bias", {1: math.inf}, ValueError),
        ("logit_bias", {1: math.nan}, ValueError),
        ("logit_bias", {1: 1e39}, ValueError),
        ("logit_bias", {1: -1e39}, ValueError),
        ("logit_bias", {1: "x"}, TypeError),
        ("logit_bias", {-1: 0.0}, ValueError),
        ("logit_bias", {"a": 0.0}, TypeError),
        ("logit_bias", 3, TypeError),
        ("logit_bias", [1, 2], TypeError),
        ("stop", "", ValueError),
        ("stop", ["a", ""], ValueError),
        ("stop", [1], TypeError),
        ("stop", 1, TypeError),
        ("logprobs", -1, ValueError),
        ("logprobs", True, TypeError),
        ("logits_processor", 1, TypeError),
    ],
)
def test_refused_settings(name, value, error):
    with pytest.raises(error, match=name):
        SamplingParams(**{name: value})


def test_a_top_p_of_zero_takes_the_most_likely_token():
    logits = np.array([0.0, 3.0, 2.9, 3.0], np.float32)
    for temperature in (1e-3, 1.0, 1e30):  # with the last one all tokens are equally likely
        params = SamplingParams(top_p=0, temperature=temperature, top_k=0)
        sampler = Sampler(params, np.random.default_rng(1), 4, HISTORY[:0])
        assert [sampler.sample(logits) for _ in range(8)] == [1] * 8


def test_settings_about_the_end_of_a_text():
    with pytest.raises(ValueError, match="min_tokens: expected at most max_tokens, 3, got 4"):
        SamplingParams(max_tokens=3, min_tokens=4)
    for wrong in ({"ignore_eos": True}, {"min_tokens": 1}):
        with pytest.raises(ValueError, match="expected none with a grammar, got"):
            SamplingParams(grammar=regex("a"), **wrong)


def test_random_numbers_are_those_of_the_specification():
    """PCG64 of a seed or of a pair of them: the upper 53 of its 64 bits, one number for each drawn token."""
    wanted = {
        0: [5737240835340368, 2430022687152954, 369056694262205, 148867706415198],
        7: [5630359420943529, 8081383479436493, 6986755571089759, 2028486033845572],
        (3, 5): [1231044688790586, 7960113342173212, 8093958544174986, 5203237945318670],
    }
    for seed, numbers in wanted.items():
        sampler = Sampler(PLAIN, np.random.Generator(np.random.PCG64(seed)), 4, HISTORY[:0])
        assert [sampler._bits() for _ in range(4)] == numbers
    even = np.zeros(1000, np.float32)  # all weights are equal: a number chooses its thousandth
    sampler = Sampler(PLAIN, np.random.Generator(np.random.PCG64(7)), 1000, HISTORY[:0])
    drawn = [sampler.sample(even) for _ in range(4)]
    assert drawn == [number * 1000 >> 53 for number in wanted[7]]
    resumed = sampler.resumed(np.array(drawn[:2], np.uint32), 2)
    assert [resumed.sample(even) for _ in range(2)] == drawn[2:]


def test_borders_of_top_p_and_min_p_are_exact():
    """Halves and quarters of the weight are no matter of rounding."""
    quarters = np.zeros(4, np.float32)
    for p, count in ((0.25, 1), (0.25 + 2**-40, 2), (0.5, 2), (0.75, 3), (1 - 2**-53, 4), (2**-1074, 1)):
        params = replace(PLAIN, top_p=p)
        assert set(draw(params, quarters, [], 200)) == set(range(count)), p
    halved = np.array([0.0, 0.0, -1.0], np.float32)
    weight = int(shares(halved)[0][2])
    for numerator, kept in ((weight, {0, 1, 2}), (weight + 1, {0, 1})):
        assert set(draw(replace(PLAIN, min_p=numerator / UNIT), halved, [], 300)) == kept
