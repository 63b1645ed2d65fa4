"""Answers that follow grammars: those of the request alone, bit for bit, with guesses and without, however it ran."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.text import PlainTexts
from places import GOLDEN
from serving import Clock, prompts, run, same, settled

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine, SamplingParams, get_num_threads
from kvcache.engine import Transformer
from kvcache.errors import GrammarError
from kvcache.grammar import json_object, json_schema, lark, regex
from kvcache.grammar.compiler import GrammarCompiler

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
from spelled_networks import END, text_side

pytestmark = pytest.mark.one_build

NETWORK = Transformer.from_pretrained(GOLDEN / "llama")
NETWORK.config = replace(NETWORK.config, eos_token_ids=(END,))
SIDE = text_side()
SCHEMA = {
    "type": "object", "required": ["name", "tags", "n"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}},
        "n": {"type": "integer", "minimum": 0, "maximum": 150},
    },
}
CALL = lark('start: "yes " NAME "(" (NAME ("," NAME)*)? ")"\nNAME: /[a-c]{1,4}/')
GRAMMARS = [
    json_schema(SCHEMA), json_schema(SCHEMA, whitespace=""), regex("(yes|no)( (alpha|beta){1,4})*"), CALL,
    json_object(),
]


def params(i, most=40, **options):
    """Greedy for every third request."""
    options |= {"temperature": 0.0 if i % 3 == 0 else 1.1, "grammar": GRAMMARS[i % len(GRAMMARS)]}
    return SamplingParams(top_k=0, top_p=1.0, seed=i, max_tokens=most, **options)


def batch(**options):
    engine = BatchEngine(NETWORK, block_size=8, clock=Clock(), **options)
    engine._text = SIDE
    return engine


def alone(prompt, asked):
    return PlainTexts(NETWORK, block_size=8).complete(prompt, asked, SIDE.tokenizer)


ASKED = [
    *((prompt, params(i)) for i, prompt in enumerate(prompts(21, 10, 30))),
    *((prompt, params(i, logprobs=2)) for i, prompt in enumerate(prompts(22, 5, 30))),
    *((prompt, params(i, stop=["a", ","], presence_penalty=1.5)) for i, prompt in enumerate(prompts(23, 5, 30))),
    *((prompt, params(i, repetition_penalty=1.3, logit_bias={40: -9})) for i, prompt in enumerate(prompts(24, 5, 30))),
]
WANT = [alone(*each) for each in ASKED]


def test_the_texts_follow_their_grammars():
    """Only texts that ended by themselves count: a stop string or the length cuts others."""
    whole = [(asked.grammar, found.text) for (_, asked), found in zip(ASKED, WANT, strict=True)
             if found.finish_reason == "stop" and not asked.stop]
    for grammar, text in whole:
        if grammar.kind == "json_schema":
            found = json.loads(text)
            assert isinstance(found, dict)
            if grammar != json_object():
                assert list(found) == ["name", "tags", "n"]
                assert 0 <= found["n"] <= 150
                assert {*found["tags"]} <= {"alpha", "beta"}
    assert len(whole) > 10
    assert {grammar for grammar, _ in whole} >= {GRAMMARS[1], GRAMMARS[2], CALL}


@pytest.mark.parametrize("draft", ["ngram", None])
@pytest.mark.parametrize("blocks", [None, 12])
def test_a_batch_gives_what_each_gives_alone(draft, blocks):
    engine = batch(num_blocks=blocks, draft=draft)
    requests = [engine.submit(prompt, asked) for prompt, asked in ASKED]
    run(engine)
    for request, want in zip(requests, WANT, strict=True):
        same(request.completions()[0], want)
    stats = engine.stats()
    assert (stats.preemptions > 0) == (blocks is not None)
    assert (stats.accepted_tokens > 40) == bool(draft)
    settled(engine)


def test_the_other_engines_give_it_too():
    engine = InferenceEngine(NETWORK)
    engine.requests.text = SIDE
    cached = PrefixCachedEngine(InferenceEngine(NETWORK), max_cache_blocks=40)
    cached.inner.requests.text = SIDE
    for (prompt, asked), want in list(zip(ASKED, WANT, strict=True))[::3]:
        for each in (engine, cached):
            found = each.complete(prompt, asked)
            assert (found.tokens, found.text, found.finish_reason) == (want.tokens, want.text, want.finish_reason)
        assert list(engine.stream(prompt, asked)) == want.tokens


def test_forced_tokens_run_as_guesses():
    """An answer of one text takes few steps, and guesses of the text itself learn nothing of it."""
    text = "yes alpha beta yes alpha name 12 beta no beta"
    engine = batch()
    request = engine.submit([5, 6, 7], SamplingParams(temperature=1.0, seed=3, max_tokens=60, grammar=regex(text)))
    steps = run(engine)
    assert request.text() == text
    assert request.finish_reason == "stop"
    assert steps < len(request.tokens) / 2
    assert engine.stats().accepted_tokens == engine.stats().draft_tokens > 15
    assert request.works[0].drafts.paces[0].proposed == 0


def test_samples_follow_the_grammar_each_by_itself():
    engine = batch()
    asked = replace(params(1), grammar=GRAMMARS[2])
    request = engine.submit(ASKED[0][0], asked, n=5)
    run(engine)
    for number, found in enumerate(request.completions()):
        same(found, alone(ASKED[0][0], replace(asked, seed=asked.seed + number)))
    assert len({*request.text()}) > 1


def test_a_whole_text_ends_as_one_that_stopped():
    """Also with its last token at `max_tokens`, and where a stop token of the request may end it earlier."""
    engine = batch()
    asked = SamplingParams(temperature=0.0, max_tokens=1, grammar=regex("no"))
    found = engine.submit([5], asked).completions()[0]
    assert (found.text, found.finish_reason) == ("no", "stop")
    cut = engine.submit([5], replace(asked, grammar=regex("nono"))).completions()[0]
    assert (cut.text, cut.finish_reason) == ("no", "length")
    asked = replace(asked, max_tokens=9, grammar=regex("(no)+"), stop_token_ids=(200,), logit_bias={200: 1e9})
    found = engine.submit([5], asked).completions()[0]
    assert (found.text, found.finish_reason) == ("no", "stop"), "not before the first word"
    empty = engine.submit([5], replace(asked, grammar=regex("(no)*"))).completions()[0]
    assert (empty.text, empty.finish_reason) == ("", "stop")


def test_an_interrupt_between_tokens(monkeypatch):
    """A step that an exception ends runs again: the matcher goes back with the text."""
    engine = batch()
    request = engine.submit(*ASKED[1])
    other = engine.submit(*ASKED[2])
    work, left = request.works[0], [3, 7, 12]
    observe = type(work._request).observe

    def interrupted(self, token, logits):
        if self is work._request and left and work.num_new >= left[0]:
            left.pop(0)
            raise KeyboardInterrupt
        observe(self, token, logits)

    monkeypatch.setattr(type(work._request), "observe", interrupted)
    while not (request.is_finished and other.is_finished):
        try:
            engine.step()
        except KeyboardInterrupt:
            engine.check()
    assert not left
    same(request.completions()[0], WANT[1])
    same(other.completions()[0], WANT[2])


def test_errors_by_name():
    engine = batch()
    with pytest.raises(GrammarError, match="grammar: expected a regex that can be compiled"):
        engine.submit([5], SamplingParams(grammar=regex("(")))
    bare = BatchEngine(NETWORK)
    with pytest.raises(GrammarError, match="grammar: expected none, since the engine has no tokenizer"):
        bare.submit([5], SamplingParams(grammar=regex("a")))
    assert engine.stats().waiting == bare.stats().waiting == 0
    # Two texts fail beside one that does not: nothing is left to draw, and the states of a step are used up.
    never = {token: -np.inf for token in range(256) if "e" in SIDE.tokenizer.decode([token])}
    stuck = engine.submit([5], SamplingParams(grammar=regex("(y|ye|yes)es"), logit_bias=never))
    bomb = lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"')
    large = engine.submit([5], SamplingParams(grammar=bomb))
    good = engine.submit(*ASKED[3])
    run(engine)
    with pytest.raises(GrammarError, match="grammar: expected a token that may follow, got none beside the other"):
        stuck.result()
    with pytest.raises(GrammarError, match=r"grammar: expected the next tokens within the limits of .* got .*items"):
        large.result()
    same(good.completions()[0], WANT[3])
    settled(engine)


def test_a_slow_compilation_holds_up_nobody_else(monkeypatch):
    engine, reached, go_on = batch(), threading.Event(), threading.Event()
    compile = GrammarCompiler.compile

    def slow(self, grammar, *stops):
        reached.set()
        assert go_on.wait(60)
        return compile(self, grammar, *stops)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    found = []
    thread = threading.Thread(target=lambda: found.append(engine.submit(*ASKED[4])))
    thread.start()
    assert reached.wait(60)
    plain = replace(ASKED[4][1], grammar=None)
    assert engine.submit(ASKED[4][0], plain).completions()[0].tokens == alone(ASKED[4][0], plain).tokens
    assert not found
    go_on.set()
    thread.join()
    same(found[0].completions()[0], WANT[4])


@given(
    st.lists(
        st.tuples(st.integers(0, len(ASKED) - 1), st.sampled_from([None, "a"]), st.booleans()), min_size=1, max_size=7
    ),
    st.integers(11, 30), st.integers(1, 5), st.sampled_from(["ngram", None]), st.lists(st.integers(0, 6), max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_any_mix(asked, blocks, running, draft, cancelled):
    """Few places and blocks, requests that begin while others run, and some that are cancelled."""
    engine = batch(num_blocks=blocks, max_running=running, draft=draft)
    requests = []
    for number, space, wait in asked:
        requests.append((engine.submit(*ASKED[number], namespace=space), WANT[number]))
        for _ in range(3 * wait):
            engine.step()
            engine.check()
    for number in cancelled:
        requests[number % len(requests)][0].cancel()
    run(engine)
    for request, want in requests:
        (found,) = request.completions()
        if found.finish_reason == "cancelled":
            assert found.tokens == want.tokens[: len(found.tokens)]
        else:
            same(found, want)
    settled(engine)


def test_a_batch_of_masks_that_fails_leaves_each_its_own(monkeypatch):
    engine = batch()
    requests = [engine.submit(*asked) for asked in ASKED[:6]]

    def prepare(matchers, *place):
        raise ValueError("one of them")

    class Failing:
        unsafe_compute_mask_ptr = unsafe_compute_mask_ptr_with_draft_token = staticmethod(prepare)

    masks = engine._steps._masks
    masks._executor, masks._threads = Failing(), get_num_threads()
    run(engine)
    for request, want in zip(requests, WANT, strict=False):
        same(request.completions()[0], want)
