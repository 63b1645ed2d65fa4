"""Bodies of any shape: they become tokens, or are refused by a message; nothing else happens."""

import copy
import json
from functools import partial

import pytest
from http_servers import MODEL, Served, answer, post, tiny_file
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from kvcache import BatchEngine
from kvcache.server.completion_bodies import asked_of_completion
from kvcache.server.fields import checked
from kvcache.server.fingerprints import Fingerprints
from kvcache.server.message_bodies import MESSAGES, asked_of_message
from kvcache.server.prompts import Prompts
from kvcache.server.response_bodies import RESPONSES, asked_of_response
from kvcache.server.served_model import ServedModel
from kvcache.server.vector_bodies import RERANK

pytestmark = [pytest.mark.exhaustive, pytest.mark.one_build]

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{{ tools | tojson }}"
)
WORDS = [
    "user", "assistant", "system", "developer", "tool", "function", "text", "refusal", "message", "reasoning",
    "function_call", "function_call_output", "input_text", "output_text", "tool_use", "tool_result", "thinking", "auto",
    "document", "search_result", "image", "input_file", "file", "base64", "server_tool_use", "web_search_tool_result",
    "mcp_call", "local_shell_call", "local_shell_call_output", "compaction", "item_reference", "tool_search_output",
    "tool_search_call", "additional_tools", "mcp_approval_response", "tool_reference", "namespace", "adaptive",
    "data:text/plain;base64,aGk=",
    "any", "none", "required", "allowed_tools", "json_schema", "json_object", "custom", "f", "low", "high", "enabled",
    "{}", '{"a": 1}', "\ud800", "é", "",
]
KEYS = [
    "cache_control", "prompt_cache_breakpoint", "ttl", "segment", "scope",
    "type", "role", "content", "text", "name", "function", "arguments", "parameters", "input_schema", "tool_calls",
    "tools", "mode", "id", "call_id", "output", "summary", "thinking", "input", "effort", "format", "schema", "refusal",
    "source", "data", "media_type", "file", "file_data", "title", "action", "reason", "namespace", "encrypted_content",
    "tool_use_id", "allowed_tools", "properties", "strict", "json_schema", "reasoning_content",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


def item(**fields):
    """Objects with mostly these fields, and some of any kind."""
    return st.fixed_dictionaries({}, optional={name: st.just(value) | VALUES for name, value in fields.items()})


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TALKS = st.lists(
    VALUES | item(role="user", content="x") | item(role="assistant", content=None, tool_calls=[CALL])
    | item(role="tool", content=[{"type": "text", "text": "x"}], tool_call_id="1") | item(role="system", content="x")
    | item(role="user", content=[{"type": "tool_result", "tool_use_id": "1", "content": "x"}])
    | item(type="function_call", name="f", arguments="{}", call_id="1") | item(type="reasoning", summary=[])
    | item(type="function_call_output", call_id="1", output="x") | item(role="assistant", content="x")
    | item(type="local_shell_call", call_id="1", action={}) | item(type="local_shell_call_output", call_id="1")
    | item(type="tool_search_output", tools=[]) | item(role="user", content=[{"type": "document", "source": {}}])
    | item(role="user", content=[{"type": "text", "text": "x", "segment": True}, {"type": "text", "text": " y"}]),
    max_size=4,
) | VALUES

CLEARING = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1}}
CLEARING |= {"keep": {"type": "tool_uses", "value": 0}}
EDITS = st.fixed_dictionaries({"edits": st.lists(
    item(**CLEARING, clear_tool_inputs=True) | st.just(CLEARING) | st.just(CLEARING | {"kvcache_mode": "mask"})
    | item(type="clear_thinking_20251015", keep={"type": "thinking_turns", "value": 1}), max_size=2,
)})


def bodies(names, **known):
    """Bodies with some of the fields of an interface, of any values."""
    some = st.dictionaries(st.sampled_from(sorted(names)), VALUES, max_size=4)
    whole = st.fixed_dictionaries({"model": st.just(MODEL), **known})
    other = {"tools": st.just([TOOL]) | st.lists(VALUES, max_size=2), "context_management": EDITS}
    others = st.fixed_dictionaries({}, optional={name: other[name] for name in other if name in ("tools", *names)})
    return st.tuples(some, others, whole).map(lambda parts: {**parts[0], **parts[1], **parts[2]})


@pytest.fixture(scope="module", params=[False, True])
def prompts(request, tmp_path_factory):
    engine = BatchEngine.from_pretrained(tiny_file(tmp_path_factory.mktemp("hostile"), TEMPLATE), num_blocks=40)
    yield Prompts(engine, request.param)
    engine.close()


def expect_tokens_or_a_message(prompts, make):
    try:
        (prompt,) = prompts.of(make(prompts._engine.sampling_params))
        assert len(prompt.tokens) >= len(prompt.own) > 0
        assert all(0 < stop <= len(prompt.own) for stop, _ in prompt.kept or ())
    except (TypeError, ValueError, HTTPException) as error:
        name, found, _ = str(error).partition(": expected")
        assert found, error
        assert " " not in name, error


@given(body=bodies(["tool_choice", "parallel_tool_calls", "reasoning_effort", "reasoning", "thinking",
                    "verbosity", "chat_template_kwargs", "context_management",
                    "response_format", "stop", "n", "logprobs", "max_tokens", "cache_salt"], messages=TALKS))
def test_chats(prompts, body):
    expect_tokens_or_a_message(prompts, lambda defaults: asked_of_completion(body, True, defaults))


