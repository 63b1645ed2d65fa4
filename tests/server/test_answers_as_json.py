"""`response_format`: JSON of a schema, as the engine gives it by itself; new schemas hold up nobody."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest
from http_servers import ENDING, MODEL, TEMPLATE, Served, tiny_file
from serving import settled

from kvcache import SamplingParams
from kvcache.grammar import json_schema, lark
from kvcache.grammar.compiler import GrammarCompiler
from kvcache.server import constraints

pytest.importorskip("llguidance")
pytestmark = pytest.mark.one_build

TALK = [{"role": "user", "content": "Which one?"}]
SCHEMA = {
    "type": "object", "required": ["kind", "tags"], "additionalProperties": False,
    "properties": {
        "kind": {"enum": ["cat", "dog"]}, "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
}
ODD = {**SCHEMA, "propertyNames": {"maxLength": 9}}


def form(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tiny_file(tmp_path_factory.mktemp("tiny"), **ENDING)) as made:
        yield made
    settled(made.engine)


def asked(served, seed, **more):
    settings = {"seed": seed, "max_tokens": 120, "temperature": 0.9, "top_p": 0.95, **more}
    return served.client().chat.completions.create(model=MODEL, messages=TALK, **settings)


def alone(served, seed, grammar):
    prompt = served.alone.apply_chat_template(TALK, tokenize=True)
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=seed, max_tokens=120, grammar=grammar)
    return served.alone.complete(prompt, params)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (form(SCHEMA, strict=True), json_schema(SCHEMA)), (form(ODD), json_schema(ODD, strict=False)),
        ({"type": "json_object", "schema": SCHEMA}, json_schema(SCHEMA, strict=False)),
    ],
)
def test_an_answer_is_json_of_the_schema(served, given, grammar):
    for seed in range(3):
        (choice,) = asked(served, seed, response_format=given).choices
        want = alone(served, seed, grammar)
        assert (choice.message.content, choice.finish_reason) == (want.text, want.finish_reason)
        found = json.loads(want.text)
        assert found["kind"] in ("cat", "dog")
        assert {type(each) for each in found["tags"]} <= {bool}
        pieces = list(asked(served, seed, response_format=given, stream=True))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == want.text
        assert pieces[-1].choices[0].finish_reason == "stop"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    template = TEMPLATE + "{% if opened %}<think>\n{% elif closed %}<think></think>{% endif %}"
    file = tiny_file(tmp_path_factory.mktemp("thinking"), template, **ENDING)
    with Served(file) as made:
        yield made


@pytest.mark.parametrize(
    ("said", "template", "thought"),
    [
        ("<think>is it {}?</think>\n\n", {}, "is it {}?"), ("is it {}?</think>", {"opened": True}, "is it {}?"),
        ("", {}, None), ("", {"closed": True}, None),
    ],
)
def test_a_thought_comes_first(thinking, said, template, thought):
    """The grammar begins behind it; without the grammar the network would say more."""
    text = '{"kind": "cat", "tags": [true]}'
    for given in (form(SCHEMA, strict=True), {"type": "json_object"}):
        thinking.say(said + text + " and more")
        settings = {"response_format": given, "extra_body": {"chat_template_kwargs": template}}
        (choice,) = asked(thinking, 1, **settings).choices
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert getattr(choice.message, "reasoning_content", None) == thought
        if template.get("closed"):
            thinking.say("<think>x</think>" + text)
            assert "<think>" not in asked(thinking, 1, **settings).choices[0].message.content
    body = {"model": MODEL, "extra_body": {"chat_template_kwargs": template}}
    thinking.say(said + text + " and more")
    response = thinking.client().responses.create(
        **body, input="Which one?", text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    )
    assert response.output_text == text
    if template:
        return  # messages have no such field
    client = anthropic.Anthropic(base_url=thinking.url.removesuffix("/v1"), api_key="x", max_retries=0)
    thinking.say(said + text + " and more")
    message = client.messages.create(
        model=MODEL, messages=TALK, max_tokens=120,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    )
    assert [block.type for block in message.content] == (["thinking", "text"] if thought else ["text"])
    assert message.content[-1].text == text


def test_many_at_once(served):
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda seed: asked(served, seed, response_format=form(SCHEMA), n=2).choices, range(12)))
    for seed, choices in enumerate(found):
        for index, choice in enumerate(choices):
            assert choice.message.content == alone(served, seed + index, json_schema(SCHEMA, strict=False)).text


def test_a_text_is_free(served):
    free = asked(served, 1, response_format={"type": "text"}).choices[0].message.content
    assert free == asked(served, 1).choices[0].message.content


def test_any_object(served):
    content = asked(served, 1, response_format={"type": "json_object"}).choices[0].message.content
    assert content.startswith("{")


@pytest.mark.parametrize(
    "given",
    [
        form(ODD, strict=True), form({"type": "wat"}), form({"$ref": "http://127.0.0.1/x"}), form([]), form(None),
        form({"properties": {f"p{i}": True for i in range(5000)}}),
        form({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}, "$ref": "#/$defs/d0"}),
    ],
)
def test_schemas_that_are_refused(served, given):
    with pytest.raises(openai.BadRequestError, match=r"response_format: expected .*, got") as caught:
        asked(served, 1, response_format=given)
    assert caught.value.param == "response_format"
    assert caught.value.code == "invalid_json_schema"
    assert served.engine.stats().waiting == 0


def test_without_the_package(served, monkeypatch):
    monkeypatch.setattr(constraints, "find_spec", lambda name: None)
    said = r"text, since the server has no llguidance \(pip install 'kvcache-cpu\[grammar\]'\)"
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        asked(served, 1, response_format={"type": "json_object"})
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_parameter")


def test_a_grammar_that_fails_as_it_runs(served, monkeypatch):
    """Behind as many characters as no trial reads."""
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40))
    bomb = lark(f'start: P r0\nP: /[xy]{{40}}/\n{rules}\nr40: "a"')
    monkeypatch.setattr(constraints, "json_schema", lambda schema, strict: bomb)
    with pytest.raises(openai.BadRequestError, match="grammar: expected the next tokens within the limits of a step"):
        asked(served, 1, response_format=form(SCHEMA))


def test_a_slow_compilation_holds_up_its_own_request_alone(served, monkeypatch):
    """Nine of them leave threads for bodies without a grammar, and for bodies of a known one."""
    compile, reached, go_on = GrammarCompiler.compile, threading.Event(), threading.Event()
    slow = [{"const": i} for i in range(9)]
    asked(served, 1, response_format=form(SCHEMA))

    def slowly(self, grammar, *more):
        if "const" in grammar.text:
            reached.set()
            assert go_on.wait(60)
        return compile(self, grammar, *more)

    monkeypatch.setattr(GrammarCompiler, "compile", slowly)
    with ThreadPoolExecutor(9) as pool:
        waiting = [pool.submit(asked, served, 1, response_format=form(each)) for each in slow]
        assert reached.wait(60)
        for seed in range(10):
            asked(served, seed, max_tokens=3, **({"response_format": form(SCHEMA)} if seed % 2 else {}))
        assert not any(each.done() for each in waiting)
        go_on.set()
        assert [each.result().choices[0].message.content for each in waiting] == [str(i) for i in range(9)]


def test_a_grammar_beyond_a_limit_is_refused_by_its_name(served):
    """Once; the next body with it is told at once, and bodies of others are answered."""
    trials = served.model.trials
    trials.limits = trials.limits._replace(memory=24 << 20)
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="expected one that takes at most 24 MiB to compile") as caught:
            asked(served, 1, response_format=form({"type": "integer", "multipleOf": 99_999_989}))
        assert (caught.value.param, caught.value.code) == ("response_format", "invalid_json_schema")
        count = trials.count
    assert trials.count == count
    asked(served, 1, response_format=form({"const": "another"}))
    assert trials.count == count + 1
