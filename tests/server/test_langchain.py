"""LangChain's chats over HTTP: tools, and answers of a form, whole and streamed."""

import json

import pytest
from gguf_files import U32
from http_servers import MODEL, SAID, SCHEMA, TEMPLATE, Served, tiny_file, tools_template

langchain_openai = pytest.importorskip("langchain_openai")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.one_build

TOOL = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": SCHEMA}}
FORM = {
    "title": "answer", "type": "object", "required": ["kind", "tags"], "additionalProperties": False,
    "properties": {
        "kind": {"enum": ["cat", "dog"]}, "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tiny_file(tmp_path_factory.mktemp("tools"), tools_template("")), num_blocks=800) as made:
        yield made


@pytest.fixture(scope="module")
def thoughtless(tmp_path_factory):
    """A server whose random network has no thoughts, and may say anything."""
    template = TEMPLATE + "{# calls in <tool_call> #}"
    with Served(tiny_file(tmp_path_factory.mktemp("tiny"), template, tokenizer__ggml__eos_token_id=(U32, 200))) as made:
        yield made


def chat(served, **more):
    options = {"model": MODEL, "base_url": served.url, "api_key": "x", "max_retries": 0, "max_tokens": 300, **more}
    return langchain_openai.ChatOpenAI(**options)


def calls(message):
    return [(call["name"], call["args"]) for call in message.tool_calls]


def test_tools(served):
    """A call, its result, and the answer to it, in LangChain's messages."""
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = chat(served).bind_tools([TOOL])
    served.say(SAID)
    asked = [HumanMessage("What weather is it?")]
    called = bound.invoke(asked)
    assert called.content == "I look."
    assert calls(called) == [("weather", {"city": "Köln"}), ("weather", {})]
    assert called.response_metadata["finish_reason"] == "tool_calls"
    served.say(SAID)
    streamed = None
    for each in chat(served, stream_usage=True).bind_tools([TOOL]).stream(asked):
        streamed = each if streamed is None else streamed + each
    assert (streamed.content, calls(streamed)) == (called.content, calls(called))
    assert streamed.usage_metadata["output_tokens"] == called.usage_metadata["output_tokens"]
    served.say("It rains.")
    results = [ToolMessage("rain", tool_call_id=call["id"]) for call in called.tool_calls]
    answer = bound.invoke([*asked, called, *results])
    assert (answer.content, answer.tool_calls) == ("It rains.", [])
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


def test_a_tool_that_must_be_called(thoughtless):
    choose = {"type": "function", "function": {"name": "choose", "description": "x", "parameters": FORM}}
    asked = {"tool_choice": "choose", "parallel_tool_calls": False}
    bound = chat(thoughtless, temperature=0.9, seed=5).bind_tools([TOOL, choose], **asked)
    (call,) = bound.invoke("Which one?").tool_calls
    assert (call["name"], call["args"]["kind"] in ("cat", "dog")) == ("choose", True)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_answers_of_a_form(thoughtless, method):
    made = chat(thoughtless, temperature=0.9, seed=4).with_structured_output(FORM, method=method, include_raw=True)
    found = made.invoke("Which one?")
    assert found["parsing_error"] is None
    assert found["parsed"]["kind"] in ("cat", "dog")
    assert all(isinstance(tag, bool) for tag in found["parsed"]["tags"])


def test_json_mode(thoughtless):
    """The network says any object, and LangChain reads it."""
    made = chat(thoughtless, temperature=2.0, seed=3)
    found = made.with_structured_output(FORM, method="json_mode", include_raw=True)
    assert json.loads(found.invoke("Which one?")["raw"].content) is not None
