"""Prompts that clients ask to stay cached, and those that are run for that alone."""

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

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


# -- hints without a request ------------------------------------------------------------------------------------------


def hinted(served, body, headers=None):
    """The status of a body of hints, and its answer."""
    request = Request(
        served.url + "/cache/hints", json.dumps({"model": MODEL} | body).encode(),
        {"content-type": "application/json"} | (headers or {}),
    )
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def envelope(*actions):
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m1", "actions": [
        {"action_id": str(i), "action_type": kind, "action_version": "1.0", "payload": payload}
        for i, (kind, payload) in enumerate(actions)
    ]}}


def found(served, body, *actions):
    """What the answer says of each action: what it is, whether it was accepted, and its tokens."""
    status, answer = hinted(served, body | envelope(*actions))
    assert (status, answer["object"], answer["model"], answer["message_id"]) == (200, "cache.hints", MODEL, "m1"), answer
    assert [each["action_id"] for each in answer["results"]] == [str(i) for i in range(len(actions))]
    return [(each["action_type"], each["status"], each["tokens"], each["tokens_found"]) for each in answer["results"]]


def test_hints_about_a_conversation(served):
    """The text is that of the request with the same body, whichever interface it has."""
    system, said = [{"role": "system", "content": "S" * 90}], [{"role": "user", "content": "A" * 200}]
    talk = [*system, *said]
    bodies = {
        "/chat/completions": {"messages": talk}, "/completions": {"prompt": "P" * 150},
        "/responses": {"input": "I" * 150, "instructions": "S" * 60},
        "/messages": {"system": "S" * 70, "messages": said, "endpoint": "/v1/messages"},
    }
    for path, body in bodies.items():
        ((_, status, count, cached),) = found(served, body, ("pin", {}))
        assert status == ("accepted" if cached else "missing")
        assert cached < count - 32, path  # texts before it begin alike
        asked = {"model": MODEL, "max_tokens": 1} | {key: body[key] for key in body if key != "endpoint"}
        asked |= {"max_output_tokens": asked.pop("max_tokens")} if path == "/responses" else {}
        request = Request(served.url + path, json.dumps(asked).encode(), {"content-type": "application/json"})
        with urlopen(request, timeout=60):
            pass
        ((kind, status, again, cached),) = found(served, body, ("kv.demote", {}))
        assert (kind, status, again, cached) == ("demote", "accepted", count, count // 16 * 16), path
    body = bodies["/chat/completions"]
    kept = found(served, body, ("pin", {"ttl": "10m"}), ("prefetch", {"resume_in": 1.5, "ttl": 60}))
    assert [each[1] for each in kept] == ["accepted"] * 2
    assert stops(served) == [(kept[0][2] // 16 * 16, 600.0)]
    ((_, status, count, cached),) = found(served, body, ("release", {"after": 40}))
    assert (status, cached) == ("accepted", count // 16 * 16)
    assert found(served, body, ("pin", {"ttl": 1}))[0][3] in range(40, 112)
    assert found(served, body | {"cache_salt": "x"}, ("pin", {}))[0][1] == "missing"
    with urlopen(served.url.removesuffix("/v1") + "/metrics") as page:
        assert f'kvcache_hints_total{{model="{MODEL}"}} 13\n' in page.read().decode()


def test_hints_about_branches(served):
    """A head stays for its branches; one that has ended leaves it and the others."""
    head = [{"role": "user", "content": "H" * 120}]
    one, other = ([{"role": "assistant", "content": "x"}, {"role": "user", "content": c * 200}] for c in "BC")
    for branch in (one, other):
        served.client().chat.completions.create(model=MODEL, messages=[*head, *branch], max_tokens=1)
    body = {"messages": head, "branches": [one, other]}
    ((_, status, count, cached),) = found(served, body, ("share", {"ttl": "2m"}))
    assert (status, cached) == ("accepted", count)
    assert count == common(served, [*head, *one], [*head, *other])
    assert stops(served) == [(count // 16 * 16, 120.0)]
    ((_, _, _, cached),) = found(served, {"messages": head, "branches": [one]}, ("release", {}))
    assert cached > 300
    assert found(served, {"messages": [*head, *one]}, ("pin", {"ttl": 1}))[0][3] < count + 16
    assert found(served, {"messages": [*head, *other]}, ("pin", {"ttl": 1}))[0][3] > 300
    assert stops(served)[0] == (count // 16 * 16, 120.0)


def test_hints_of_dynamo(served):
    """Its hints about requests change nothing here, but for the text that is to run ahead."""
    talk = {"messages": [{"role": "user", "content": LONG}]}
    status, answer = hinted(served, talk | {"nvext": {
        "agent_hints": {"priority": 5, "osl": 90, "latency_sensitivity": 0.5, "speculative_prefill": True},
        "cache_control": {"type": "ephemeral", "ttl": "3m"},
    }})
    assert status == 200
    assert [each["action_type"] for each in answer["results"]] == ["pin", "speculative_prefill"]
    assert [each["status"] for each in answer["results"]] == ["missing", "accepted"]
    got = served.client().chat.completions.create(model=MODEL, **talk, max_tokens=1)
    assert got.usage.prompt_tokens_details.cached_tokens > 100
    assert [seconds for _, seconds in stops(served)] == [60.0]


TALKED = {"messages": [{"role": "user", "content": "a text"}]}


def test_hints_that_are_refused(served):
    """Nothing has changed then: not by an action before the wrong one either."""
    pin = envelope(("pin", {"ttl": 9}))
    for body, message in (
        (pin, "messages: expected messages, input or a prompt, got none"),
        (TALKED, "kv_hints: expected 1 to 16 actions, got 0"),
        (TALKED | envelope(*[("pin", {})] * 17), "kv_hints: expected 1 to 16 actions, got 17"),
        (TALKED | {"kv_hints": []}, "kv_hints: expected "),
        (TALKED | {"kv_hints": {"actions": [5]}}, "kv_hints.actions: expected "),
        (TALKED | envelope(("drop", {})), "kv_hints.actions.action_type: expected one of demote, pin, prefetch"),
        (TALKED | envelope(("pin", {}), ("release", {"ttl": 3})), "kv_hints.actions.payload: expected after for release"),
        (TALKED | envelope(("pin", {"ttl": "5 min"})), "kv_hints.actions.payload.ttl: expected a ttl such as 30m"),
        (TALKED | envelope(("pin", {"ttl": -1})), "kv_hints.actions.payload.ttl: expected "),
        (TALKED | envelope(("pin", {"ttl": 9e9})), "ttl: expected "),
        (TALKED | envelope(("demote", {"after": 1.5})), "kv_hints.actions.payload.after: expected an int"),
        (TALKED | envelope(("pin", {}), ("share", {})), "branches: expected several for share, got 1 text"),
        (TALKED | pin | {"branches": []}, "branches: expected 1 to 16 lists of messages, got 0"),
        (TALKED | pin | {"branches": ["x"]}, "branches: expected "),
        ({"prompt": "p", "branches": [["x"]]} | pin, "branches: expected a list of messages before them, got 'p'"),
        ({"prompt": ["p"] * 70} | pin, "prompts: expected 1 to 64 for pin, got 70"),
        (TALKED | pin | {"endpoint": "/v1/embeddings"}, "endpoint: expected one of /v1/completions, /v1/responses"),
        (TALKED | pin | {"session_id": "s"}, "session_id: expected none, since it is not supported"),
        ({"input": "x", "previous_response_id": "resp_1"} | pin, "previous_response_id: expected none"),
        (TALKED | {"nvext": {"cache_control": {"ttl": "x"}}}, "nvext.cache_control: expected a ttl"),
        (TALKED | {"nvext": {"agent_hints": {"speculative_prefill": 1}}}, "nvext.agent_hints.speculative_prefill: expected"),
        (TALKED | pin | {"model": "other"}, "model: expected"),
    ):
        status, answer = hinted(served, body)
        assert status in (400, 404), body
        assert answer["error"]["message"].startswith(message), answer
    assert served.engine.stats().hints == 0


def test_hints_of_keys(tmp_path):
    """A key's hints are about its own texts; one that nobody knows gives none."""
    with Served(tiny_file(tmp_path), keys={"one": "a", "two": "b"}) as made:
        made.client(key="one").completions.create(model=MODEL, prompt="K" * 100, max_tokens=1)
        for key, wanted in (("one", "accepted"), ("two", "missing")):
            _, answer = hinted(made, {"prompt": "K" * 100} | envelope(("pin", {})), {"authorization": f"Bearer {key}"})
            assert answer["results"][0]["status"] == wanted
        assert hinted(made, {"prompt": "K"} | envelope(("pin", {})), {"authorization": "Bearer no"})[0] == 401
        assert set(made.engine.namespace_stats()) == {"a"}
        assert made.engine.namespace_stats()["a"].pinned_tokens == 96
