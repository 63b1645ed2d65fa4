"""Thoughts and calls of tools over HTTP, asked by OpenAI's client."""

import json
import sys
from threading import Semaphore

import openai
import pytest
from http_servers import MODEL, SAID, SCHEMA, TALK, Served, answer, post, tiny_file, tools_template

from kvcache.engine import template_sandbox

pytestmark = pytest.mark.one_build

TOOL = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": SCHEMA}}
TEMPLATE = tools_template("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}")


CUT = '<tool_call>{"name": "weather", "arguments": {"city": "K'
BROKEN = '<tool_call>{"name": "weather", "arguments": {"city": K}}</tool_call>'


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tiny_file(tmp_path_factory.mktemp("tools"), TEMPLATE), num_blocks=800) as made:
        yield made


def ask(served, said, **asked):
    served.say(said)
    return served.client().chat.completions.create(
        **{"model": MODEL, "messages": TALK, "tools": [TOOL], "max_tokens": 300, **asked}
    )


def test_a_whole_answer(served):
    got = ask(served, SAID)
    (choice,) = got.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.reasoning_content == "hm é"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Köln"}, {}]
    ids = {call.id for call in choice.message.tool_calls}
    assert len(ids) == 2
    assert {len(each) for each in ids} == {9}
    thoughts = len(served.engine.tokenizer.encode("\nhm é\n</think>").ids)
    assert got.usage.completion_tokens_details.reasoning_tokens == thoughts
    assert got.usage.completion_tokens == len(served.engine.tokenizer.encode(SAID).ids)


@pytest.mark.parametrize(
    "said", [SAID, "Just <b> text. \n", '<tool_call>{"name": "weather", "argu', "<think>never ends", CUT, BROKEN]
)
def test_a_stream_is_the_whole_answer(served, said):
    whole = ask(served, said).choices[0]
    served.say(said)
    with served.client().chat.completions.stream(
        model=MODEL, messages=TALK, tools=[TOOL], max_tokens=300, stream_options={"include_usage": True}
    ) as stream:
        thoughts = "".join(
            getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
            for event in stream if event.type == "chunk" and event.chunk.choices
        )
        final = stream.get_final_completion()
    message, wanted = final.choices[0].message, whole.message
    assert (final.choices[0].finish_reason, message.content or "") == (whole.finish_reason, wanted.content or "")
    assert thoughts == (getattr(wanted, "reasoning_content", None) or "")
    calls = [
        [(call.function.name, call.function.arguments) for call in each.tool_calls or []] for each in (message, wanted)
    ]
    assert calls[0] == calls[1]
    assert final.usage.completion_tokens_details.reasoning_tokens <= final.usage.completion_tokens


def test_arguments_are_streamed_while_they_are_written(served):
    """The network stops within them, and what it has written comes."""
    name = "A long name of a city "
    said = SAID.replace("Köln", name * 8)

    def calls(data):
        events = [json.loads(line[6:]) for line in data.split(b"\n")[:-1] if line.startswith(b"data: {")]
        found = [call for each in events for call in each["choices"][0]["delta"].get("tool_calls", [])]
        return [call for call in found if call["index"] == 0]

    def arguments(data):
        return "".join(call["function"]["arguments"] for call in calls(data))

    served.say(said)
    served.network.closed = True
    for _ in range(len(said[: said.index("city") + 60].encode()) + 20):
        served.network.permits.release()
    body = {"model": MODEL, "messages": TALK, "tools": [TOOL], "max_tokens": 500, "stream": True}
    connection, data = served.connect(post(json.dumps(body).encode(), "/v1/chat/completions")), b""
    while "A long" not in arguments(data):
        data += connection.recv(1 << 16)
    assert name * 8 not in arguments(data)
    served.network.open()
    while b"[DONE]" not in data:
        data += connection.recv(1 << 16)
    connection.close()
    served.network.permits = Semaphore(0)  # some were left
    first, *others = calls(data)
    assert (first["function"], len(first["id"])) == ({"name": "weather", "arguments": ""}, 9)
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in others)
    assert json.loads(arguments(data)) == {"city": name * 8}


