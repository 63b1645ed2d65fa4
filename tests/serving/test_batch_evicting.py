"""Requests that evict tokens, at once: each gives what an `InferenceEngine` of the same policy gives it alone."""

from contextlib import suppress
from itertools import cycle

import numpy as np
import pytest
from engines import Failing
from pace import FAST
from places import GOLDEN
from serving import Alone, prompts, run, same, sampled
from subjects.interrupts import Lines, places
from tier_stores import GIVEN
from windowed_networks import Windowed

from kvcache import BatchEngine, EvictionPolicy, InferenceEngine, InvalidOperationError, SamplingParams
from kvcache.calibration.calibrating import measure
from kvcache.engine import Policy, Transformer
from kvcache.engine import requests as single
from kvcache.serving import batch as batches
from kvcache.serving.request import Pending
from kvcache.serving.work import Scoring
from kvcache.tiers import DirectoryTier, Tiers

pytestmark = pytest.mark.one_build


class Every:
    """A policy in Python: the newest tokens, and every third of the others."""

    def keep(self, layer, scores, positions, budget):
        order = np.argsort([(p % 3 == 0) * 1000 + p for p in positions])
        return np.sort(order[-budget:])


class Uneven(Policy):
    """A policy per head: head 0 keeps what all tokens say, up to half of the budget of both, and head 1 the rest."""

    score_queries, per_head, reads_values, reads_queries = 5, True, True, 3

    def keep(self, layer, scores, positions, budget, values, queries):
        few, rows = max(1, budget // 2), zip(scores, values, queries, strict=True)
        worth = [row + np.abs(value).sum(axis=1) + last[-1].max() for row, value, last in rows]
        counts = [few, *[budget] * (len(scores) - 2), 2 * budget - few]
        return [np.sort(np.argsort(-row, kind="stable")[:n]) for row, n in zip(worth, counts, strict=True)]


POLICIES = {
    "h2o": {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 20},
    "window": {"eviction_policy": EvictionPolicy.SlidingWindow(24, 2)},
    "pyramid": {"eviction_policy": EvictionPolicy.PyramidKV(2), "kv_budget": 20},
    "streaming": {"eviction_policy": EvictionPolicy.StreamingLLM(4, 16)},
    "python": {"eviction_policy": Every(), "kv_budget": 18},
    "heads": {"eviction_policy": Uneven(), "kv_budget": 18},
}
LONG = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=300)


def gone(engine):
    engine.check()
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.claimed_blocks) == (0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*zip(POLICIES, cycle(["f32", "q8", "q4"])), *zip(POLICIES, cycle(["q4", "f32", "q8"]))]
)
def test_every_policy(network, kind, dtype):
    """Prompts of one piece and of several, and samples; more requests than may run."""
    alone = Alone(network, dtype=dtype, **POLICIES[kind])
    engine = BatchEngine(network, dtype=dtype, max_running=5, **POLICIES[kind])
    asked = [(prompt, sampled(i, 16, logprobs=1)) for i, prompt in enumerate(prompts(21, 7, 90))]
    rng = np.random.default_rng(3)
    longest = 700 if kind == "streaming" else network.config.max_position_embeddings - 8
    asked.append((rng.integers(0, 250, longest).astype(np.uint32), sampled(1, 6, logprobs=1)))
    requests = [engine.submit(*each) for each in asked]
    several = engine.submit(asked[0][0], sampled(40, 12, logprobs=1), n=3)
    assert run(engine) < 200
    for request, each in zip(requests, asked, strict=True):
        same(request.completions()[0], alone(*each))
    for i, got in enumerate(several.completions()):
        same(got, alone(asked[0][0], sampled(40 + i, 12, logprobs=1)))
    assert engine.stats().draft_tokens == engine.stats().preemptions == 0
    gone(engine)


@pytest.mark.parametrize("dtype", ["q8", "q2"])
@pytest.mark.parametrize("kind", POLICIES)
def test_a_calibration(network, kind, dtype):
    """Each text has a cache of its own; all have the calibration of the engine, and a residual where that may be."""
    known = measure(network, np.random.default_rng(5).integers(0, 250, 200).astype(np.uint32))
    options = {"dtype": dtype, "calibrate": known, **POLICIES[kind]}
    if kind != "streaming":
        options["residual_length"] = 8
    alone, engine = Alone(network, **options), BatchEngine(network, max_running=3, **options)
    asked = [(prompt, sampled(i, 12, logprobs=1)) for i, prompt in enumerate(prompts(21, 5, 90))]
    requests = [engine.submit(*each) for each in asked]
    run(engine)
    for request, each in zip(requests, asked, strict=True):
        same(request.completions()[0], alone(*each))
    gone(engine)
    plain = Alone(network, **options | {"calibrate": False})
    assert any(plain(*each).logprobs != alone(*each).logprobs for each in asked)


@pytest.mark.parametrize("kind", POLICIES)
def test_scores(network, kind, monkeypatch):
    """Texts of one piece and of several, beside one that is written, also where a step has few rows of logits."""
    rng = np.random.default_rng(5)
    longest = 1200 if kind == "streaming" else network.config.max_position_embeddings - 8
    texts = [*prompts(23, 9, 90), *(rng.integers(0, 250, n).astype(np.uint32) for n in (longest, 1, 2, 46))]
    for floats in (single.SCORE_FLOATS, 45 * network.config.vocab_size):
        for module in (single, batches):
            monkeypatch.setattr(module, "SCORE_FLOATS", floats)
        alone = InferenceEngine(network, dtype="q8", **POLICIES[kind])
        engine = BatchEngine(network, dtype="q8", max_running=5, **POLICIES[kind])
        written = engine.submit(texts[0], sampled(1, 20))
        for text, scores in zip(texts, engine.score_batch(texts, progress=False), strict=True):
            assert scores.tobytes() == alone.score(text).tobytes()
        run(engine)
        assert written.result() == alone.generate(texts[0], sampled(1, 20))
        gone(engine)


