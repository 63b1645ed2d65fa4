"""Conversations over HTTP: what reaches the template, and who shares prefixes."""

import json

import pytest
from http_servers import MODEL, Served, answer, fetched, post, tiny_file

from kvcache import SamplingParams

pytestmark = pytest.mark.one_build

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# Refuses system messages that are not the first, and turns that do not alternate.
STRICT = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}|"
    "{% endfor %}{{ reasoning_effort }}{{ enable_thinking }}{{ more }}>"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tiny_file(tmp_path_factory.mktemp("strict"), STRICT)
    with Served(path, {"k": "one", "other": "two", "prometheus": "metrics"}) as made:
        yield made


def tokens(served, **body):
    """The number of tokens of a conversation."""
    client = served.client(key="k")
    got = client.chat.completions.create(model=MODEL, max_tokens=1, extra_body=body, messages=body["messages"])
    return got.usage.prompt_tokens


def test_what_reaches_the_template(served):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 77}'}}
    talk = [
        {"role": "developer", "content": "a"}, {"role": "system", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "d"}]},
        {"role": "system", "content": "e"}, {"role": "user", "content": "f"},
    ]
    text = "f;s:a\n\nb|u:c|a:77|t:d|u:e\n\nf|lowTruemo>"
    asked = {"tools": [TOOL], "reasoning_effort": "low", "chat_template_kwargs": {"more": "mo"}}
    assert tokens(served, messages=talk, **asked) == len(text)


def test_bodies_with_another_salt_share_nothing(served):
    def cached(key, **more):
        body = {"model": MODEL, "prompt": "p" * 100, "max_tokens": 1, **more}
        request = post(json.dumps(body).encode()).replace(b"\r\n", f"\r\nAuthorization: Bearer {key}\r\n".encode(), 1)
        return json.loads(answer(served.connect(request))[1])["usage"]["prompt_tokens_details"]["cached_tokens"]

    asked = [("k", {}), ("k", {"cache_salt": "a"}), ("k", {"cache_salt": "b"}), ("other", {"cache_salt": "a"})]
    assert [cached(key, **more) for key, more in asked] == [0, 0, 0, 0]
    assert [cached(key, **more) for key, more in asked] == [96, 96, 96, 96]
    _, _, text = fetched(served, "/metrics", {"Authorization": "Bearer k"})
    queries = [line for line in text.splitlines() if line.startswith("kvcache_namespace_query_tokens_total")]
    (line,) = [line for line in queries if '"one"' in line]
    assert int(line.split()[-1]) >= 600, "all salts of a key count as its namespace"
    assert not any('"two"' in line or "'a'" in line for line in queries)


def test_the_answer_is_that_of_the_conversation(served):
    talk = [{"role": "user", "content": "hi"}]
    got = served.client(key="k").chat.completions.create(
        model=MODEL, messages=talk, max_tokens=8, seed=3, tools=[TOOL], tool_choice="none", reasoning_effort="none"
    )
    variables = {"reasoning_effort": "none", "enable_thinking": False}
    prompt = served.alone.apply_chat_template(talk, tools=[TOOL], template=variables, tokenize=True)
    assert got.choices[0].message.content == served.alone.complete(prompt, SamplingParams(max_tokens=8, seed=3)).text
