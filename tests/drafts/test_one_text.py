"""Engines of one text with draft tokens: tokens, texts and what is left in the cache are those without."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from next_layers import with_next_layer
from seeded_weights import seeded
from serving import GREEDY, penalised, prompts, repeating, sampled

from kvcache import EvictionPolicy, InferenceEngine, PrefixCachedEngine
from kvcache.calibration.calibrating import measure
from kvcache.demo import DIRECTORY
from kvcache.engine import Transformer

pytestmark = pytest.mark.one_build


@pytest.fixture(autouse=True)
def no_time(monkeypatch):
    """Sources are asked as if they took no time."""
    for module in ("requests", "drawn_tokens"):
        monkeypatch.setattr(f"kvcache.engine.{module}.perf_counter", lambda: 0.0)


@cache
def opened(name):
    if name.startswith("next "):
        with TemporaryDirectory() as place:
            folder = with_next_layer(name.split()[1], Path(place) / "x", knows=True)
            return Transformer.from_pretrained(folder, draft_layer=True)
    return Transformer.from_pretrained(seeded(name))


CASES = [
    ("llama_odd", "same", {"dtype": "q4", "residual_length": 12}), ("starcoder2_window", "ngram", {}),
    ("qwen3_5", "same", {}), ("next qwen3_5", "mtp", {}),
    ("next deepseek_v3", "mtp", {"dtype": "q4", "residual_length": 12, "calibrate": "measured"}),
]


@pytest.mark.parametrize(("name", "draft", "options"), CASES, ids=lambda value: str(value)[:20])
def test_answers_are_those_without(name, draft, options):
    model = opened(name)
    if "calibrate" in options:
        options = options | {"calibrate": measure(model, np.arange(90, dtype=np.uint32))}
    sources = ("ngram", model) if draft == "same" else draft
    plain, drafted = (InferenceEngine(model, seed=3, draft=each, **options) for each in (None, sources))
    cached = PrefixCachedEngine(InferenceEngine(model, draft=sources, **options), 60)
    draws, passes = (repeating, penalised, sampled), []
    model_run = drafted.requests.sequence.forward.run
    drafted.requests.sequence.forward.run = lambda pieces: passes.append(len(pieces)) or model_run(pieces)
    for i, prompt in enumerate(prompts(6, 3, 30, 96)):
        params = draws[i](2 * i, 18, logprobs=1)
        want = plain.complete(prompt, params)
        assert drafted.complete(prompt, params) == want
        assert drafted.num_tokens == plain.num_tokens
        drafted.check()
        for _ in range(1 + (i == 0)):
            assert replace(cached.complete(prompt, params), cached_tokens=0) == want
        cached.check()
    assert len(passes) < 3 * 18, "draft tokens were drawn"


def test_windows_that_leave_tokens_behind_in_a_pass_of_draft_tokens():
    """Such a text is several windows long; a stream of it that is closed is cut back."""
    model, params = opened("starcoder2_window"), replace(GREEDY, max_tokens=60, logprobs=1)
    prompt = prompts(4, 1, 150, 96)[0][:140]
    plain, drafted = (InferenceEngine(model, draft=each) for each in (None, (model,)))
    want = plain.complete(prompt, params)
    assert drafted.complete(prompt, params) == want
    drafted.check()
    for given in (5, 33):
        stream = drafted.stream(prompt, params)
        assert [next(stream) for _ in range(given)] == want.tokens[:given]
        stream.close()
        drafted.check()
        again = drafted.decode_step(want.tokens[given - 1], drafted.num_tokens)
        assert again.tobytes() == plain.prefill_from_pos([*prompt, *want.tokens[:given]], 0).tobytes()


def test_a_stream_that_is_closed_leaves_what_it_gave():
    """Tokens that were drawn with others of a pass and never given are cut off; the text goes on without them."""
    model = opened("next deepseek_v3")
    prompt = prompts(6, 1, 50, 96)[0]
    for given in (1, 2, 3, 5, 9):
        engines = [InferenceEngine(model, draft=each) for each in ("mtp", None)]
        found = []
        for engine in engines:
            stream = engine.stream(prompt, replace(GREEDY, max_tokens=30))
            tokens = [next(stream) for _ in range(given)]
            stream.close()
            engine.check()
            found.append((tokens, engine.num_tokens, engine.decode_step(tokens[-1], engine.num_tokens).tobytes()))
        assert found[0] == found[1]


def test_a_stream_that_is_closed_reads_its_group_in_f16():
    """No draft token is in another group of the residual than the token before it, which would pack that one's."""
    model = opened("llama_odd")

    def circle(text, logits):
        logits[40 + (text[-1] + 1) % 5] += 1000

    params, prompt = replace(GREEDY, max_tokens=40, logits_processor=circle), [40, 41, 42, 43, 44] * 4
    for given in (4, 14, 15, 25):
        found = []
        for draft in ("ngram", None):
            engine = InferenceEngine(model, dtype="q2", residual_length=12, draft=draft)
            stream = engine.stream(prompt, params)
            tokens = [next(stream) for _ in range(given)]
            stream.close()
            found.append((tokens, engine.decode_step(tokens[-1], engine.num_tokens).tobytes()))
        assert found[0] == found[1]


def test_stop_strings_and_pieces_of_text():
    """Pieces come one by one, and end at the stop string, however many tokens one pass has drawn."""
    model = "class Reader:\n    def read(self"
    engines = [InferenceEngine.from_pretrained(DIRECTORY, draft=each) for each in (DIRECTORY, None)]
    for stop in (("e",), ("self.",)):
        params = replace(GREEDY, max_tokens=24, stop=stop, logprobs=0)
        found, want = (engine.complete(model, params) for engine in engines)
        assert found == want
        assert engines[0].num_tokens == engines[1].num_tokens


def test_an_error_of_a_draw_comes_behind_the_tokens_before_it():
    model = opened("next qwen3_5")
    prompt = prompts(6, 1, 50, 96)[0]

    def fails(text, logits):
        if len(text) == len(prompt) + 7:
            raise RuntimeError("no more")

    want = InferenceEngine(model).generate(prompt, replace(GREEDY, max_tokens=30))
    engine, found = InferenceEngine(model, draft="mtp"), []
    stream = engine.stream(prompt, replace(GREEDY, max_tokens=30, logits_processor=fails))
    with pytest.raises(RuntimeError, match="no more"):
        list(map(found.append, stream))
    assert found == want[:7]
    engine.check()
    assert engine.generate(prompt, replace(GREEDY, max_tokens=30)) == want


def test_memory_counts_the_draft():
    model = opened("llama_odd")
    plain, drafted = (InferenceEngine(model, max_memory_bytes="1MiB", draft=each) for each in (None, model))
    assert drafted.memory()["weights"] == 2 * plain.memory()["weights"]
    assert drafted.memory()["kv"] <= 2**20
    assert np.array_equal(drafted.generate([5, 6, 7], GREEDY), plain.generate([5, 6, 7], GREEDY))


@pytest.mark.parametrize("draft", ["ngram", ("ngram", "same")])
def test_a_policy_and_draft_tokens_exclude_each_other(draft):
    model = opened("llama_odd")
    draft = tuple(model if each == "same" else each for each in draft) if isinstance(draft, tuple) else draft
    with pytest.raises(ValueError, match="draft: expected None with an eviction_policy, got "):
        InferenceEngine(model, draft=draft, eviction_policy=EvictionPolicy.StreamingLLM(4, 16))
