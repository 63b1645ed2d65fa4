"""Anthropic's interface, asked by its client."""

import json
from dataclasses import replace

import anthropic
import pytest
from http_servers import MODEL, SAID, SCHEMA, TALK, Served, answer, post, tiny_file, tools_template
from peft_folders import modules_of, write_adapter
from windowed_networks import windowed

from kvcache import BatchEngine
from kvcache.engine.edits import CLEARED
from kvcache.server.fingerprints import Fingerprints
from kvcache.server.served_adapters import ServedAdapters
from kvcache.server.served_model import ServedModel

pytestmark = pytest.mark.one_build

TOOL = {"name": "weather", "description": "x", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
TEMPLATE = tools_template("{% if enable_thinking is defined %}{{ enable_thinking }}{{ reasoning_effort }}{% endif %}")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tiny_file(tmp_path_factory.mktemp("messages"), TEMPLATE), num_blocks=800) as made:
        yield made


def client_of(served, **options):
    options = {"api_key": "x", **options}
    return anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), max_retries=0, timeout=120, **options)


def asked(**more):
    return {"model": MODEL, "max_tokens": 400, "messages": TALK, "tools": [TOOL], **more}


def prompt(served, messages, tools=True, **template):
    function = {"name": "weather", "description": "x", "parameters": SCHEMA}
    return served.alone.apply_chat_template(
        messages, tools=[{"type": "function", "function": function}] if tools else None, template=template
    )


def blocks(message):
    shown = ("type", "thinking", "text", "name", "input")
    return [{key: value for key, value in block.model_dump().items() if key in shown} for block in message.content]


WANTED = [
    {"type": "thinking", "thinking": "hm é"}, {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}},
    {"type": "tool_use", "name": "weather", "input": {}},
]


def test_a_whole_message_and_the_next_turn(served):
    client = client_of(served)
    served.say(SAID)
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    got = client.messages.create(**asked(system=system))
    assert blocks(got) == WANTED
    assert (got.stop_reason, got.stop_sequence, got.role) == ("tool_use", None, "assistant")
    text = prompt(served, [{"role": "system", "content": "Be kind."}, *TALK])
    size = len(served.engine.tokenizer.encode(text).ids)
    usage = got.usage
    assert usage.cache_read_input_tokens + usage.cache_creation_input_tokens + usage.input_tokens == size
    assert (usage.cache_creation_input_tokens, usage.output_tokens) == (size // 16 * 16, len(SAID.encode()))
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
        for block in got.content if block.type == "tool_use"
    ]
    talk = [
        *TALK, {"role": "assistant", "content": [block.model_dump() for block in got.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
    ]
    served.say("It rains.")
    again = client.messages.create(**asked(system="Be kind.", messages=talk))
    assert (blocks(again), again.stop_reason) == ([{"type": "text", "text": "It rains."}], "end_turn")
    assert again.usage.cache_read_input_tokens >= size - 32
    calls = [{"type": "function", "function": {"name": "weather", "arguments": b["input"]}} for b in WANTED[2:]]
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "hm é", "tool_calls": calls}
    whole = prompt(served, [
        {"role": "system", "content": "Be kind."}, *TALK, said, *[{"role": "tool", "content": "rain"}] * 2,
        {"role": "user", "content": "And?"},
    ])
    counted = again.usage
    assert (
        counted.input_tokens + counted.cache_read_input_tokens + counted.cache_creation_input_tokens
        == len(served.engine.tokenizer.encode(whole).ids)
    )


@pytest.mark.parametrize(
    ("said", "more", "reason"),
    [
        (SAID, {}, "tool_use"), ("Hi <b> you \n", {}, "end_turn"),
        ("a STOP b", {"stop_sequences": ["x", "STOP"]}, "stop_sequence"),
        ('<tool_call>{"name": "weather", "arguments": {"city": "K', {}, "end_turn"),
        ("long", {"max_tokens": 2}, "max_tokens"), ("<think>a", {}, "end_turn"), ("", {}, "end_turn"),
    ],
)
def test_a_stream_is_the_whole_message(served, said, more, reason):
    client = client_of(served, api_key=None, auth_token="x")
    served.say(said)
    whole = client.messages.create(**asked(**more))
    served.say(said)
    with client.messages.stream(**asked(**more)) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    assert blocks(final) == blocks(whole)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.stop_reason == reason
    assert final.stop_sequence == ("STOP" if reason == "stop_sequence" else None)
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"city": "Köln", "days": 12', {"city": "Köln"}), ('{"city": "K', {}), ('{"city": ["a", "b', {"city": ["a"]}),
        ("", {}),
    ],
)
def test_a_call_that_was_cut_has_what_was_whole(served, arguments, kept):
    """Nobody takes half a value for a whole one; the answer says that it was cut, and the conversation goes on."""
    client = client_of(served)
    said = '<tool_call>{"name": "weather", "arguments": ' + arguments
    served.say(said)
    got = client.messages.create(**asked(max_tokens=len(said.encode())))
    if not arguments:
        assert blocks(got) == [{"type": "text", "text": said}]
        return
    assert blocks(got) == [{"type": "tool_use", "name": "weather", "input": kept}]
    warned = ["content.0: expected a whole call, got one that was cut; its input has what was whole"]
    assert (got.stop_reason, got.model_extra["warnings"]) == ("max_tokens", warned)
    served.say(said)
    events = [*client.messages.create(**asked(max_tokens=len(said.encode()), stream=True))]
    assert [event.model_extra["warnings"] for event in events if event.type == "message_delta"] == [warned]
    result = {"type": "tool_result", "tool_use_id": got.content[0].id, "content": "cut", "is_error": True}
    history = [{"role": "assistant", "content": got.content}, {"role": "user", "content": [result]}]
    served.say("Again.")
    again = client.messages.create(**asked(messages=[*TALK, *history]))
    assert (blocks(again), again.model_extra.get("warnings")) == ([{"type": "text", "text": "Again."}], None)


