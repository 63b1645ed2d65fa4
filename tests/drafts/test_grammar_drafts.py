"""Grammars, tokens that these force and stop strings, beside draft tokens of a network or of a layer for that."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from next_layers import with_next_layer
from places import GOLDEN
from serving import Clock, prompts, run, same, settled

from kvcache import BatchEngine, InferenceEngine, SamplingParams
from kvcache.engine import Transformer
from kvcache.grammar import json_schema, lark, regex

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
from spelled_networks import END, text_side

pytestmark = pytest.mark.one_build

SIDE = text_side()
SCHEMA = {
    "type": "object", "required": ["name", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}},
    },
}
GRAMMARS = [
    json_schema(SCHEMA), regex("[ -~]*"), lark('start: "yes " NAME ("," NAME)* "."\nNAME: /[a-c]{1,4}/'),
    regex("(alpha|beta|no)( (yes|name)[a-z]*)*"),
]
OPTIONS = [{}, {"stop": ("e", "{")}, {"logprobs": 1}, {"stop": ("aa", "\n"), "presence_penalty": 1.5}]


@cache
def opened(name, weights="auto"):
    """A network of 256 tokens whose texts may end."""
    if name == "llama":
        model = Transformer.from_pretrained(GOLDEN / name, weights=weights)
    else:
        with TemporaryDirectory() as place:
            folder = with_next_layer(name, Path(place) / "x", knows=True, vocab_size=256)
            model = Transformer.from_pretrained(folder, draft_layer=True)
    model.config = replace(model.config, eos_token_ids=(END,))
    return model


SOURCES = {
    "itself": ("llama", "same"), "itself in q4 behind n-grams": ("llama", "ngram", "q4"), "mtp": ("qwen3_5", "mtp"),
    "mtp before n-grams": ("deepseek_v3", "mtp", "ngram"),
}


def asked(count):
    """Requests, half of them greedy, with each grammar and each of the options."""
    found = []
    for i, prompt in enumerate(prompts(21, count, 30, 96)):
        sampling = {"temperature": 1.1 * (i // 4 % 2), "top_k": 0, "seed": i, "repetition_penalty": 1.0}
        options = {"grammar": GRAMMARS[i % 4], "max_tokens": 24, **sampling, **OPTIONS[i // 2 % 4]}
        found.append((prompt, SamplingParams(**options)))
    return found


@pytest.fixture(autouse=True)
def no_time(monkeypatch):
    """Sources are asked as if they took no time."""
    for module in ("requests", "drawn_tokens"):
        monkeypatch.setattr(f"kvcache.engine.{module}.perf_counter", lambda: 0.0)


@pytest.mark.parametrize("name", SOURCES)
def test_answers_are_those_without(name):
    """Many texts, and one: some draft tokens hold, and others are not what the grammar allows."""
    target, *names = SOURCES[name]
    model = opened(target)
    sources = [each if each in ("ngram", "mtp") else opened(target, "q4" if each == "q4" else "auto") for each in names]
    batch, plain = (BatchEngine(model, draft=each, max_running=4, clock=Clock()) for each in (sources, None))
    single = InferenceEngine(model, draft=sources)
    batch._text = plain._text = single.requests.text = SIDE
    requests, wanted = ([engine.submit(*each) for each in asked(8)] for engine in (batch, plain))
    for engine in (batch, plain):
        run(engine, check=False)
    held = [pace.accepted for request in requests for work in request.works for pace in work.drafts.paces]
    assert sum(held) > 5
    for each, request, want in zip(asked(8), requests, wanted, strict=True):
        want = want.completions()[0]
        same(request.completions()[0], want)
        found = single.complete(*each)
        assert (found.tokens, found.logprobs, found.text) == (want.tokens, want.logprobs, want.text)
        assert found.finish_reason == want.finish_reason
    settled(batch)
    single.check()