@given(body=bodies(MESSAGES, messages=TALKS, max_tokens=st.just(3)))
def test_messages(prompts, body):
    def asked(defaults):
        given = checked(body, MESSAGES, ("model", "messages"))
        found = asked_of_message(given, defaults)
        Fingerprints().note(given, None, "msg", 1)
        return found

    expect_tokens_or_a_message(prompts, asked)


@given(body=bodies(RESPONSES, input=TALKS))
def test_responses(prompts, body):
    def asked(defaults):
        return asked_of_response(checked(body, RESPONSES, ("model", "input")), defaults)

    expect_tokens_or_a_message(prompts, asked)


@pytest.mark.parametrize("levels", [90, 400, 900])
def test_deep_values_are_refused(tmp_path, levels):
    """JSON has at most about a thousand levels, which encoders and templates may not go down."""
    deep = {"type": "allowed_tools", "mode": "auto", "tools": []}
    for _ in range(levels // 2):
        deep = {"type": "allowed_tools", "mode": "auto", "tools": [deep]}
    function = {"name": "f", "parameters": deep}
    talk = [{"role": "user", "content": "x"}]
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": deep}]}
    asked = [
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", **function}], "tool_choice": deep}),
        ("/v1/messages", {"messages": [*talk, use], "max_tokens": 1}),
        ("/v1/messages", {"messages": talk, "max_tokens": 1, "tools": [{"name": "f", "input_schema": deep}]}),
        ("/v1/chat/completions", {"messages": talk, "tools": [{"type": "function", "function": function}]}),
        ("/v1/chat/completions", {"messages": talk, "response_format": {"type": "json_object", "schema": deep}}),
        ("/v1/chat/completions", {"messages": talk, "chat_template_kwargs": {"x": deep}, "metadata": deep}),
    ]
    with Served(tiny_file(tmp_path, TEMPLATE)) as served:
        for path, body in asked:
            data = json.dumps({"model": MODEL, "max_tokens" if "chat" in path else "top_p": 1, **body}).encode()
            status, found = answer(served.connect(post(data, path)))
            assert status == 400 or (status == 200 and levels == 90), found


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"type": ["integer", "null"]}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": SCHEMA, "strict": True}
FORM = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
HINTS = [
    {"action_type": "prefetch", "payload": {"resume_in": 2, "ttl": "5m"}},
    {"action_type": "demote", "payload": {"after": 1}},
]
BLOCKS = [
    {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "f"}]},
    {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
]
ITEMS = [
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
    {"type": "local_shell_call", "call_id": "2", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "tool_search_output", "tools": [{"type": "function", **FUNCTION}]},
    {"role": "user", "content": [{"type": "input_text", "text": "x\n", "segment": True}]},
    {"role": "user", "content": "x"},
]
TALK = [
    {"role": "user", "content": [{"type": "file", "file": {"file_data": "x", "filename": "x"}}]},
    {"role": "assistant", "content": "x", "reasoning_content": "x", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]
WHOLE = [  # a method of ServedModel, and a body that it takes
    (partial(ServedModel.complete, chat=True), {
        "messages": TALK, "tools": [TOOL], "context_management": {"edits": [CLEARING]}, "max_tokens": 1, "stop": ["x"],
        "logit_bias": {"5": 1}, "thinking": {"type": "enabled"}, "prompt_cache_options": {"ttl": "5m"},
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
    }),
    (partial(ServedModel.complete, chat=True), {
        "messages": TALK[:1], "max_tokens": 1, "response_format": {"type": "json_schema", "json_schema": FORM},
    }),
    (partial(ServedModel.complete, chat=False), {"prompt": [[1, 2], [3]], "max_tokens": 1, "stop_token_ids": [3]}),
    (ServedModel.message, {
        "messages": [{"role": "user", "content": BLOCKS}], "max_tokens": 1, "tool_choice": {"type": "auto"},
        "tools": [{"name": "f", "input_schema": SCHEMA}], "system": BLOCKS[2:], "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "diagnostics": {"previous_message_id": None},
    }),
    (ServedModel.respond, {
        "input": ITEMS, "max_output_tokens": 1, "text": {"format": FORM}, "reasoning": {"effort": "low"},
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    }),
    (ServedModel.hint, {
        "messages": TALK[:1], "branches": [TALK[1:]], "endpoint": "/v1/chat/completions",
        "kv_hints": {"actions": HINTS},
        "nvext": {"cache_control": {"type": "ephemeral", "ttl": "5m"}, "agent_hints": {"speculative_prefill": False}},
    }),
    (ServedModel.embed, {"input": ["x"], "encoding_format": "float", "dimensions": 8}),
    (lambda served, body, space: checked(body, RERANK, ("model", "query", "documents")), {
        "query": "x", "documents": ["x", {"text": "x"}], "top_n": 1,
    }),  # this tokenizer has no token that a reranker needs
    (ServedModel.tokenize, {"messages": TALK}), (ServedModel.detokenize, {"tokens": [1]}),
]


def places(value, path=()):
    """The path of each value within a body."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


@pytest.mark.parametrize("number", range(len(WHOLE)))
@pytest.mark.parametrize("wrong", [None, -1, 10**30, "\ud800", [], [[]], {}, {"type": []}, [{"type": {}}]])
def test_what_is_wrong_at_any_place_of_a_body_has_a_name(prompts, number, wrong):
    ask, body = WHOLE[number]
    body = {"model": MODEL, **body}
    served = ServedModel(prompts._engine, MODEL, pooling="mean")
    ask(served, copy.deepcopy(body), None)
    for path in places(body):
        changed = copy.deepcopy(body)
        owner = changed
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = wrong
        try:
            ask(served, changed, None)
        except (TypeError, ValueError, HTTPException) as error:
            name, found, _ = str(getattr(error, "detail", error)).partition(": expected")
            assert found, (path, error)
            assert " " not in name, (path, error)