def test_a_text_without_end(network):
    """A text under StreamingLLM grows past the network's positions, beside others."""
    options = POLICIES["streaming"]
    endless = SamplingParams(temperature=0.0, max_tokens=network.config.max_position_embeddings + 50)
    engine = BatchEngine(network, **options)
    first, second = engine.submit([1, 2, 3], endless), engine.submit([4, 5], LONG)
    run(engine, check=False)
    alone = Alone(network, **options)
    assert first.result() == alone(np.array([1, 2, 3]), endless).tokens
    assert second.result() == alone(np.array([4, 5]), LONG).tokens


def test_memory_is_bounded_and_used_again(network):
    """As many texts run as fit; each has its budget, however long it grows."""
    one = BatchEngine(network, max_running=1, **POLICIES["h2o"])
    each, size = one.memory()["kv"], one.stats().free_blocks
    for limit in ({"max_memory_bytes": 3 * each + 1}, {"num_blocks": 3 * size + 1}):
        engine = BatchEngine(network, **POLICIES["h2o"], **limit)
        requests = [engine.submit(prompt, sampled(4, 100)) for prompt in prompts(4, 5, 40)]
        engine.step()
        assert (engine.stats().running, engine.stats().waiting) == (3, 2)
        requests[0].cancel()
        run(engine)
        assert engine.memory()["kv"] == 3 * each
        assert all(request.is_finished for request in requests)
        gone(engine)
    with pytest.raises(ValueError, match="max_memory_bytes: expected at least"):
        BatchEngine(network, max_memory_bytes=each - 1, **POLICIES["h2o"])
    with pytest.raises(ValueError, match=f"num_blocks: expected an int >= {size}, got 1"):
        BatchEngine(network, num_blocks=1, **POLICIES["h2o"])


def test_interrupted_and_failing(network, long):
    """After Ctrl-C between two lines, and beside requests that fail, texts are those of the engine alone."""
    asked = [(prompt, sampled(i, 12, logprobs=1)) for i, prompt in enumerate(prompts(22, 3, 60))]
    alone = Alone(network, **POLICIES["h2o"])
    wanted = [alone(*each) for each in asked]
    long_text = np.random.default_rng(6).integers(0, 250, network.config.max_position_embeddings - 4).astype(np.uint32)
    scores = alone.score(long_text).tobytes()

    def serve(lines):
        engine = BatchEngine(network, max_running=2, **POLICIES["h2o"])
        requests, scoring = [engine.submit(*each) for each in asked], Scoring(long_text, engine._pool.chunk)
        engine._enqueue(Pending(engine._steps, [scoring]), [scoring], 0, None)
        with suppress(KeyboardInterrupt), lines:
            run(engine, check=False)
        return engine, requests, scoring

    lines = Lines()
    serve(lines)
    chosen = places(lines.seen, every=long)
    for stop in chosen if long else chosen[:: 40 if FAST else 20]:
        engine, requests, scoring = serve(Lines(stop))
        run(engine)
        assert scoring.scores.tobytes() == scores
        for request, want in zip(requests, wanted, strict=True):
            same(request.completions()[0], want)
        gone(engine)
    for countdown in (1, 4, 9):
        model = Failing(network, ArithmeticError("broken"))
        engine = BatchEngine(model, max_running=2, **POLICIES["h2o"])
        requests = [engine.submit(*each) for each in asked]
        model.countdown, model.after = countdown, False
        run(engine)
        assert model.countdown < 0, "no pass failed"
        for request, want in zip(requests, wanted, strict=True):  # a pass that failed once runs again, one by one
            same(request.completions()[0], want)
        gone(engine)


def test_what_does_not_go_together(network, tmp_path):
    h2o = POLICIES["h2o"]
    engine = BatchEngine(network, **h2o)
    for call in (lambda: engine.save(tmp_path), lambda: engine.load(tmp_path)):
        with pytest.raises(InvalidOperationError, match="expected an engine that keeps all tokens, got"):
            call()
    tiers = Tiers([DirectoryTier(tmp_path / "kept", 1 << 20, **GIVEN)])
    with tiers, pytest.raises(ValueError, match="tiers: expected none with an eviction_policy"):
        BatchEngine(network, tiers=tiers, **h2o)
    for options, message in (
        ({"residual_length": 257}, "residual_length: expected "),
        ({"dtype": ["q4", "q8"]}, "dtype: expected one format with an eviction_policy"),
        ({"kv_budget": None}, "kv_budget"),
    ):
        with pytest.raises(ValueError, match=message):
            BatchEngine(network, **h2o | options)
    with pytest.raises(ValueError, match="eviction_policy: expected none with layers that have a window"):
        BatchEngine(Windowed(network, 10), **h2o)
    with pytest.raises(ValueError, match="eviction_policy: expected none with positions that depend"):
        BatchEngine(Transformer.from_pretrained(GOLDEN / "phi3_longrope"), **h2o)
