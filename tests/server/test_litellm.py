"""LiteLLM's calls over HTTP: both of its names for such a server, tools, streams, usage and errors."""

import json

import pytest
from http_servers import MODEL, SAID, SCHEMA, TALK, Served, tiny_file, tools_template

litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.one_build

TOOL = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": SCHEMA}}
CALLS = [("weather", {"city": "Köln"}), ("weather", {})]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tiny_file(tmp_path_factory.mktemp("tools"), tools_template("")), num_blocks=800) as made:
        yield made


def ask(served, said, provider, **more):
    if said is not None:
        served.say(said)
    options = {"api_base": served.url, "api_key": "x", "max_tokens": 300, "num_retries": 0, "messages": TALK, **more}
    return litellm.completion(model=f"{provider}/{MODEL}", **options)


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_tools(served, provider):
    whole = ask(served, SAID, provider, tools=[TOOL])
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.reasoning_content == "hm é"
    assert [(each.function.name, json.loads(each.function.arguments)) for each in choice.message.tool_calls] == CALLS
    asked = {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    made = litellm.stream_chunk_builder(list(ask(served, SAID, provider, **asked)))
    message = made.choices[0].message
    assert [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls] == CALLS
    assert message.content == "I look."
    assert made.usage.completion_tokens == whole.usage.completion_tokens
    assert made.usage.prompt_tokens_details.cached_tokens > 0


def test_errors(served):
    with pytest.raises(litellm.BadRequestError, match="temperature: expected"):
        ask(served, None, "hosted_vllm", temperature=-1.0)
    with pytest.raises(litellm.NotFoundError, match="model: expected tiny"):
        litellm.completion(model="hosted_vllm/other", api_base=served.url, api_key="x", messages=TALK, num_retries=0)
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(served, None, "openai", messages=[{"role": "user", "content": "x" * 100_000}])
