"""Requests with a calibration in a batch give what they give alone, bit for bit; first tokens, groups, saves, tiers."""

import numpy as np
import pytest
from serving import GREEDY, Alone, Clock, prompts, repeating, run, same, sampled, settled
from tier_stores import SECRET, ObjectStore
from windowed_networks import Windowed

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine, SnapshotError
from kvcache.calibration.calibrating import measure
from kvcache.tiers import Tiers

pytestmark = pytest.mark.one_build


@pytest.fixture(scope="module")
def known(network):
    rng = np.random.default_rng(1)
    return measure(network, rng.integers(0, network.config.vocab_size, 120).astype(np.uint32))


def all_of(model, asked, blocks, **options):
    alone, engine = Alone(model, **options), BatchEngine(model, num_blocks=blocks, clock=Clock(), **options)
    assert engine.residual_length == alone.texts.cache.residual_length
    requests = [engine.submit(prompt, params) for prompt, params in asked]
    run(engine)
    for request, (prompt, params) in zip(requests, asked, strict=True):
        same(request.completions()[0], alone(prompt, params))
    settled(engine)
    return engine.stats()


@pytest.mark.parametrize(
    ("dtype", "length"), [("q8", None), ("q8", 0), *(("q4", length) for length in (0, 1, 12, 20, 64))]
)
def test_every_length_of_groups(network, known, dtype, length):
    """Requests that share prefixes, with guesses and preemptions."""
    asked = [(prompt, repeating(i, 40, logprobs=1)) for i, prompt in enumerate(prompts(12, 9, 90))]
    options = {"dtype": dtype, "residual_length": length, "calibrate": known}
    stats = all_of(network, asked, 14, **options)
    assert stats.preemptions > 0
    assert length in (None, 64) or stats.cached_tokens > 0
    all_of(network, asked, 90, block_size=6, **options)


def test_formats_of_layers(network, known):
    count = network.config.num_layers
    keys = [("q8", "q4", "q2")[layer % 3] for layer in range(count)]
    asked = [(prompt, sampled(i, 40, logprobs=1)) for i, prompt in enumerate(prompts(2, 10, 60))]
    all_of(network, asked, 40, key_dtype=keys, value_dtype="q4", calibrate=known)
    all_of(network, asked, 20, key_dtype=keys, value_dtype="q4", residual_length=0)


def test_first_tokens_that_run_in_pieces(network, known):
    """A budget of a few prompt tokens per step: the first tokens come one after another, and so do their groups."""
    asked = [(prompt, sampled(i, 6, logprobs=1)) for i, prompt in enumerate(prompts(5, 8, 120))]
    for length in (0, 16, 24):
        options = {"dtype": "q4", "residual_length": length, "calibrate": known}
        alone, engine = Alone(network, **options), BatchEngine(network, num_blocks=90, **options)
        budget, turn = engine._steps._scheduler.budget, iter(np.random.default_rng(3).integers(1, 40, 1000))
        budget.tokens = budget.least = lambda *_, turn=turn: int(next(turn))
        requests = [engine.submit(prompt, params) for prompt, params in asked]
        run(engine)
        for request, (prompt, params) in zip(requests, asked, strict=True):
            same(request.completions()[0], alone(prompt, params))
        settled(engine)


@pytest.mark.parametrize(("length", "calibrated"), [(0, True), (1, True), (12, False), (64, True)])
def test_as_many_texts_as_may_run(network, known, length, calibrated):
    """`check` sees after each step that f16 rows take no more memory than at the start."""
    asked = [(prompt, repeating(i, 20, logprobs=1)) for i, prompt in enumerate(prompts(7, 8, 200))]
    options = {"dtype": "q4", "residual_length": length, "calibrate": known if calibrated else False}
    alone, engine = Alone(network, **options), BatchEngine(network, num_blocks=200, max_running=3, **options)
    requests = [engine.submit(prompt, params, n=1 + i % 2) for i, (prompt, params) in enumerate(asked)]
    run(engine)
    for request, (prompt, params) in zip(requests, asked, strict=True):
        same(request.completions()[0], alone(prompt, params))
    settled(engine)


def test_a_prefix_whose_first_tokens_have_left_runs_again(network, known):
    engine = BatchEngine(network, num_blocks=200, dtype="q4", calibrate=known, max_running=1)  # of four texts
    alone = Alone(network, dtype="q4", calibrate=known)
    texts = [np.random.default_rng(i).integers(0, network.config.vocab_size, 100) for i in range(9)]
    for turn, prompt in enumerate([*texts, texts[0], texts[-1]]):
        request = engine.submit(prompt, GREEDY)
        run(engine)
        same(request.completions()[0], alone(prompt, GREEDY))
        assert request.completions()[0].cached_tokens == (64 if turn == 10 else 0)
    settled(engine)


def test_saves_and_tiers(network, known, tmp_path):
    text = np.random.default_rng(3).integers(0, network.config.vocab_size, 200)
    store = ObjectStore()

    def make(kind, calibrate=known, tiers=None):
        options = {"dtype": "q4", "calibrate": calibrate}
        if kind is BatchEngine:
            return BatchEngine(network, num_blocks=60, tiers=tiers, **options)
        return PrefixCachedEngine(InferenceEngine(network, **options), 60, strict=True, tiers=tiers)

    def answer(engine):
        """Its tokens, and how many of the prompt were cached."""
        if isinstance(engine, BatchEngine):
            request = engine.submit(text, GREEDY)
            run(engine)
            settled(engine)
            return request.result(), request.completions()[0].cached_tokens
        before = engine.inner.prefill_token_count
        return engine.generate(text, GREEDY), len(text) - engine.inner.prefill_token_count + before

    expected = InferenceEngine(network, dtype="q4", calibrate=known).generate(text, GREEDY)
    for source in (BatchEngine, PrefixCachedEngine):
        engine = make(source)
        assert answer(engine) == (expected, 0)
        engine.save(tmp_path / "file")
        for kind in (BatchEngine, PrefixCachedEngine):
            loaded = make(kind)
            assert loaded.load(tmp_path / "file") > 0
            tokens, cached = answer(loaded)
            assert tokens == expected
            assert cached >= 192
        with pytest.raises(SnapshotError, match="expected model"):
            make(BatchEngine, measure(network, text[:100].astype(np.uint32))).load(tmp_path / "file")
    first = make(BatchEngine, tiers=Tiers([store], secret=SECRET, after_uses=1))
    assert answer(first)[0] == expected
    first.tiers.close()
    for calibrate in (known, measure(network, text[:100].astype(np.uint32))):
        engine = make(BatchEngine, calibrate, Tiers([store], secret=SECRET, after_uses=1, head_start=5.0))
        alone = InferenceEngine(network, dtype="q4", calibrate=calibrate).generate(text, GREEDY)
        assert answer(engine)[0] == alone
        engine.tiers.close()


@pytest.mark.parametrize("sizes", [(40,), (24, 70)], ids=["beside layers that keep all", "windows alone"])
def test_layers_with_a_window_have_feedback(network, known, sizes):
    asked = [(prompt, sampled(i, 40, logprobs=1)) for i, prompt in enumerate(prompts(3, 6, 60))]
    all_of(Windowed(network, *sizes), asked, 60, dtype="q4", calibrate=known)