def test_thinking_and_tools_of_the_client(served):
    client = client_of(served)

    def size(**more):
        return client.messages.count_tokens(**{"model": MODEL, "messages": TALK, "tools": [TOOL], **more}).input_tokens

    def wanted(messages=TALK, **more):
        return len(served.engine.tokenizer.encode(prompt(served, messages, **more)).ids)

    assert size() == wanted()
    assert size(tools=anthropic.omit) == wanted(tools=False)
    assert size(thinking={"type": "disabled"}) == wanted(enable_thinking=False)
    assert size(thinking={"type": "enabled", "budget_tokens": 1024}) == wanted(enable_thinking=True)
    effort = {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}
    assert size(extra_body=effort) == wanted(enable_thinking=True, reasoning_effort="low")
    hosted = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    assert size(tools=hosted) == wanted()
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abcde;"}
    assert size(system=[billing, {"type": "text", "text": "s"}]) == wanted([{"role": "system", "content": "s"}, *TALK])
    middle = [*TALK, {"role": "system", "content": "late"}, {"role": "assistant", "content": "ok"}, *TALK]
    assert size(messages=middle) == wanted(middle)
    served.say(SAID)
    got = client.messages.create(**asked(tool_choice={"type": "auto", "disable_parallel_tool_use": True}))
    assert blocks(got) == WANTED[:3]
    served.say(SAID)
    got = client.messages.create(**asked(tool_choice={"type": "none"}, metadata={"user_id": "me"}, service_tier="auto"))
    assert (got.stop_reason, len(got.content)) == ("end_turn", 2)


