"""`tool_choice` that requires a call: whatever the network would say, the answer calls a function by its schema."""

import json
import re

import anthropic
import openai
import pytest
from gguf_files import ARRAY, I32, U32
from http_servers import MODEL, TEMPLATE, Served, tiny_file

from kvcache.server import constraints, voices

pytest.importorskip("llguidance")
pytestmark = pytest.mark.one_build

TALK = [{"role": "user", "content": "Which one?"}]
PARAMETERS = {
    "type": "object", "required": ["kind"], "additionalProperties": False,
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
}
NAMES = ("choose", "weigh")


def tool(name, parameters=PARAMETERS, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool(name) for name in NAMES]
ONE = {name: {"type": "function", "function": {"name": name}} for name in NAMES}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    template = TEMPLATE + "{# calls in <tool_call> #}"
    file = tiny_file(tmp_path_factory.mktemp("tiny"), template, tokenizer__ggml__eos_token_id=(U32, 200))
    with Served(file) as made:
        yield made


def asked(served, seed, **more):
    settings = {"seed": seed, "max_tokens": 200, "temperature": 0.9, "tools": TOOLS, **more}
    return served.client().chat.completions.create(model=MODEL, messages=TALK, **settings)


def test_an_answer_calls(served):
    called = set()
    for seed in range(3):
        for choice, allowed in (("required", NAMES), *((ONE[name], (name,)) for name in NAMES)):
            (answer,) = asked(served, seed, temperature=2.0, tool_choice=choice, parallel_tool_calls=False).choices
            (call,) = answer.message.tool_calls
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            assert call.function.name in allowed
            found = json.loads(call.function.arguments)
            assert found["kind"] in ("cat", "dog")
            assert set(found) <= {"kind", "old"}
            called.add(call.function.name)
    assert called == {*NAMES}


def test_a_stream_calls_the_same(served):
    (answer,) = asked(served, 3, tool_choice="required", parallel_tool_calls=False).choices
    pieces = [piece.choices[0] for piece in asked(
        served, 3, tool_choice="required", parallel_tool_calls=False, stream=True
    )]
    functions = [call.function for piece in pieces for call in piece.delta.tool_calls or ()]
    assert "".join(each.name or "" for each in functions) == answer.message.tool_calls[0].function.name
    assert "".join(each.arguments or "" for each in functions) == answer.message.tool_calls[0].function.arguments
    assert pieces[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("dialect", ["qwen3_coder", "gemma4", "functiongemma", "harmony", "lfm2", "llama3"])
def test_every_dialect(served, dialect):
    """Over the same network, whose words these are not."""
    with Served(served.path, limits={"tool_parser": dialect}) as other:
        for seed in range(2):
            (choice,) = asked(
                other, seed, tool_choice=ONE["weigh"], parallel_tool_calls=False, max_tokens=400, tools=[
                    tool(name, {**PARAMETERS, "required": ["kind", "old"]}, strict=True) for name in NAMES
                ],
            ).choices
            (call,) = choice.message.tool_calls
            found = json.loads(call.function.arguments)
            assert (choice.finish_reason, call.function.name, choice.message.content) == ("tool_calls", "weigh", None)
            assert found["kind"] in ("cat", "dog")
            assert found["old"] in (True, False)


@pytest.mark.parametrize("dialect", ["qwen3_coder", "gemma4", "hermes"])
def test_odd_schemas_are_refused_by_name(served, dialect):
    with Served(served.path, limits={"tool_parser": dialect}) as other:
        for odd in ({"type": 3}, {"type": "array", "minItems": "x"}, {"anyOf": 3}, {"type": "wat"}):
            try:
                asked(other, 1, tools=[tool("f", {"properties": {"a": odd}})], tool_choice="required", max_tokens=3)
            except openai.BadRequestError as error:
                assert (error.param, error.code) == ("tools", "invalid_json_schema"), odd


def test_custom_tools(served):
    """Their texts follow a regex in JSON; a Lark grammar cannot be followed there."""
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]{3,5}"}}
    tools = [{"type": "custom", "custom": {"name": "spell", "format": form}}]
    choice = {"type": "custom", "custom": {"name": "spell"}}
    (answer,) = asked(served, 1, tools=tools, tool_choice=choice, parallel_tool_calls=False).choices
    (call,) = answer.message.tool_calls
    assert re.fullmatch("[ab]{3,5}", call.custom.input)
    form["grammar"] = {"syntax": "lark", "definition": 'start: "a"'}
    with pytest.raises(openai.BadRequestError, match="tools: expected a regex or text of 'spell' in JSON, got a lark"):
        asked(served, 1, tools=tools, tool_choice=choice)


