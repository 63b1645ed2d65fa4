"""`BatchEngine` with tiers: every request gives what it gives alone, and finds what other engines computed."""

import numpy as np
import pytest
from pace import FAST
from places import GOLDEN
from prefix_engines import SHORT, prompt
from serving import Alone, prompts, run, same, sampled, settled
from tier_stores import SECRET, Faulty, ObjectStore
from windowed_networks import windowed

from kvcache import BatchEngine
from kvcache.engine import InferenceEngine, PrefixCachedEngine, Transformer
from kvcache.kernels.kernels import FORMATS
from kvcache.texts.arrivals import Arrivals
from kvcache.tiers import Tiers

pytestmark = pytest.mark.one_build


def tiers_over(*stores, **options):
    return Tiers(stores, **{"secret": SECRET, "after_uses": 1, "head_start": 60, **options})


@pytest.mark.parametrize(("dtype", "residual"), [*((name, None) for name in FORMATS), ("q4", 48)])
def test_engines_of_both_kinds_share_values(network, dtype, residual):
    store, text = ObjectStore(), prompt(1, 300)
    options = {"dtype": dtype, "residual_length": residual}
    want = InferenceEngine(network, **options).complete(text, sampled(3, 12, logprobs=1))
    with tiers_over(store) as tiers:
        with BatchEngine(network, tiers=tiers, **options) as engine:
            same(engine.submit(text, sampled(3, 12, logprobs=1)).completions()[0], want)
        assert tiers.flush(60)
    assert len(store.bucket) == 4
    group = InferenceEngine(network, **options).residual_length or 1
    with tiers_over(store) as tiers:
        alone = PrefixCachedEngine(InferenceEngine(network, **options), 64, tiers=tiers)
        assert alone.complete(text, SHORT).cached_tokens == 256 // group * group
    with tiers_over(store) as tiers, BatchEngine(network, tiers=tiers, **options) as engine:
        request = engine.submit(text, sampled(3, 12, logprobs=1))
        same(request.completions()[0], want)
        assert request.metrics.cached_tokens == 256 // group * group
        counts = engine.namespace_stats()[None]
        assert (counts.queries, counts.hits, counts.hit_tokens) == (1, 1, 256 // group * group)
        settled(engine)


WINDOWED = [("gemma3", 16), ("gpt_oss", 16), ("olmo3", 48), ("mixtral", 16), ("gemma3", 96), ("chunks", 16)]


@pytest.mark.parametrize(("name", "block_size"), WINDOWED)
def test_networks_with_windows(name, block_size):
    """They go on where the tiers have their windows, of prompts and answers; both kinds of engine share them."""
    model, tokens = windowed(name), prompt(1, 300)
    options, params = {"dtype": "q8", "block_size": block_size}, sampled(3, 40, logprobs=1)
    alone, size = InferenceEngine(model, **options), max(64 // block_size * block_size, block_size)
    stores = [ObjectStore(), ObjectStore()]
    with tiers_over(stores[0]) as tiers, BatchEngine(model, tiers=tiers, **options) as engine:
        assert engine._pool.groups[1:]
        request = engine.submit(tokens, params)
        same(request.completions()[0], alone.complete(tokens, params))
        settled(engine)
        assert tiers.flush(60)
    with tiers_over(stores[1]) as tiers:
        cached = PrefixCachedEngine(InferenceEngine(model, **options), 64, tiers=tiers)
        assert cached.generate(tokens, params) == request.tokens
        assert tiers.flush(60)
    assert list(stores[0].bucket) == list(stores[1].bucket)
    text = np.append(tokens, [*request.tokens, *prompt(2, 60)]).astype(np.uint32)
    want, ends = alone.complete(text, params), (300 + len(request.tokens) - 1) // size * size
    for store in stores:
        for wait in (60, 0):
            with tiers_over(store, head_start=wait) as tiers, BatchEngine(model, tiers=tiers, **options) as engine:
                again = [engine.submit(text, params) for _ in range(2)]
                for each in again:
                    same(each.completions()[0], want)
                assert not wait or again[0].metrics.cached_tokens == ends
                settled(engine)
        with tiers_over(store) as tiers:
            cached = PrefixCachedEngine(InferenceEngine(model, **options), 64, tiers=tiers)
            assert cached.complete(text, params).cached_tokens == (len(text) - 1) // size * size


@pytest.mark.parametrize("wait", [0, 60])
def test_windows_that_arrive_and_have_no_room(monkeypatch, wait):
    """Nothing of the lookup is used, and it is not tried again."""
    model, store, tokens = Transformer.from_pretrained(GOLDEN / "gemma3"), ObjectStore(), prompt(1, 300)
    want = InferenceEngine(model).complete(tokens, sampled(3, logprobs=1))
    with tiers_over(store) as tiers, BatchEngine(model, tiers=tiers) as engine:
        engine.generate_batch([tokens], SHORT)
    monkeypatch.setattr(Arrivals, "_take_pages", lambda *_: False)
    with tiers_over(store, head_start=wait) as tiers, BatchEngine(model, tiers=tiers) as engine:
        request = engine.submit(tokens, sampled(3, logprobs=1))
        same(request.completions()[0], want)
        assert request.metrics.cached_tokens == 0
        assert engine._steps._scheduler.arrivals._lookups == {}
        settled(engine)


@pytest.mark.parametrize("head_start", [0, 60])
@pytest.mark.parametrize(("name", "dtype"), [("llama", "f32"), ("llama", "q4"), ("gemma3", "q8"), ("gpt_oss", "f16")])
def test_many_requests_under_random_faults(monkeypatch, name, dtype, head_start):
    """A pool that holds few of them, tiers that fail and lie, requests that are cancelled."""
    monkeypatch.setattr("kvcache.tiers.links.PAUSE", 0.001)
    network = Transformer.from_pretrained(GOLDEN / name)
    alone, store = Alone(network, dtype=dtype), ObjectStore()
    rng = np.random.default_rng(5)
    for turn in range(2 if FAST else 6):
        with tiers_over(Faulty(store, turn, 0.1), head_start=head_start) as tiers:
            engine = BatchEngine(network, num_blocks=40, dtype=dtype, tiers=tiers)
            asked = [(text, sampled(i, 6, logprobs=1)) for i, text in enumerate(prompts(2, 12, 300))]
            requests = [engine.submit(text, params, n=1 + i % 2) for i, (text, params) in enumerate(asked)]
            for _ in range(3):
                engine.step()
            cancelled = [request for request in requests if rng.random() < 0.1]
            for request in cancelled:
                request.cancel()
            run(engine)
            for request, (text, params) in zip(requests, asked, strict=True):
                if request not in cancelled:
                    same(request.completions()[0], alone(text, params))
            settled(engine)
            assert engine._steps._scheduler.arrivals._lookups == {}
            whole, (stats,) = tiers.flush(60), tiers.stats()
            assert stats.queued_bytes == 0
            assert whole == (stats.dropped == 0)


def test_the_first_prompts_of_an_engine_wait_as_long_as_values_arrive(network):
    """A short head start is enough after a restart; a store that answers nothing ends the wait."""
    store, text = ObjectStore(), prompt(1, 300)
    with tiers_over(store) as tiers:
        with BatchEngine(network, tiers=tiers) as engine:
            want = engine.submit(text, SHORT).result()
        assert tiers.flush(60)
    for stored, cached in ((store, 256), (ObjectStore(), 0)):
        with tiers_over(stored, head_start=1e-6) as tiers, BatchEngine(network, tiers=tiers) as engine:
            request = engine.submit(text, SHORT)
            assert (request.result(), request.metrics.cached_tokens) == (want, cached)


def test_refused_by_name(network):
    with pytest.raises(TypeError, match="tiers: expected a Tiers, got ObjectStore"):
        BatchEngine(network, tiers=ObjectStore())
