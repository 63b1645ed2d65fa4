"""Texts that cross into another regime of position embedding (longrope): every result is that of a cold run."""

import numpy as np
import pytest
from places import GOLDEN

from kvcache import EvictionPolicy
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer
from kvcache.errors import InvalidOperationError


@pytest.fixture(scope="module")
def model():
    return Transformer.from_pretrained(GOLDEN / "phi3_longrope")


@pytest.fixture(scope="module")
def border(model):
    """The most tokens of a text of the first regime."""
    positions = range(1, model.config.max_position_embeddings + 1)
    return max(count for count in positions if model.regime(count) == 0)


def prompt(model, n, seed=0):
    return np.random.default_rng(seed).integers(3, model.config.vocab_size, n).astype(np.uint32)


def cold(model, tokens):
    """The logits after `tokens`, in one piece."""
    return InferenceEngine(model, num_blocks=40, prefill_chunk=512).prefill_from_pos(tokens, 0)


def same_bits(a, b):
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def greedy(n):
    return SamplingParams(temperature=0.0, max_tokens=n)


def test_the_regimes_differ(model, border):
    assert model.regime(border + 1) == 1
    assert border + 40 <= model.config.max_position_embeddings
    tokens = prompt(model, border)
    engine = InferenceEngine(model, num_blocks=40)
    first = engine._sequence.extend(tokens, 0, "last")
    second = engine._sequence.extend(tokens, 0, "last", border + 1)
    assert np.abs(first - second).max() > 1e-3


def test_any_pieces_give_the_bits_of_a_cold_run(model, border, rng):
    tokens = prompt(model, border + 30)
    for _ in range(5):
        engine = InferenceEngine(model, num_blocks=40, prefill_chunk=int(rng.integers(5, 100)))
        cuts = np.unique(np.r_[rng.integers(1, len(tokens), 4), border - 1, border, border + 1])
        for piece in np.split(np.arange(len(tokens)), cuts):
            logits = engine.prefill_from_pos(tokens[piece], int(piece[0]))
            same_bits(logits, cold(model, tokens[: piece[-1] + 1]))
            engine.check()


def test_decode_steps_across_the_border_and_back(model, border):
    tokens = prompt(model, border + 8, seed=1)
    engine = InferenceEngine(model, num_blocks=40)
    engine.prefill_from_pos(tokens[: border - 4], 0)
    for pos in range(border - 4, border + 8):
        same_bits(engine.decode_step(int(tokens[pos]), pos), cold(model, tokens[: pos + 1]))
    same_bits(engine.prefill_from_pos(tokens[:3], border - 6), cold(model, np.r_[tokens[: border - 6], tokens[:3]]))


def test_a_generated_text_that_crosses_is_that_of_cold_runs(model, border):
    text = prompt(model, border - 5, seed=2)
    for token in InferenceEngine(model, num_blocks=40).generate(text, greedy(12)):
        assert token == int(cold(model, text).argmax())
        text = np.r_[text, np.uint32(token)]


def test_scores_are_of_the_regime_of_the_whole_text(model, border):
    tokens = prompt(model, border + 20, seed=3)
    engine = InferenceEngine(model, num_blocks=40, prefill_chunk=16)
    whole = InferenceEngine(model, num_blocks=40, prefill_chunk=512)
    np.testing.assert_allclose(engine.score(tokens), whole.score(tokens), atol=1e-6)
    assert np.abs(engine.score(tokens)[: border - 2] - engine.score(tokens[: border - 1])).max() > 1e-4


def test_a_failing_step_across_the_border_changes_nothing(model, border):
    tokens = prompt(model, border + 1, seed=4)
    engine = InferenceEngine(model, num_blocks=2 * (border // 16 + 1))
    engine.prefill_from_pos(tokens[:-1], 0)
    forward = model.forward

    def failing(*args, **more):
        raise InterruptedError

    try:
        model.forward = failing
        with pytest.raises(InterruptedError):
            engine.decode_step(int(tokens[-1]), border)
    finally:
        model.forward = forward
    engine.check()
    assert engine.num_tokens == border
    same_bits(engine.prefill_from_pos(tokens[-3:-1], border - 2), cold(model, tokens[:-1]))
    same_bits(engine.decode_step(int(tokens[-1]), border), cold(model, tokens))


def test_room_for_one_text_is_enough_to_cross(model, border):
    tokens = prompt(model, border + 1, seed=6)
    engine = InferenceEngine(model, num_blocks=border // 16 + 1)
    engine.prefill_from_pos(tokens[:-1], 0)
    same_bits(engine.decode_step(int(tokens[-1]), border), cold(model, tokens))


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_cached_prefixes_serve_their_own_regime(model, border, dtype):
    cached = PrefixCachedEngine(InferenceEngine(model, dtype=dtype, num_blocks=40), 200, strict=True)
    text = prompt(model, border + 40, seed=5)
    for stop in (border - 40, border - 3, border + 30, border - 20, border + 40, 50):
        answer = cached.generate(text[:stop], greedy(8))
        assert answer == InferenceEngine(model, dtype=dtype, num_blocks=40).generate(text[:stop], greedy(8))
        cached.check()
    found = cached.complete(text[: border + 35], greedy(1)).cached_tokens
    assert found >= (border + 30) // 16 * 16
    assert cached.complete(text[: border - 3], greedy(1)).cached_tokens >= (border - 20) // 16 * 16


def test_a_sequence_of_unknown_tokens_cannot_be_extended(model):
    engine = InferenceEngine(model, num_blocks=40)

    def share(cache, seq_id):
        cache.allocate(seq_id, 10)
        return 10

    engine.begin(share)
    with pytest.raises(InvalidOperationError, match="pos: expected 0, since positions of this network depend"):
        engine.decode_step(3, 10)
    engine.prefill_from_pos(prompt(model, 10), 0)


def test_eviction_is_refused(model):
    with pytest.raises(ValueError, match="eviction_policy: expected none with positions"):
        InferenceEngine(model, eviction_policy=EvictionPolicy.H2O(), kv_budget=30)


@pytest.mark.parametrize(("blocks", "left"), [(6, 0), (10, 64)])
def test_a_failing_pass_across_the_border(model, border, blocks, left):
    """The text is as it was where the cache holds it twice, else empty; either way it can be computed again."""
    failing = Failing(model)
    engine = InferenceEngine(failing, num_blocks=blocks)
    tokens = prompt(model, border + 1)
    engine.prefill_from_pos(tokens[:border], 0)
    failing.fails = True
    with pytest.raises(ArithmeticError):
        engine.decode_step(tokens[border], border)
    failing.fails = False
    assert (border, engine.num_tokens) == (64, left)
    engine.check()
    same_bits(engine.prefill_from_pos(tokens[left:], left), cold(model, tokens))
    engine.check()


class Failing:
    def __init__(self, model):
        self.model, self.config, self.regime, self.fails = model, model.config, model.regime, False

    def forward(self, *args, **options):
        if self.fails:
            raise ArithmeticError
        return self.model.forward(*args, **options)
