"""OpenAI's newer interface, asked by its client."""

import json

import openai
import pytest
from http_servers import MODEL, SAID, SCHEMA, Served, answer, post, tiny_file, tools_template

pytestmark = pytest.mark.one_build

TOOL = {"type": "function", "name": "weather", "description": "x", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": SCHEMA}}
TEMPLATE = tools_template("{{ reasoning_effort }}{{ verbosity }}", "{{ m.content or '' }}")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tiny_file(tmp_path_factory.mktemp("responses"), TEMPLATE), num_blocks=800) as made:
        yield made


def asked(**more):
    return {"model": MODEL, "input": "Which weather?", "tools": [TOOL], "max_output_tokens": 400, **more}


def ask(served, said, **more):
    served.say(said)
    return served.client().responses.create(**asked(**more))


def items(response):
    """The items without their ids."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, json.loads(item.arguments)))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


WANTED = [("reasoning", "hm é"), ("message", "I look."), ("weather", {"city": "Köln"}), ("weather", {})]


def size(served, messages, tools=(CHAT_TOOL,), **template):
    return len(served.alone.apply_chat_template(messages, tools=[*tools] or None, template=template, tokenize=True))


def test_a_whole_response_and_the_next_turn(served):
    got = ask(served, SAID, instructions="Be kind.", reasoning={"effort": "low"}, text={"verbosity": "high"})
    assert (items(got), got.status, got.output_text) == (WANTED, "completed", "I look.")
    assert got.created_at <= got.completed_at
    assert (got.instructions, got.error, got.incomplete_details, got.store) == ("Be kind.", None, None, False)
    variables = {"reasoning_effort": "low", "verbosity": "high"}
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Which weather?"}]
    usage = got.usage
    assert usage.input_tokens == size(served, talk, **variables)
    assert usage.output_tokens == len(SAID.encode())
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == len("\nhm é\n</think>".encode())
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in got.output if item.type == "function_call"
    ]
    history = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": "Which weather?"}, *(item.model_dump(exclude_none=True) for item in got.output),
        {"type": "web_search_call", "id": "x", "status": "completed"}, *results,
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    hosted = [TOOL, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]
    again = ask(
        served, "It rains.", input=history, tools=hosted, reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "high", "format": {"type": "text"}}, include=["reasoning.encrypted_content"], store=False,
        prompt_cache_key="x", extra_body={"client_metadata": {}},
    )
    assert items(again) == [("message", "It rains.")]
    calls = [{"type": "function", "function": {"name": "weather", "arguments": found}} for _, found in WANTED[2:]]
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "hm é", "tool_calls": calls}
    talk += [said, *[{"role": "tool", "content": "rain"}] * 2, {"role": "user", "content": "And?"}]
    assert again.usage.input_tokens == size(served, talk, **variables)
    assert again.usage.input_tokens_details.cached_tokens >= usage.input_tokens - 32


@pytest.mark.parametrize(
    ("said", "more", "status"),
    [
        (SAID, {}, "completed"), ("Hi <b> you \n", {}, "completed"), ("long", {"max_output_tokens": 2}, "incomplete"),
        ("<think>a", {}, "completed"), ("", {}, "completed"),
    ],
)
def test_a_stream_is_the_whole_response(served, said, more, status):
    whole = ask(served, said, **more)
    served.say(said)
    events = []
    with served.client().responses.stream(**asked(**more)) as stream:
        events = list(stream)
    final = events[-1].response
    assert items(final) == items(whole)
    assert (final.status, whole.status, events[-1].type) == (status, status, f"response.{status}")
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [*range(len(done))]
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == "".join(item.arguments for item in whole.output if item.type == "function_call")
    if status == "incomplete":
        assert final.incomplete_details.reason == "max_output_tokens"


SPACE = {"type": "namespace", "name": "sky", "tools": [TOOL]}
CUSTOM = {"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "sum"}]}
SPOKEN = '<tool_call>{"name": "a__sum", "arguments": {"input": "1+2"}}</tool_call>'


def test_tools_of_namespaces_and_custom_ones(served):
    tools = [CUSTOM, {"type": "web_search"}]
    wanted = [("function_call", "weather", "sky"), ("custom_tool_call", "sum", "a")]
    got = ask(served, SPOKEN, tools=[CUSTOM])
    assert [(item.type, item.name, item.namespace) for item in got.output if "call" in item.type] == wanted[1:]
    served.say(SPOKEN)
    with served.client().responses.stream(**asked(tools=tools)) as stream:
        events = list(stream)
    done = [event.item for event in events if event.type == "response.output_item.done" and "call" in event.item.type]
    assert [(item.type, item.name, item.namespace, item.input) for item in done] == [(*wanted[1], "1+2")]
    names = [event.type for event in events if "custom_tool_call_input" in event.type]
    assert names == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    said = '<tool_call>{"name": "sky__weather", "arguments": {"city": "Ulm"}}</tool_call>'
    first = ask(served, said, tools=[SPACE]).output[0]
    assert (first.type, first.name, first.namespace, first.arguments) == (*wanted[0], '{"city": "Ulm"}')
    talk = [first.to_dict(), done[0].to_dict()]
    talk += [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in talk]
    again = ask(served, "ok", input=talk, tools=[SPACE])
    flat = {"type": "function", "function": CHAT_TOOL["function"] | {"name": "sky__weather"}}
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("sky__weather", {"city": "Ulm"}), ("a__sum", {"input": "1+2"}))
    ]
    chat = [{"role": "assistant", "tool_calls": calls}, *[{"role": "tool", "content": "ok"}] * 2]
    assert again.usage.input_tokens == size(served, chat, [flat])
    with pytest.raises(openai.BadRequestError, match="tool_choice: expected names of tools"):
        ask(served, SPOKEN, tools=tools, tool_choice={"type": "custom", "name": "other"})


def test_choices_of_tools(served):
    assert items(ask(served, SAID, parallel_tool_calls=False)) == WANTED[:3]
    assert [kind for kind, _ in items(ask(served, SAID, tool_choice="none"))] == ["reasoning", "message"]
    assert [kind for kind, _ in items(ask(served, SAID, tools=[{"type": "web_search"}]))] == ["reasoning", "message"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    got = ask(served, SAID, tools=[TOOL, TOOL | {"name": "other"}], tool_choice=allowed)
    assert [kind for kind, _ in items(got)] == ["reasoning", "message"]


@pytest.mark.parametrize(
    ("more", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"input": None}, 400, "input"),
        ({"input": [1]}, 400, "input"),
        ({"input": [{"type": 1}]}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, 400, "input"),
        ({"input": [{"type": "hologram", "id": "x"}]}, 400, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, 400, "input"),
        ({"previous_response_id": "x"}, 400, "previous_response_id"),
        ({"conversation": "x"}, 400, "conversation"),
        ({"background": True}, 400, "background"),
        ({"prompt": {"id": "x"}}, 400, "prompt"),
        ({"unheard": 1}, 400, "unheard"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"tool_choice": {"type": "web_search"}}, 400, "tool_choice"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, 400, "input"),
        ({"reasoning": {"effort": "huge"}}, 400, "reasoning_effort"),
    ],
)
def test_what_is_refused_is_named(served, more, status, param):
    body = {name: value for name, value in asked(**more).items() if value is not None}
    got, data = answer(served.connect(post(json.dumps(body).encode(), "/v1/responses")))
    assert (got, json.loads(data)["error"]["param"]) == (status, param)


@pytest.mark.parametrize("plain", [False, True])
def test_a_prompt_that_is_too_long(served, tmp_path, plain):
    """The field is named, whatever makes the tokens."""
    with Served(tiny_file(tmp_path), limits={"plain_special_tokens": plain}) as made:
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            made.client().responses.create(model=MODEL, input="x" * 600)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_a_failure_ends_a_stream(served):
    served.say("hello")
    served.network.error = OSError("secret")
    try:
        events = list(served.client().responses.create(**asked(stream=True)))
    finally:
        served.network.error = None
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.message) == (
        "failed", "the request failed: OSError"
    )