@pytest.mark.parametrize(("said", "arguments", "content"), [(CUT, '{"city": "K', None), (BROKEN, '{"city": ', "K}}")])
def test_a_call_that_is_not_whole_is_no_reason_to_end(served, said, arguments, content):
    """Its arguments are no JSON, so that no client runs it."""
    (choice,) = ask(served, said).choices
    (call,) = choice.message.tool_calls
    assert (call.function.arguments, choice.message.content, choice.finish_reason) == (arguments, content, "stop")
    assert ask(served, said, max_tokens=len(CUT) - 1).choices[0].finish_reason == "length"


def test_custom_tools(served):
    """They are functions of one text for the network, and their calls have that text."""
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9+]+"}}
    custom = {"type": "custom", "custom": {"name": "sum", "description": "Adds.", "format": grammar}}
    said = 'So.<tool_call>{"name": "sum", "arguments": {"input": "1+2"}}</tool_call>'
    first = ask(served, said, tools=[custom]).choices[0]
    (call,) = first.message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "sum", "1+2")
    assert (first.finish_reason, first.message.content) == ("tool_calls", "So.")
    deltas = [
        call.model_dump(exclude_none=True) for chunk in ask(served, said, tools=[custom], stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert [each.get("custom") for each in deltas] == [{"name": "sum", "input": ""}, {"input": "1+2"}]
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    talk = [*TALK, first.message.model_dump(exclude_none=True), result]
    got = ask(served, "3", messages=talk, tools=[custom])
    function = {"name": "sum", "description": "Adds.\n\nThe input follows this grammar, a regex:\n[0-9+]+"}
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function["parameters"] = text | {"additionalProperties": False}
    calls = [{"type": "function", "function": {"name": "sum", "arguments": {"input": "1+2"}}}]
    prompt = served.engine.apply_chat_template(
        [*TALK, {"role": "assistant", "content": "So.", "tool_calls": calls}, {"role": "tool", "content": "3"}],
        tools=[{"type": "function", "function": function}], tokenize=True,
    )
    assert got.usage.prompt_tokens == len(prompt)
    choice = {"type": "custom", "custom": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="tool_choice: expected names of tools"):
        ask(served, said, tools=[custom], tool_choice=choice)
    for form in ({"type": "xml"}, {"type": "grammar", "grammar": {"syntax": "bnf", "definition": ""}}):
        with pytest.raises(openai.BadRequestError, match=r"tools\.format: expected"):
            ask(served, said, tools=[{"type": "custom", "custom": {"name": "x", "format": form}}])


def test_choices_of_the_client(served):
    plain = ask(served, SAID, tool_choice="none").choices[0]
    assert (plain.finish_reason, plain.message.tool_calls) == ("stop", None)
    assert "<tool_call>" in plain.message.content
    assert "<tool_call>" in ask(served, SAID, tools=openai.omit).choices[0].message.content
    assert len(ask(served, SAID, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    other = TOOL | {"function": {"name": "other"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [other]}}
    assert ask(served, SAID, tools=[TOOL, other], tool_choice=allowed).choices[0].message.tool_calls is None
    broken = ask(served, '<tool_call>{"name": weather}</tool_call>').choices[0]
    assert (broken.finish_reason, broken.message.content) == ("stop", '<tool_call>{"name": weather}</tool_call>')
    cut = ask(served, SAID, max_tokens=60).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)


def test_a_conversation_goes_on(served):
    """The calls, their results and the thoughts of an answer are in the next prompt, whose beginning is cached."""
    first = ask(served, SAID)
    said = first.choices[0].message
    talk = [
        *TALK, said.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in said.tool_calls),
    ]
    got = ask(served, "It rains.", messages=talk)
    assert got.choices[0].message.content == "It rains."
    prompt = served.engine.apply_chat_template([*TALK, {"role": "assistant", "content": "x"}], tools=[TOOL])
    assert got.usage.prompt_tokens > len(prompt.encode()) + 8
    assert got.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16


def test_log_probabilities_of_all_tokens(served):
    """Tokens of marks and thoughts have some too."""
    got = ask(served, SAID, logprobs=True, top_logprobs=1)
    wanted = [entry.token for entry in got.choices[0].logprobs.content]
    assert len(wanted) == len(served.engine.tokenizer.encode(SAID).ids)
    found = []
    for chunk in ask(served, SAID, logprobs=True, stream=True):
        if chunk.choices[0].logprobs is not None:
            found += [entry.token for entry in chunk.choices[0].logprobs.content]
    assert found == wanted


def test_a_broken_schema_breaks_no_answer(tmp_path):
    """Its parts may be of any kind."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<function="
    with Served(tiny_file(tmp_path, template)) as served:
        said = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
        for properties in (None, [1], {"a": 1}, {"a": {"type": 3}}, {"a": {"anyOf": 3}}, {"a": {"type": [[1]]}}):
            served.say(said)
            function = {"name": "f", "parameters": {"properties": properties}}
            body = {"model": MODEL, "messages": TALK, "tools": [{"type": "function", "function": function}]}
            request = post(json.dumps({**body, "max_tokens": 200}).encode(), "/v1/chat/completions")
            status, data = answer(served.connect(request))
            message = json.loads(data)["choices"][0]["message"]
            assert status == 200
            assert message["content"] in (None, said)


def test_the_dialect_may_be_named(tmp_path):
    with Served(tiny_file(tmp_path), limits={"tool_parser": "hermes"}) as served:
        assert ask(served, SAID).choices[0].finish_reason == "tool_calls"
    with Served(tiny_file(tmp_path)) as served:
        found = ask(served, SAID)
        assert (found.choices[0].finish_reason, len(found.warnings)) == ("stop", 1)
        assert found.warnings[0].startswith("tools: left out of the prompt, since the chat template has no words for")
        assert "warnings" not in ask(served, SAID, tool_choice="none").model_extra
    with pytest.raises(ValueError, match="tool_parser: expected one of"):
        Served(tiny_file(tmp_path), limits={"tool_parser": "x"})


def test_completions_need_no_package_of_templates(tmp_path, monkeypatch):
    """Routes that need it answer an error of their interface, which names the extra."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    template_sandbox._compiled_or_refused.cache_clear()
    with Served(tiny_file(tmp_path, TEMPLATE)) as served:
        served.say(SAID)
        assert served.client().completions.create(model=MODEL, prompt="x", max_tokens=1).choices
        for path, body in (
            ("chat/completions", {"messages": TALK, "tools": [TOOL]}), ("responses", {"input": "x"}),
            ("chat/completions", {"messages": TALK, "stream": True}), ("chat/completions/render", {"messages": TALK}),
            ("messages", {"messages": TALK, "max_tokens": 1}), ("messages/count_tokens", {"messages": TALK}),
        ):
            status, text = answer(served.connect(post(json.dumps(body | {"model": MODEL}).encode(), f"/v1/{path}")))
            error = json.loads(text)["error"]
            assert (status, error["type"]) == (501, "api_error" if path.startswith("messages") else "server_error")
            assert error["message"].endswith("the package jinja2, 3.1.6 or later: pip install 'kvcache-cpu[text]'")


def test_silent_streams_say_that_they_live(served, monkeypatch):
    monkeypatch.setattr("kvcache.server.sent_events._SILENCE", 0.02)
    served.network.waiting.clear()
    served.network.closed = True
    served.say("late")
    body = {"model": MODEL, "messages": TALK, "stream": True}
    connection = served.connect(post(json.dumps(body).encode(), "/v1/chat/completions"))
    data = b""
    while data.count(b": ping\n\n") < 3:
        data += connection.recv(1 << 16)
    served.network.open()
    while b"[DONE]" not in data:
        data += connection.recv(1 << 16)
    connection.close()
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(each["choices"][0]["delta"]["content"] for each in events) == "late"


def test_a_reader_who_is_slow_gets_no_comment_behind_the_end(served, monkeypatch):
    """While an event is on its way, nothing else is sent, and after the last one nothing at all."""
    monkeypatch.setattr("kvcache.server.sent_events._SILENCE", 0.001)
    body = {"model": MODEL, "messages": TALK, "stream": True, "max_tokens": 300, "logprobs": True, "top_logprobs": 20}
    served.say("x" * 200)
    connection = served.connect(post(json.dumps(body).encode(), "/v1/chat/completions"), receive_buffer=4096)
    status, data = answer(connection)
    assert (status, data.count(b"data: [DONE]")) == (200, 1)
    assert b": ping" not in data.partition(b"data: [DONE]")[2]
    served.engine.check()
