"""The server refuses settings, bodies and keys; namespaces never share."""

import json

import openai
import pytest
from http_servers import MODEL, Served, answer, fetched, post
from prometheus_client.parser import text_string_to_metric_families

from kvcache import SamplingParams
from kvcache.commands.serve import keys_of

pytestmark = pytest.mark.one_build

TALK = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


REFUSED = [
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {"type": "wat"}}}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),  # the network has no end tokens
    ({"reasoning_effort": "hi"}, "reasoning_effort"),
    ({"tools": [TOOL] * 1025}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 257}]}, "messages"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"prompt": "x"}, "prompt"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"prompt_cache_options": {"ttl": "25h"}}, "prompt_cache_options"),
    ({"prompt_cache_options": {"ttl": 30}}, "prompt_cache_options"),
    ({"prompt_cache_options": "30m"}, "prompt_cache_options"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 501}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"x": 1}}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"256": 1}}, "logit_bias"),
    ({"logit_bias": {"3": float("nan")}}, "logit_bias"),
    ({"logit_bias": {"3": 1e39}}, "logit_bias"),
    ({"logit_bias": {str(token): float("-inf") for token in range(256)}}, "logit_bias"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize(("changes", "name"), REFUSED, ids=[f"{name} {i}" for i, (_, name) in enumerate(REFUSED)])
def test_a_setting_that_is_refused_is_named(served, changes, name):
    body = json.dumps({"model": MODEL, "messages": TALK, **changes}).encode()
    status, data = answer(served.connect(post(body, "/v1/chat/completions")))
    error = json.loads(data)["error"]
    assert (status, error["param"], error["type"]) == (400, name, "invalid_request_error")
    assert "expected" in error["message"]


def test_settings_that_change_nothing_are_taken(served):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0, "user": "me", "store": False, "stop": None}
    served.client().chat.completions.create(model=MODEL, messages=TALK, max_tokens=1, **neutral)


def test_refusals_say_what_would_be_right(served):
    chats, messages, responses = "/v1/chat/completions", "/v1/messages", "/v1/responses"
    for path, changes, words in (
        (chats, {"messages": [{"role": "user", "content": 5}]}, 'messages: expected a "content" of text or parts, got'),
        (chats, {"messages": [{"role": "user"}]}, 'messages: expected a "content" beside the role user, got none'),
        (chats, {"stop": 5}, "stop: expected a text or a list, got int"),
        (chats, {"tools": [{"type": "function"}]}, "tools: expected an object function beside its type in each, got {"),
        (chats, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice: expected none or auto, since its chat "),
        (chats, {"tools": [{"type": "x"}]}, "tools: expected type function or custom in each, got {"),
        (messages, {"messages": [{"role": "user", "content": 5}]}, "messages: expected a text or a list, got int"),
        (messages, {"system": 5}, "system: expected a text or a list, got int"),
        (responses, {"input": 5}, "input: expected a text or a list, got int"),
        (responses, {"input": [{"role": "user", "content": 5}]}, "input: expected a text or a list, got int"),
        ("/api/chat", {}, f"path: expected one of this server, such as {chats}, got /api/chat"),
        ("/v1/models", {}, "method: expected "),
        ("/v1/images/generations", {}, f"path: expected one that answers with texts, such as {chats}, got /v1/images/"),
    ):
        body = {"model": MODEL, "max_tokens": 1, "messages": TALK, **changes}
        if path == responses:
            del body["max_tokens"], body["messages"]
        _, data = answer(served.connect(post(json.dumps(body).encode(), path)))
        assert json.loads(data)["error"]["message"].startswith(words), data


def test_what_a_body_lacks_is_named(served):
    body = {"model": MODEL, "messages": None}
    status, data = answer(served.connect(post(json.dumps(body).encode(), "/v1/chat/completions")))
    assert (status, json.loads(data)["error"]["message"]) == (400, "messages: expected one, got none")


@pytest.mark.parametrize("named", [{}, {"model": None}])
def test_a_body_without_a_model_runs_on_the_only_one(served, named):
    talk = {"messages": TALK, "max_tokens": 1, **named}
    for path, body in (
        ("/v1/chat/completions", talk), ("/v1/completions", {"prompt": "x", "max_tokens": 1, **named}),
        ("/v1/messages", talk), ("/v1/responses", {"input": "x", "max_output_tokens": 1, **named}),
        ("/v1/chat/completions/render", talk), ("/v1/completions/render", {"prompt": "x", **named}),
        ("/v1/messages/count_tokens", {"messages": TALK, **named}),
    ):
        status, data = answer(served.connect(post(json.dumps(body).encode(), path)))
        assert status == 200, (path, data)
        found = json.loads(data)
        found = found[0] if isinstance(found, list) else found
        assert found.get("model", MODEL) == MODEL


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post(b"{"), 400),
        (post(b"\xff\xfe"), 400),
        (post(b"[" * 100_000), 400),
        (post(b"[]"), 400),
        (post(b'{"model": "tiny", "prompt": "\\ud800"}'), 400),
        (post(b'{"model": "\\ud800", "prompt": "x"}'), 404),
        (post(b'{"model": "tiny", "prompt": []}'), 400),
        (post(b'{"model": "tiny", "prompt": [1, true]}'), 400),
        (post(b'{"model": "tiny", "prompt": [1, 300]}'), 400),
        (post(b'{"model": "tiny", "prompt": ' + json.dumps(["x"] * 129).encode() + b"}"), 400),
        (post(b"{}", kind="text/plain"), 415),
        (post(b"{}", host="attacker.example"), 400),
        (post(b"{}", host="10.0.0.1"), 400),
        (post(b"{}", host="[2001:db8::1]:80"), 400),
        (post(b"{}", host="[::1"), 400),
        (post(b"{}", host=""), 400),
        (post(b"{}", path="/v1/elsewhere"), 404),
        (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (post(b"x" * 5000, length=2**70), 400),
        (post(b"x" * 5000, length=5_000_000), 413),
    ],
)
def test_malformed_requests(served, request_bytes, status):
    got, body = answer(served.connect(request_bytes))
    assert got == status
    if body.startswith(b"{"):
        assert json.loads(body)["error"]["message"]
    served.engine.check()


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]", "localhost.", "LOCALHOST"])
def test_loopback_hosts(served, host):
    for port in ("", ":8000"):
        request = f"GET /v1/models HTTP/1.1\r\nHost: {host}{port}\r\n\r\n"
        assert answer(served.connect(request.encode()))[0] == 200