def test_messages(served):
    client = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="x", max_retries=0)
    tools = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
    choice = {"type": "tool", "name": "weigh", "disable_parallel_tool_use": True}
    got = client.messages.create(model=MODEL, messages=TALK, max_tokens=200, tools=tools, tool_choice=choice)
    (block,) = got.content
    assert (block.type, block.name, got.stop_reason) == ("tool_use", "weigh", "tool_use")
    assert block.input["kind"] in ("cat", "dog")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([tool("f", {"type": "wat"})], "tools: expected .* got .*Invalid type: wat"),
        ([tool("f", {"propertyNames": {"maxLength": 3}}, strict=True)], "tools: expected .*propertyNames"),
        ([tool("f", {"properties": {f"p{i}": True for i in range(5000)}})], "tools: expected a JSON schema of at most"),
    ],
)
def test_parameters_that_are_refused(served, tools, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        asked(served, 1, tools=tools, tool_choice="required")
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_json_schema")


def test_without_the_package(served, monkeypatch):
    monkeypatch.setattr(voices, "knows_grammars", lambda: False)
    said = r"none or auto, since the server has no llguidance \(pip install 'kvcache-cpu\[grammar\]'\)"
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        asked(served, 1, tool_choice="required")
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_parameter")
    assert constraints.knows_grammars()


def test_a_strict_function_is_followed_where_a_call_may_be(served, monkeypatch):
    """The network is about to write another animal; what is not strict it writes as it likes, and texts it always may.

    The last one here: the network says texts from now on.
    """
    wrong = '{"name": "choose", "arguments": {"kind": "rat"}}'
    for strict, kinds in ((True, ("cat", "dog")), (False, ("rat",))):
        tools = [tool("choose", strict=strict), tool("weigh")]
        served.say(f"Hm. <tool_call>\n{wrong}\n</tool_call>")
        (choice,) = asked(served, 1, tools=tools, parallel_tool_calls=False, temperature=0).choices
        (call,) = choice.message.tool_calls
        assert (choice.message.content, call.function.name, choice.finish_reason) == ("Hm.", "choose", "tool_calls")
        assert json.loads(call.function.arguments)["kind"] in kinds
        for said, more in (("Not one [1] {", {}), (wrong, {"tool_choice": "none"})):
            served.say(said)
            assert asked(served, 1, tools=tools, temperature=0, **more).choices[0].message.content == said
    monkeypatch.setattr(voices, "knows_grammars", lambda: False)
    assert asked(served, 1, tools=[tool("choose")]).choices
    with pytest.raises(openai.BadRequestError, match="functions that are not strict, since the server has") as caught:
        asked(served, 1, tools=[tool("choose", strict=True)])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")


FORM = {
    "type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weigh", "arguments": {"kind": "cat"}}\n</tool_call>'


def on_chats(served, tools, choice):
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": FORM, "strict": True}}
    (got,) = asked(served, 1, tools=tools, tool_choice=choice, response_format=given).choices
    calls = [(call.function.name, call.function.arguments) for call in got.message.tool_calls or ()]
    return calls, got.message.content, getattr(got.message, "reasoning_content", None)


def on_responses(served, tools, choice):
    got = served.client().responses.create(
        model=MODEL, input="Which one?", tools=[{"type": "function", **each["function"]} for each in tools],
        tool_choice=choice, text={"format": {"type": "json_schema", "name": "n", "schema": FORM}},
    )
    calls = [(each.name, each.arguments) for each in got.output if each.type == "function_call"]
    thoughts = [each.content[0].text for each in got.output if each.type == "reasoning"]
    return calls, got.output_text or None, thoughts[0] if thoughts else None


def on_messages(served, tools, choice):
    client = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="x", max_retries=0)
    got = client.messages.create(
        model=MODEL, messages=TALK, max_tokens=200, tool_choice={"type": {"required": "any"}.get(choice, choice)},
        tools=[{"name": each["function"]["name"], "input_schema": PARAMETERS} for each in tools],
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": FORM}}},
    )
    found = {"thinking": [], "text": [], "tool_use": []}
    for block in got.content:
        found[block.type].append(block)
    calls = [(block.name, json.dumps(block.input)) for block in found["tool_use"]]
    thoughts = [block.thinking for block in found["thinking"]]
    return calls, found["text"][0].text if found["text"] else None, thoughts[0] if thoughts else None


