"""Prompts that clients ask to stay cached, and those that are run for that alone."""

import json
from urllib.request import urlopen

import anthropic
import pytest
from http_servers import MODEL, Served, tiny_file

from kvcache.server.message_bodies import chat_of_messages
from kvcache.server.retention import cache_options

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]

LONG = "A text of some blocks, which stays. " * 4


@pytest.fixture
def served(tmp_path):
    with Served(tiny_file(tmp_path)) as made:
        yield made


def pinned(served):
    return served.engine.stats().pinned_blocks


def test_a_prompt_stays(served):
    client = served.client()
    talk = [{"role": "user", "content": LONG}]
    got = client.chat.completions.create(
        model=MODEL, messages=talk, max_tokens=0, extra_body={"prompt_cache_options": {"ttl": "30m"}}
    )
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == ("", "length")
    assert got.usage.completion_tokens == 0
    assert pinned(served) == got.usage.prompt_tokens // 16 > 5
    again = client.chat.completions.create(model=MODEL, messages=talk, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= 16 * pinned(served) - 1  # the last one runs
    client.completions.create(model=MODEL, prompt="other " * 20, max_tokens=1)
    client.responses.create(model=MODEL, input="third " * 20, max_output_tokens=1)
    assert pinned(served) == got.usage.prompt_tokens // 16
    with urlopen(served.url.removesuffix("/v1") + "/metrics") as page:
        assert f'kvcache_pinned_blocks{{model="{MODEL}"}} {pinned(served)}\n' in page.read().decode()
    served.engine.clear_cache()
    assert pinned(served) == 0


def test_a_prompt_that_is_warmed_alone(served):
    client = served.client()
    for stream in (False, True):
        got = client.completions.create(model=MODEL, prompt=LONG + str(stream), max_tokens=0, stream=stream)
        if stream:
            assert [piece.choices[0].finish_reason for piece in got][-1] == "length"
    assert pinned(served) == 0
    ran = served.engine.stats().prefilled_tokens
    got = client.completions.create(model=MODEL, prompt=LONG + "True", max_tokens=1)
    assert got.usage.prompt_tokens_details.cached_tokens > 100
    assert served.engine.stats().prefilled_tokens - ran < 32


def test_messages(served):
    client = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="x", max_retries=0)
    talk = [{"role": "user", "content": [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]}]
    got = client.messages.create(model=MODEL, max_tokens=1, messages=talk)
    assert pinned(served) == (got.usage.input_tokens + got.usage.cache_creation_input_tokens) // 16


@pytest.mark.parametrize(
    ("body", "ttl"),
    [
        ({"messages": []}, None), ({"messages": [], "cache_control": {"type": "ephemeral"}}, "5m"),
        ({"messages": [], "system": [{"type": "text", "text": "x", "cache_control": {"ttl": "1h"}}],
          "tools": [{"name": "f", "cache_control": {"ttl": "5m"}}]}, "1h"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "content": [{"type": "text", "text": "x", "cache_control": {"ttl": "90s"}}]}]}]},
         "90s"),
    ],
)
def test_the_longest_mark_counts(body, ttl):
    chat = chat_of_messages({"model": MODEL, **json.loads(json.dumps(body))})
    assert chat.get("prompt_cache_options") == (None if ttl is None else {"ttl": ttl})


def test_times():
    assert [cache_options({"ttl": ttl}, "x") for ttl in ("1s", "30m", "24h")] == [1.0, 1800.0, 86400.0]
    assert cache_options({"mode": "explicit"}, "x") is None
    for ttl in ("0s", "30", "1d", "25h", "-1s", "99999h", " 1s"):
        with pytest.raises(ValueError, match="x: expected a ttl such as 30m, up to 24h, got"):
            cache_options({"ttl": ttl}, "x")
