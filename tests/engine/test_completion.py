"""`complete`: tokens, text, why it ended, log-probabilities and cached tokens, of both engines; prompts as text."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from engines import GREEDY, PROMPT
from places import GOLDEN

from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.serving import BatchEngine

pytestmark = pytest.mark.one_build

LONG = replace(GREEDY, max_tokens=24)


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("tokenizers")
    return InferenceEngine.from_pretrained(DIRECTORY, num_blocks=64)


@pytest.fixture(scope="module", params=["plain", "cached"])
def texts(request, demo):
    """An engine with a tokenizer."""
    return demo if request.param == "plain" else PrefixCachedEngine(demo, 16)


def test_complete_is_generate_and_more(engine):
    expected = engine.generate(PROMPT, LONG)
    done = engine.complete(PROMPT, LONG)
    assert done.tokens == expected
    assert (done.text, done.finish_reason, done.logprobs, done.cached_tokens) == (None, "length", None, 0)


def test_finish_reasons(engine):
    tokens = engine.generate(PROMPT, LONG)
    stopped = engine.complete(PROMPT, replace(LONG, stop_token_ids=tokens[3:4]))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == tokens[: tokens.index(tokens[3])]
    nothing = engine.complete(PROMPT, replace(LONG, max_tokens=0))
    assert (nothing.tokens, nothing.finish_reason) == ([], "length")


def test_the_last_position_is_a_length(network):
    engine = InferenceEngine(network, num_blocks=40)
    most = network.config.max_position_embeddings
    done = engine.complete(np.resize(PROMPT, most - 2), replace(GREEDY, max_tokens=9))
    assert (len(done.tokens), done.finish_reason) == (3, "length")


def test_logprobs_are_those_of_score(engine):
    params = replace(GREEDY, logprobs=3, repetition_penalty=1.3, temperature=1.5, logit_bias={5: 4.0}, seed=3)
    done = engine.complete(PROMPT, params)
    scores = engine.score([*PROMPT, *done.tokens])[len(PROMPT) - 1 :]
    assert [each.logprob for each in done.logprobs] == pytest.approx(scores.tolist(), abs=1e-4)
    for token, each in zip(done.tokens, done.logprobs, strict=True):
        assert len(each.top) == 3
        assert list(each.top.values()) == sorted(each.top.values(), reverse=True)
        assert each.logprob <= max(each.top.values())
        if token in each.top:
            assert each.top[token] == each.logprob


def test_logprobs_of_no_and_of_all_tokens(engine):
    (none,) = engine.complete(PROMPT, replace(GREEDY, logprobs=0, max_tokens=1)).logprobs
    assert none.top == {}
    (every,) = engine.complete(PROMPT, replace(GREEDY, logprobs=10**9, max_tokens=1)).logprobs
    assert len(every.top) == engine.config.vocab_size
    assert math.fsum(map(math.exp, every.top.values())) == pytest.approx(1.0)
    assert every.logprob == next(iter(every.top.values())) == none.logprob


def test_a_grammar(engine):
    """A processor that lets a token and its successor alternate."""

    def alternate(tokens, logits):
        assert tokens[: len(PROMPT)].tolist() == PROMPT.tolist()
        allowed = 7 if tokens[-1] != 7 else 8
        logits[np.arange(len(logits)) != allowed] = -np.inf

    done = engine.complete(PROMPT, replace(LONG, logits_processor=alternate, max_tokens=6))
    assert done.tokens == [7, 8] * 3
    assert list(engine.stream(PROMPT, replace(LONG, logits_processor=alternate, max_tokens=3))) == [7, 8, 7]


def test_a_processor_that_raises_leaves_an_empty_sequence(engine):
    def fail(tokens, logits):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.complete(PROMPT, replace(LONG, logits_processor=fail))
    assert engine.num_tokens == 0
    assert engine.complete(PROMPT, GREEDY).tokens


@pytest.mark.parametrize("call", ["complete", "generate", "stream"])
def test_refused_parameters_change_nothing(network, call):
    engine, twin = InferenceEngine(network, seed=5), InferenceEngine(network, seed=5)
    size = network.config.vocab_size
    for params, message in (
        (replace(GREEDY, logit_bias={size: 1.0}), f"logit_bias: expected tokens from 0 to {size - 1}, got {size}"),
        (replace(GREEDY, logit_bias=dict.fromkeys(range(size), -math.inf)), "logit_bias: expected minus infinity"),
        (replace(GREEDY, stop="x"), "stop: expected none, since the engine has no tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            getattr(engine, call)(PROMPT, params)
    with pytest.raises(ValueError, match="prompt: expected token ids, since the engine has no tokenizer, got a text"):
        getattr(engine, call)("text")
    with pytest.raises(TypeError, match="params"):
        getattr(engine, call)(PROMPT, {})
    # The random numbers of the next request are those of the first.
    assert engine.generate(PROMPT) == twin.generate(PROMPT)


def test_decode_takes_the_new_parameters(network):
    engine = InferenceEngine(network)
    logits = engine.prefill_from_pos(PROMPT, 0)
    bias = replace(GREEDY, logit_bias={9: math.inf * -1, 4: 1e6}, max_tokens=3)
    assert list(engine.decode(logits, bias, PROMPT)) == [4, 4, 4]
    with pytest.raises(ValueError, match="logit_bias"):
        engine.decode(logits, replace(GREEDY, logit_bias={10**6: 1.0}))


# -- with a prefix cache ------------------------------------------------------------------------------------


def test_cached_tokens_are_those_that_did_not_run(network):
    cached = PrefixCachedEngine(InferenceEngine(network), 16)
    cold = cached.complete(PROMPT, GREEDY)
    before = cached.inner.prefill_token_count
    warm = cached.complete(PROMPT, GREEDY)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == len(PROMPT) - (cached.inner.prefill_token_count - before) == 32
    assert cold.tokens == warm.tokens == cached.generate(PROMPT, GREEDY)
    assert cached.complete(PROMPT, GREEDY, namespace="other").cached_tokens == 0
    whole = cached.complete(PROMPT[:32], GREEDY)  # its last token runs again, and does not count as prefilled
    assert whole.cached_tokens == 32


def test_complete_raises_where_generate_returns_nothing(network):
    def fail(tokens, logits):
        raise ZeroDivisionError

    cached = PrefixCachedEngine(InferenceEngine(network), 16)
    failing = replace(GREEDY, logits_processor=fail)
    with pytest.raises(ZeroDivisionError):
        cached.complete(PROMPT, failing)
    assert cached.generate(PROMPT, failing) == []
    with pytest.raises(ValueError, match="at least one"):
        cached.complete([], GREEDY)
    assert cached.generate([], GREEDY) == []
    cached.check()


# -- with a tokenizer ---------------------------------------------------------------------------------------


def test_a_prompt_may_be_a_text(texts, demo):
    prompt = "import os\n\n\ndef walk(path):\n"
    ids = demo.tokenizer.encode(prompt).ids
    done = texts.complete(prompt, LONG)
    assert done.tokens == texts.generate(prompt, LONG) == texts.generate(ids, LONG) == list(texts.stream(prompt, LONG))
    assert prompt + done.text == demo.tokenizer.decode([*ids, *done.tokens])
    with pytest.raises(ValueError, match="at least one"):
        texts.complete("", LONG)


def test_a_prompt_that_is_not_unicode(texts):
    with pytest.raises(ValueError, match="prompt: expected Unicode text, got a lone surrogate"):
        texts.complete("x\ud800", LONG)


def test_stop_strings(texts):
    prompt = "import os\n\n\ndef walk(path):\n"
    whole = texts.complete(prompt, LONG)
    at = len(whole.text) // 2
    stop = whole.text[at : at + 3]
    done = texts.complete(prompt, replace(LONG, stop=["never there", stop]))
    assert done.text == whole.text[: whole.text.find(stop)]
    assert done.finish_reason == "stop"
    assert done.tokens == whole.tokens[: len(done.tokens)]
    assert len(done.tokens) < len(whole.tokens)
    assert texts.generate(prompt, replace(LONG, stop=stop)) == done.tokens
    assert list(texts.stream(prompt, replace(LONG, stop=stop))) == done.tokens
    missed = texts.complete(prompt, replace(LONG, stop="never there"))
    assert (missed.text, missed.finish_reason) == (whole.text, "length")


def test_the_last_token_may_complete_a_stop_string(texts):
    prompt = "import os\n\n\ndef walk(path):\n"
    whole = texts.complete(prompt, LONG)
    done = texts.complete(prompt, replace(LONG, stop=whole.text))
    assert (done.text, done.finish_reason, done.tokens) == ("", "stop", whole.tokens)


def test_without_the_tokenizers_package(tmp_path, monkeypatch):
    """Tokens work, and text that is asked for says what to install."""
    for file in (GOLDEN / "llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    engine = InferenceEngine.from_pretrained(tmp_path)
    assert engine.complete(PROMPT, GREEDY).text is None
    for prompt, params in (("text", GREEDY), (PROMPT, replace(GREEDY, stop="x"))):
        with pytest.raises(ImportError, match=r"kvcache-cpu\[text\]"):
            engine.complete(prompt, params)


def test_negative_seeds(demo):
    """They are 64 bits without a sign; of several samples each has the next seed."""
    texts = {seed: demo.complete("def ", replace(LONG, temperature=1.5, top_k=0, seed=seed)).tokens
             for seed in (-(2**63), -1, 0, 2**64 - 1)}
    assert texts[-1] == texts[2**64 - 1] != texts[0] != texts[-(2**63)]
    with BatchEngine.from_pretrained(DIRECTORY, num_blocks=64) as engine:
        params = replace(LONG, temperature=1.5, top_k=0, seed=-1)
        assert engine.submit("def ", params, n=2).result() == [texts[-1], texts[0]]


# -- attributes of the sampling as keywords --------------------------------------------------------------------


def test_keywords_of_the_sampling(network):
    """Every call of every engine takes them, in place of those of `params`."""
    plain = InferenceEngine(network)
    want = plain.generate(PROMPT, replace(GREEDY, max_tokens=5))
    for engine in (plain, PrefixCachedEngine(InferenceEngine(network), 16)):
        assert engine.generate(PROMPT, GREEDY, max_tokens=5) == want
        assert list(engine.stream(PROMPT, temperature=0.0, max_tokens=5, repetition_penalty=1.0)) == want
        assert engine.complete(PROMPT, GREEDY, max_tokens=5, logprobs=1).tokens == want
        with pytest.raises(TypeError, match=r"^'max_token': expected an attribute of SamplingParams, got none"):
            engine.generate(PROMPT, max_token=5)
        with pytest.raises(ValueError, match=r"^temperature: expected"):
            engine.complete(PROMPT, temperature=-1)
    with BatchEngine(network) as batch:
        assert batch.submit(PROMPT, GREEDY, max_tokens=5).result() == want
        assert batch.generate_batch([PROMPT] * 2, GREEDY, max_tokens=5, progress=False) == [want] * 2
        with pytest.raises(TypeError, match="expected an attribute of SamplingParams"):
            batch.submit(PROMPT, tokens=3)


def test_chat_takes_keywords(tmp_path):
    pytest.importorskip("jinja2")
    from chat_folders import chat_folder

    engine = InferenceEngine.from_pretrained(chat_folder(tmp_path / "x"))
    messages = [{"role": "user", "content": "import"}]
    want = "".join(engine.chat(messages, replace(GREEDY, max_tokens=4)))
    for each in (engine, PrefixCachedEngine(engine, 16)):
        assert "".join(each.chat(messages, GREEDY, max_tokens=4)) == want