@pytest.mark.parametrize(
    ("more", "status", "says"),
    [
        ({"model": "other"}, 404, "model: expected tiny"),
        ({"max_tokens": -1}, 400, "max_tokens: expected"),
        ({"cache_control": {"type": "ephemeral", "ttl": "x"}}, 400, "cache_control: expected a ttl"),
        ({"max_tokens": None}, 400, "max_tokens: expected one, got none"),
        ({"unheard": 1}, 400, "unheard: expected none"),
        ({"messages": "x"}, 400, "messages: expected"),
        ({"messages": TALK * 4097}, 400, "messages: expected at most 4096"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages: expected the role"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, 400, "messages: expected parts of text"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "prompt is too long: messages: expected at most"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, 400, "tools"),
        ({"tool_choice": {"type": "any"}}, 400, "tools: expected a network with end tokens"),
        ({"tool_choice": {"type": "other"}}, 400, "tool_choice: expected the type"),
        ({"mcp_servers": [{}]}, 400, "mcp_servers: expected none"),
        ({"stop_sequences": ["x"] * 17}, 400, "stop_sequences: expected at most 16"),
        ({"temperature": "x"}, 400, "temperature"),
        ({"context_management": []}, 400, "context_management: expected a dict, got list"),
        ({"context_management": {"edit": []}}, 400, "context_management: expected edits alone, got edit"),
        ({"context_management": {"edits": [{"type": "x"}]}}, 400, "context_management.edits[0].type: expected clear_"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": 3}]}},
            400, "context_management.edits[0].keep: expected a dict, got int",
        ),
    ],
)
def test_errors_have_the_form_of_the_interface(served, more, status, says):
    body = {name: value for name, value in asked(**{"tools": [], **more}).items() if value is not None}
    if "tool_choice" in more:
        body["tools"] = [TOOL]
    got, data = answer(served.connect(post(json.dumps(body).encode(), "/v1/messages")))
    error = json.loads(data)
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert (got, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert says in error["error"]["message"]


def test_an_error_in_a_stream(served):
    served.say("hello")
    served.network.error = OSError("secret")
    try:
        with pytest.raises(anthropic.APIStatusError, match="the request failed: OSError"):
            list(client_of(served).messages.create(**asked(stream=True)))
    finally:
        served.network.error = None


USES = [
    *TALK,
    *(
        message for i in range(3) for message in (
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": f"hm {i}", "signature": "s"},
                {"type": "tool_use", "id": f"t{i}", "name": "weather", "input": {"city": f"K{i}"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": f"t{i}", "content": [{"type": "text", "text": f"{i}" * 50}]}
            ]},
        )
    ),
]
EDITS = {"edits": [
    {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
    {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 2},
     "keep": {"type": "tool_uses", "value": 1}},
]}


def by_hand(messages, numbers):
    """A conversation in which the client has put the placeholder in the place of some results."""
    found = [{**each} for each in messages]
    for number in numbers:
        place = 2 * number + 2
        found[place]["content"] = [{"type": "tool_result", "tool_use_id": f"t{number}", "content": CLEARED}]
    return found


def test_results_are_cleared_as_the_body_asks(served):
    """The prompt is that of the conversation with the placeholder; the answer tells what was cleared."""
    client = client_of(served).beta.messages
    tokens = {
        name: client.count_tokens(model=MODEL, messages=messages).input_tokens
        for name, messages in (("all", USES), ("some", by_hand(USES, [0, 1])))
    }
    counted = client.count_tokens(model=MODEL, messages=USES, context_management=EDITS)
    assert counted.input_tokens == tokens["some"]
    assert counted.context_management.original_input_tokens == tokens["all"]
    lost = tokens["all"] - tokens["some"]
    gone = {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2, "cleared_input_tokens": lost}
    given = asked(tools=anthropic.omit, messages=USES, max_tokens=4, betas=["context-management-2025-06-27"])
    whole = client.create(**given, context_management=EDITS)
    assert whole.model_dump()["context_management"] == {"applied_edits": [gone]}
    used = whole.usage
    assert used.input_tokens + used.cache_read_input_tokens + used.cache_creation_input_tokens == tokens["some"]
    events = [*client.create(**given, context_management=EDITS, stream=True)]
    deltas = [each.context_management for each in events if each.type == "message_delta"]
    assert [each.model_dump() for each in deltas] == [{"applied_edits": [gone]}]
    # the request of the edited text finds all of that prompt, but for its last tokens
    same = client.create(**asked(tools=anthropic.omit, messages=by_hand(USES, [0, 1]), max_tokens=4))
    assert same.usage.cache_read_input_tokens >= tokens["some"] - 17
    assert same.context_management is None
    nothing = client.create(**given, context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
    assert nothing.model_dump()["context_management"] == {"applied_edits": []}
    # chat completions have the field too
    talk = [*TALK, *(
        message for i in range(3) for message in (
            {"role": "assistant", "content": None, "reasoning_content": f"hm {i}", "tool_calls": [
                {"id": f"t{i}", "type": "function", "function": {"name": "weather", "arguments": f'{{"city": "K{i}"}}'}}
            ]},
            {"role": "tool", "tool_call_id": f"t{i}", "content": f"{i}" * 50},
        )
    )]
    create = served.client().chat.completions.create
    given = {"model": MODEL, "messages": talk, "max_tokens": 2}
    got = create(**given, extra_body={"context_management": EDITS})
    assert got.usage.prompt_tokens == tokens["some"]
    assert got.model_extra["context_management"] == {"applied_edits": [gone]}
    first = next(iter(create(**given, stream=True, extra_body={"context_management": EDITS})))
    assert first.model_extra["context_management"] == {"applied_edits": [gone]}


MASKED = {"edits": [EDITS["edits"][1] | {"kvcache_mode": "mask"}]}


def used_by(usage):
    """The tokens of a prompt, and those of it that did not run."""
    cached = usage.cache_read_input_tokens
    return cached + usage.cache_creation_input_tokens + usage.input_tokens, cached


def test_results_are_masked_where_the_body_asks(served, path):
    """The answer is that of the engine behind the same edits; a turn runs its own tokens alone."""
    served.engine.clear_cache()
    served.engine.sampling_params = replace(served.alone.sampling_params, temperature=0.0)
    client = client_of(served).beta.messages
    asks = {"tools": anthropic.omit, "max_tokens": 6}
    before = client.create(**asked(messages=USES[:5], **asks), context_management=MASKED)
    assert before.context_management.applied_edits == []
    got = client.create(**asked(messages=USES, **asks), context_management=MASKED)
    (gone,), size = got.context_management.applied_edits, client.count_tokens(model=MODEL, messages=USES)
    assert (gone.cleared_tool_uses, gone.cleared_input_tokens) == (2, 100)
    whole, cached = used_by(got.usage)
    assert (whole, cached >= used_by(before.usage)[0] - 17) == (size.input_tokens, True)
    counted = client.count_tokens(model=MODEL, messages=USES, context_management=MASKED)
    assert (counted.input_tokens, counted.context_management.original_input_tokens) == (whole, whole)
    # as the engine does it by itself
    talk = served.model.message(asked(messages=USES, model=MODEL, max_tokens=6, tools=[]), None)
    messages = talk.asked.conversation.messages
    prompt = served.alone.chat_prompt(messages, MASKED["edits"])
    want = served.alone.complete(prompt.tokens, temperature=0.0, max_tokens=6, prefix=prompt.prefix)
    text = served.alone.apply_chat_template(messages)
    other = served.alone.complete(text, temperature=0.0, max_tokens=6)
    events = [*client.create(**asked(messages=USES, **asks), context_management=MASKED, stream=True)]
    text = "".join(each.delta.text for each in events if each.type == "content_block_delta")
    assert (got.content[0].text, text) == (want.text, want.text)
    assert (want.text != other.text, used_by(events[0].message.usage)) == (True, (whole, whole - 1))
    served.engine.clear_cache()  # a server that has nothing runs all of it, and says so
    cold = client.create(**asked(messages=USES, **asks), context_management=MASKED)
    assert (cold.content[0].text, used_by(cold.usage)) == (want.text, (whole, 0))
    # a server may do so by itself, but for arguments of calls, which are no texts of their own
    with Served(served.path, limits={"edit_masks": True}) as masking:
        other = client_of(masking).beta.messages
        more = {"betas": ["context-management-2025-06-27"], "model": MODEL, "messages": USES}
        for fields in ({}, {"kvcache_mode": "recompute"}, {"clear_tool_inputs": True}):
            edit = EDITS["edits"][1] | fields
            found = other.count_tokens(**more, context_management={"edits": [edit]})
            alone = client.count_tokens(**more, context_management={"edits": [{"kvcache_mode": "recompute", **edit}]})
            assert found.input_tokens == (alone.input_tokens if fields else size.input_tokens)


def test_a_text_with_an_adapter_has_no_masks(served, tmp_path):
    """A server that masks by itself clears its results by placeholders; a body that asks for masks is refused."""
    folder = write_adapter(tmp_path / "a", modules_of("llama"))
    limits = {"edit_masks": True, "adapters": ServedAdapters({"a": str(folder)})}
    with Served(served.path, limits=limits) as masking:
        client = client_of(masking).beta.messages
        more, edit = {"betas": ["context-management-2025-06-27"], "model": "a", "messages": USES}, EDITS["edits"][1]
        counts = [
            client.count_tokens(**more, context_management={"edits": [edit | fields]}).input_tokens
            for fields in ({}, {"kvcache_mode": "recompute"})
        ]
        assert counts[0] == counts[1]
        got = client.create(**more, max_tokens=1, context_management={"edits": [edit]})
        assert (used_by(got.usage)[0], got.model) == (counts[0], "a")
        with pytest.raises(anthropic.BadRequestError, match="kvcache_mode: expected recompute with an adapter, got"):
            client.create(**more, max_tokens=1, context_management=MASKED)


def test_a_network_with_chunks_masks_nothing():
    engine = BatchEngine(windowed("chunks"), num_blocks=40)
    with pytest.raises(ValueError, match="mode: expected recompute with layers that attend within chunks, got 'mask'"):
        ServedModel(engine, MODEL, edit_masks=True)


def test_what_is_too_long_may_fit_after_its_edits(served):
    """Marks of caches and partings of prompts are those of the text that is left."""
    client = client_of(served).beta.messages
    long = [{**each} for each in USES]
    long[2] = {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t0", "content": "x" * 3000, "cache_control": {"type": "ephemeral"}}
    ]}
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.create(**asked(tools=anthropic.omit, messages=long, max_tokens=1))
    got = client.create(**asked(tools=anthropic.omit, messages=long, max_tokens=1), context_management=EDITS)
    assert got.context_management.applied_edits[0].cleared_input_tokens > 2900
    many = EDITS["edits"][1] | {"clear_at_least": {"type": "input_tokens", "value": 10_000}}
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.create(**asked(tools=anthropic.omit, messages=long, max_tokens=1), context_management={"edits": [many]})


def test_keys_of_either_header(tmp_path):
    with Served(tiny_file(tmp_path), {"k": "one"}) as keyed:
        for options in ({"api_key": "k"}, {"api_key": None, "auth_token": "k"}):
            assert client_of(keyed, **options).messages.count_tokens(model=MODEL, messages=TALK).input_tokens
        with pytest.raises(anthropic.AuthenticationError):
            client_of(keyed, api_key="other").messages.count_tokens(model=MODEL, messages=TALK)


def test_why_a_prompt_was_not_cached(served):
    """The first part that differs from the earlier body; the marks of caches and of billing change nothing."""
    client = client_of(served)
    mark = {"cache_control": {"type": "ephemeral"}}
    long = [{"role": "user", "content": [{"type": "text", "text": "word " * 16, **mark}]}]
    billing = [{"type": "text", "text": f"x-anthropic-billing-header: cch={i};"} for i in range(2)]
    system = {"type": "text", "text": "s" * 40}
    base = {"messages": long, "tools": [TOOL], "system": [billing[0], system], "max_tokens": 1}

    def create(previous=None, stream=False, **more):
        extra = {"diagnostics": {"previous_message_id": previous}}
        given = asked(**{**base, **more}, extra_body=extra, stream=stream)
        got = client.messages.create(**given)
        return next(event.message for event in got if event.type == "message_start") if stream else got

    served.say("ok")
    first = create()
    assert first.diagnostics is None
    plain = [{"role": "user", "content": [{"type": "text", "text": "word " * 16}]}]
    talk = [*plain, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "And?"}]
    again = {"messages": talk, "system": [billing[1], system]}
    assert create(first.id, **again).diagnostics is None
    for stream in (False, True):
        changed = create(first.id, stream, system="tu"[stream] * 60).diagnostics.cache_miss_reason
        assert (changed.type, changed.cache_missed_input_tokens > 32) == ("system_changed", True)
    tools = create(first.id, tools=[{**TOOL, "name": "storm"}]).diagnostics.cache_miss_reason
    assert tools.type == "tools_changed"
    other = create(first.id, messages=[{"role": "user", "content": "no " * 30}]).diagnostics.cache_miss_reason
    assert other.type == "messages_changed"
    assert create("msg_unknown").diagnostics.cache_miss_reason.type == "previous_message_not_found"
    served.engine.clear_cache()
    assert create(first.id, **again).diagnostics.cache_miss_reason.type == "unavailable"


def test_fingerprints_of_other_namespaces_are_unknown():
    kept = Fingerprints()
    given = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    later = given | {"diagnostics": {"previous_message_id": "a"}}
    assert kept.note(given, "one", "a", 100) is None
    assert kept.note(later, "one", "b", 100).kind == ""
    assert kept.note(later, "two", "b", 100).kind == "previous_message_not_found"
    for number in range(4096):
        kept.note(given, "one", str(number), 1)
    assert kept.note(later, "one", "c", 100).kind == "previous_message_not_found"