def test_an_oversize_body_without_a_length(path):
    with Served(path, limits={"max_body": 1000}) as served:
        chunks = b"".join(b"100\r\n" + b"x" * 256 + b"\r\n" for _ in range(5)) + b"0\r\n\r\n"
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        status, _ = answer(served.connect(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks))
        assert status == 413


def test_keys_and_namespaces(path):
    """Two namespaces never share; the keys of one do."""
    keys = keys_of(["# ours", "alpha one", "", "beta", "gamma one"])
    with Served(path, keys=keys) as served:
        for key in ("wrong", "alph", "alphaa", "one"):
            with pytest.raises(openai.AuthenticationError):
                served.client(key=key).models.list()
        foreign = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xfc\xff\r\n\r\n"
        assert answer(served.connect(foreign))[0] == 401
        for header in ({}, {"Authorization": "alpha"}, {"Authorization": "Basic alpha"}, {"Authorization": "Bearer"}):
            status, _, text = fetched(served, "/metrics", header)
            assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
        assert fetched(served, "/health")[0] == 200
        alone, cached = served.alone.complete("p" * 100, SamplingParams(max_tokens=4, seed=4)), []
        for key in ("alpha", "beta", "gamma", "beta"):
            got = served.client(key=key).completions.create(model=MODEL, prompt="p" * 100, max_tokens=4, seed=4)
            assert got.choices[0].text == alone.text
            cached.append(got.usage.prompt_tokens_details.cached_tokens)
        assert cached == [0, 0, 96, 96]
        assert [model.id for model in served.client(key="beta").models.list()] == [MODEL]


def test_the_counters_of_namespaces(path):
    """A key reads those of its own namespace, and one of the namespace metrics all."""
    keys = keys_of(["alpha one", 'beta t"w\\o', "gamma", "prometheus metrics"])
    with Served(path, keys=keys) as served:
        for key in ("alpha", "beta", "beta"):
            served.client(key=key).completions.create(model=MODEL, prompt="p" * 40, max_tokens=1)
        everyone = {"one": (1, 0), 't"w\\o': (2, 1)}
        for key, wanted in (("alpha", {"one": (1, 0)}), ("gamma", {}), ("prometheus", everyone)):
            status, _, text = fetched(served, "/metrics", {"Authorization": f"Bearer {key}"})
            assert status == 200
            found = {}
            for family in text_string_to_metric_families(text):
                if family.name in ("kvcache_namespace_queries", "kvcache_namespace_hits"):
                    for sample in family.samples:
                        found.setdefault(sample.labels["namespace"], []).append(sample.value)
            assert {space: (max(counts), min(counts)) for space, counts in found.items()} == wanted


@pytest.mark.parametrize("lines", [[], ["a", "a b"], ["a b c"], ["schlüssel a"]])
def test_wrong_keys(lines):
    with pytest.raises(ValueError, match="api_keys: expected"):
        keys_of(lines)
