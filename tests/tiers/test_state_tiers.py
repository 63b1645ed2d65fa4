"""States in tiers: a text goes on where K, V and the state have arrived, all of them, and nothing wrong is taken."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from posix_modules import needs_posix
from seeded_weights import seeded
from serving import Alone, run, same
from tier_stores import SECRET, ObjectStore

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine import Transformer
from kvcache.tiers import Tiers, lookups

pytestmark = pytest.mark.one_build

SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=9, logprobs=1)
OPTIONS = [
    ("lfm2", {"dtype": "f16"}), ("qwen3_5", {"dtype": "q4", "residual_length": 16}), ("nemotron_h", {"dtype": "q2"}),
    ("kimi_linear", {"dtype": "q4"}), ("lfm3", {"dtype": "f32", "block_size": 24}), ("nemotron_h", {"dtype": "q8"}),
]


@cache
def network(name):
    return Transformer.from_pretrained(seeded(name))


def engine_over(model, tiers, **options):
    return PrefixCachedEngine(InferenceEngine(model, **options), 64, tiers=tiers, strict=True)


def waiting(*tiers, **options):
    """Tiers that a prompt waits for, so that the number of its hits does not depend on time."""
    return Tiers(tiers, **{"secret": SECRET, "after_uses": 1, "head_start": 60, **options})


def prompt(seed, n):
    return np.random.default_rng(seed).integers(0, 96, n).astype(np.uint32)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_another_engine_continues_behind_the_group(name, options):
    store, text, alone = ObjectStore(), prompt(0, 230), Alone(network(name), **options)
    for turn, tokens in enumerate((text, text, np.r_[text[:200], prompt(1, 40)], np.r_[text, prompt(2, 15)])):
        for batch in (False, True):
            with waiting(store, head_start=60) as tiers:
                if batch:
                    engine = BatchEngine(network(name), tiers=tiers, **options)
                    request = engine.submit(tokens, SEEDED)
                    run(engine)
                    found = request.completions()[0]
                else:
                    engine = engine_over(network(name), tiers, **options)
                    found = engine.complete(tokens, SEEDED)
                same(found, alone(tokens, SEEDED))
                assert tiers.flush(60)
                assert tiers.stats()[0].wrong == 0
                engine.check()
            size = {"q2": 128, "f32": 48}.get(options.get("dtype"), 64)
            shared = 200 if turn == 2 else 226
            assert found.cached_tokens >= (shared // size * size if turn or batch else 0)


def test_a_state_that_is_missing_takes_nothing():
    """Values of states are deleted, or those of blocks: the text runs, from its start or from an earlier group."""
    text, alone = prompt(0, 200), Alone(network("lfm2"))
    store = ObjectStore()
    with waiting(store) as tiers:
        engine_over(network("lfm2"), tiers).generate(text, SEEDED)
        assert tiers.flush(60)
    whole = dict(store.bucket)
    sizes = sorted({len(value) for value in whole.values()})
    assert len(sizes) == 2
    found = []
    for missing in sizes:
        store.bucket = {key: value for key, value in whole.items() if len(value) != missing}
        with waiting(store, after_uses=99) as tiers:
            answer = engine_over(network("lfm2"), tiers).complete(text, SEEDED)
            same(answer, alone(text, SEEDED))
            found.append(answer.cached_tokens)
    assert found == [0, 0]


def test_engines_of_other_formats_share_no_states():
    store, text = ObjectStore(), prompt(0, 200)
    for dtype in ("f16", "q8", "f32"):
        with waiting(store) as tiers:
            engine = PrefixCachedEngine(InferenceEngine(network("lfm2"), dtype=dtype), 50, tiers=tiers)
            found = engine.complete(text, SEEDED)
            same(found, Alone(network("lfm2"), dtype=dtype)(text, SEEDED))
            assert found.cached_tokens == 0
            assert tiers.flush(60)


@needs_posix
def test_a_directory_of_an_earlier_process(tmp_path):
    text, alone = prompt(0, 200), Alone(network("lfm2"))
    for turn in range(2):
        with PrefixCachedEngine(InferenceEngine(network("lfm2")), 50, autosave=tmp_path) as engine:
            found = engine.complete(text, SEEDED)
            same(found, alone(text, SEEDED))
            assert found.cached_tokens == (192 if turn else 0)
            engine.check()


def test_a_state_that_takes_longer_than_its_text_is_not_fetched(monkeypatch):
    """A group pays alone, and not with the bytes of a state beside it; many groups do."""
    monkeypatch.setattr(lookups, "_SHARE", 0.5)
    form = SimpleNamespace(value_bytes=1000, group_tokens=64)
    measured = SimpleNamespace(mean=100.0)
    link = SimpleNamespace(rate=SimpleNamespace(mean=10_000.0), latency=SimpleNamespace(mean=0.0))
    lookup = SimpleNamespace(computing=measured, format=form, beside=0)
    assert lookups.pays(lookup, link, 1)
    lookup.beside = 100_000
    assert not lookups.pays(lookup, link, 1)
    assert lookups.pays(lookup, link, 60)
    assert lookups.pays(lookup, link, 2, 60)  # 58 have arrived, which would be of no use without it
