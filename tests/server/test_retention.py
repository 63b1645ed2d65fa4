"""Prompts that clients ask to stay cached, and those that are run for that alone."""

import json
from urllib.request import urlopen

import anthropic
import openai
import pytest
from http_servers import MODEL, Served, tiny_file

from kvcache import SamplingParams
from kvcache.server.message_bodies import asked_of_message
from kvcache.server.retention import cache_options

pytestmark = pytest.mark.one_build

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


def tokens_of(served, messages):
    return served.alone.apply_chat_template(messages, tokenize=True)


def common(served, one, other):
    pairs = enumerate(zip(tokens_of(served, one), tokens_of(served, other), strict=False))
    return next((place for place, (a, b) in pairs if a != b), None)


def stops(served):
    """How many tokens each pin has, ascending, and its seconds."""
    return sorted((pin.stop, pin.seconds) for pin in served.engine._steps._scheduler.pins.all)


def test_a_block_stays_up_to_its_end(served):
    """Each mark has a time of its own; what follows it is not kept."""
    text = [{"type": "text", "text": "A" * 70}, {"type": "text", "text": "B" * 50}, {"type": "text", "text": "C" * 40}]
    text[0]["prompt_cache_breakpoint"], text[1]["prompt_cache_breakpoint"] = {"ttl": "2h"}, {"mode": "explicit"}
    client = served.client()
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1)
    plain = [{"role": "user", "content": "A" * 70 + "B" * 50 + "C" * 40}]
    ends = [
        common(served, plain, [{"role": "user", "content": said + "x"}]) for said in ("A" * 70, "A" * 70 + "B" * 50)
    ]
    wanted = [(-(-end // 16) * 16, seconds) for end, seconds in zip(ends, (7200.0, 300.0), strict=True)]
    assert stops(served) == wanted
    assert wanted[-1][0] < len(tokens_of(served, plain)) - 24


def test_marks_of_messages(served):
    client = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="x", max_retries=0)
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "S" * 40, **mark}, {"type": "text", "text": "T" * 30}]
    talk = [
        {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": [{"type": "text", "text": "Y" * 30}]},
        {"role": "user", "content": [
            {"type": "text", "text": "U" * 40, "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "V" * 60},
        ]},
    ]
    client.messages.create(model=MODEL, max_tokens=1, messages=talk, system=system)
    plain = [{"role": "system", "content": "S" * 40 + "\n\n" + "T" * 30}, *talk[:2], talk[2] | {"content": "U" * 40}]
    plain[2] = plain[2] | {"content": "Y" * 30}
    first = common(served, plain, [{"role": "system", "content": "S" * 40 + "x"}])
    said = [[*plain[:3], {"role": "user", "content": "U" * 40 + each}] for each in "Vx"]
    last = common(served, *said)
    assert stops(served) == [(-(-first // 16) * 16, 3600.0), (-(-last // 16) * 16, 300.0)]


@pytest.mark.parametrize(
    ("retention", "ttl", "seconds"), [("24h", None, 86400.0), ("24h", "30m", 1800.0), ("in_memory", None, None)],
)
def test_a_retention_is_a_time_where_there_is_no_other(served, retention, ttl, seconds):
    more = {"prompt_cache_retention": retention} | ({"prompt_cache_options": {"ttl": ttl}} if ttl else {})
    for create, given in (
        (served.client().completions.create, {"prompt": LONG}), (served.client().responses.create, {"input": LONG}),
    ):
        create(model=MODEL, extra_body=more, **given)
        assert {each for _, each in stops(served)} == ({seconds} if seconds else set())
        served.engine.clear_cache()
    with pytest.raises(openai.BadRequestError, match="prompt_cache_retention: expected in_memory or 24h"):
        served.client().completions.create(model=MODEL, prompt="x", extra_body={"prompt_cache_retention": "1h"})


@pytest.mark.parametrize(
    ("body", "ttl", "marks"),
    [
        ({"messages": []}, None, []), ({"messages": [], "cache_control": {"type": "ephemeral"}}, 300.0, []),
        ({"messages": [], "system": [{"type": "text", "text": "x", "cache_control": {"ttl": "1h"}}],
          "tools": [{"name": "f", "cache_control": {"ttl": "5m"}}]}, None, [(0, None, 300.0), (0, 1, 3600.0)]),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "content": [{"type": "text", "text": "x", "cache_control": {"ttl": "90s"}}]}]}]},
         None, [(0, None, 90.0)]),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": str(i), "cache_control": {}}]}
                       for i in range(9)]}, None, [(i, None, 300.0) for i in range(5, 9)]),
    ],
)
def test_marks_that_are_read(body, ttl, marks):
    asked = asked_of_message({"model": MODEL, **json.loads(json.dumps(body))}, SamplingParams())
    assert (asked.keep, asked.marks) == (ttl, tuple(marks))


def test_times():
    assert [cache_options({"ttl": ttl}, "x") for ttl in ("1s", "30m", "24h")] == [1.0, 1800.0, 86400.0]
    assert cache_options({"mode": "explicit"}, "x") is None
    for ttl in ("0s", "30", "1d", "25h", "-1s", "99999h", " 1s"):
        with pytest.raises(ValueError, match="x: expected a ttl such as 30m, up to 24h, got"):
            cache_options({"ttl": ttl}, "x")