@pytest.mark.parametrize("ask", [on_chats, on_responses, on_messages])
def test_calls_or_an_answer_in_the_form(tmp_path, ask):
    """The network may do either, and nothing else; where a call is required, it calls."""
    end = {"tokenizer__ggml__token_type": (ARRAY, [3 if token == 200 else 1 for token in range(256)], I32)}
    template = TEMPLATE + "{# <tool_call> <think></think> #}"
    with Served(tiny_file(tmp_path, template, tokenizer__ggml__eos_token_id=(U32, 200), **end)) as served:
        call, text = [("weigh", '{"kind": "cat"}')], '{"sure": true}'
        for said, tools, choice, want in (
            (f"<think>hm</think>\n{CALL}", TOOLS, "auto", (call, None, "hm")),
            (CALL, TOOLS, "auto", (call, None, None)),
            (f"<think>hm</think>\n\n{text}", TOOLS, "auto", ([], text, "hm")), (text, TOOLS, "auto", ([], text, None)),
            (text, [], "auto", ([], text, None)), (CALL, TOOLS, "required", (call, None, None)),
        ):
            served.say(said)
            if tools or ask is on_chats:
                assert ask(served, tools, choice) == want, said
        if ask is on_chats:
            served.say(CALL)
            assert ask(served, TOOLS, "none")[0] == []
            broken = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "wat"}, "strict": True}}
            for tools, given, field in (
                (TOOLS, broken, "response_format"), ([tool("f", {"type": "wat"})], {"type": "json_object"}, "tools"),
            ):
                with pytest.raises(openai.BadRequestError, match=f"{field}: expected .*Invalid type: wat"):
                    asked(served, 1, tools=tools, response_format=given)


def test_stop_strings_are_sought_in_content_alone(tmp_path):
    """The engine runs on where one is within a thought or a call."""
    file = tiny_file(tmp_path, TEMPLATE + "{# <tool_call> <think></think> #}")
    call = '<tool_call>\n{"name": "weigh", "arguments": {"kind": "STOP"}}\n</tool_call>'
    with Served(file) as served:
        for said, more, thought, content, calls in (
            ("<think>STOP a</think>\n\nb STOP", " c", "STOP a", "b ", 0), (f"a{call}", "", None, "a", 1),
            (f"{call} b STOP", call, None, "b ", 1), ("a ST", "", None, "a ST", 0),
        ):
            for n in (1, 2):
                served.say(said + more)
                got = asked(served, 1, stop=["STOP"], n=n)
                choice = got.choices[-1]
                assert (choice.message.content, len(choice.message.tool_calls or ())) == (content, calls), said
                assert getattr(choice.message, "reasoning_content", None) == thought
                assert choice.finish_reason == ("tool_calls" if calls else "stop")
                assert got.usage.completion_tokens == n * len(served.engine.tokenizer.encode(said).ids), said
