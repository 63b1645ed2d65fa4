"""The bodies of requests and answers, without a server."""

import json
import time
from types import SimpleNamespace

import pytest
from threads_at_once import longest_pause

from kvcache import SamplingParams, TokenLogprobs
from kvcache.errors import CheckpointError, InvalidOperationError
from kvcache.server.completion_bodies import asked_of_completion
from kvcache.server.conversations import Conversation, ToolChoice, placed, with_users
from kvcache.server.intake import json_of
from kvcache.server.logprobs import Offsets, TokenTexts, of_chat, of_texts
from kvcache.server.refusals import refusal, too_large
from kvcache.server.written import JsonObject, pieces, written

pytestmark = pytest.mark.one_build

TALK = [{"role": "user", "content": "Hi"}]


class Bytes:
    """A tokenizer whose ids are bytes of UTF-8; 256 is the last byte of an é and more text."""

    def __init__(self):
        self.calls = []

    def decode(self, ids, skip_special_tokens=True):
        self.calls.append(list(ids))
        found = ("é".encode()[1:] + b"tude" if id == 256 else bytes([id]) for id in ids)
        return b"".join(found).decode(errors="replace")


def parsed(chat=True, defaults=None, positions=None, **asked):
    prompt = {"messages": TALK} if chat else {"prompt": "x"}
    data = json.dumps({"model": "tiny"} | prompt | asked).encode()
    return asked_of_completion(json_of(data), chat, defaults or SamplingParams(), positions)


@pytest.mark.parametrize(
    "neutral",
    [
        {"functions": []},
        {"function_call": "none"},
        {"logprobs": False, "top_logprobs": 0},
        {"top_logprobs": 0},
        {"stream": False, "stream_options": {"include_usage": False}},
        {"stream_options": {}},
        {"stream_options": {"include_obfuscation": False}},
        {"service_tier": "flex", "store": True, "metadata": {"a": "b"}, "safety_identifier": "x", "user": "y"},
        {"prediction": {"type": "content", "content": "x"}},
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}},
        {"ignore_eos": False, "skip_special_tokens": True, "min_tokens": 0, "use_beam_search": False},
        {"length_penalty": 1.0, "spaces_between_special_tokens": True, "add_generation_prompt": True},
        {"continue_final_message": False, "include_stop_str_in_output": False, "no_stop_trim": False},
        {"separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False, "echo": False},
        {"include_reasoning": True, "lora_path": None, "chat_template_kwargs": {}, "tools": [], "suffix": ""},
        {"best_of": 1, "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"]},
    ],
)
def test_values_that_ask_for_nothing(neutral):
    for chat in (True, False):
        body = parsed(chat, **neutral)
        assert (body.params, body.stream, body.with_usage) == (SamplingParams(), False, False)
        assert not chat or body.prompts == [Conversation(TALK)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_penalty", 2), ("modalities", ["audio"]),
        ("skip_special_tokens", False), ("include_stop_str_in_output", True), ("no_stop_trim", True), ("suffix", "x"),
        ("return_hidden_states", True), ("bad_words", ["x"]), ("function_call", {"name": "f"}),
        ("moderation", {}), ("audio", {}), ("web_search_options", {}), ("lora_path", "x"),
    ],
)
def test_other_values_are_refused_by_name(name, value):
    for chat in (True, False):
        with pytest.raises(ValueError, match=f"{name}: expected none, since it is not supported") as caught:
            parsed(chat, **{name: value})
        error = json.loads(refusal(caught.value).body)["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_large_bodies_are_read_as_small_ones():
    """By a scanner that lets other threads run: no value of millions of bytes takes it a tenth of a second at once."""
    ids, odd = [*range(200)] * 200, {"é\ud800": [1.5, -2e3, None, True, "\U0001f408\n"]}
    body = parsed(False, prompt=ids, metadata=odd)
    assert body.prompts == [ids]
    with pytest.raises(ValueError, match="body: expected JSON"):
        json_of(b"[" * 200_000)
    with pytest.raises(ValueError, match="body: expected at most 65536 lists and objects, got more"):
        parsed(metadata=[[]] * 65_536)
    with pytest.raises(ValueError, match="messages: expected at most 4096, got 4097"):
        parsed(messages=TALK * 4097)


def test_other_threads_run_while_a_body_is_read():
    def read():
        found = json_of(b'{"metadata": {' + b",".join(b'"%07d": 12' % i for i in range(280_000)) + b"}}")
        with pytest.raises(ValueError, match="model: expected one, got none"):
            asked_of_completion(found, True, SamplingParams())

    assert longest_pause(read) < 1 / 2


def test_best_of_as_many_as_are_asked_for():
    assert parsed(False, n=3, best_of=3).n == 3
    with pytest.raises(ValueError, match="best_of: expected as many as n, 2, got 3"):
        parsed(False, n=2, best_of=3)


def test_values_at_the_edge_of_openais_schema():
    body = parsed(seed=-1, top_p=0, stream=True, stream_options={"include_usage": True, "include_obfuscation": True})
    assert (body.params.seed, body.params.top_p, body.with_usage) == (-1, 0.0, True)
    assert parsed(top_k=-1).params == parsed(top_k=0).params
    with pytest.raises(ValueError, match="stream_options: expected include_usage or include_obfuscation"):
        parsed(stream=True, stream_options={"other": True})


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"stop_token_ids": {"1": 1}}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ],
)
def test_lists_of_tokens_are_short(asked, name):
    """Each of 128 answers has a copy."""
    with pytest.raises((TypeError, ValueError), match=f"{name}: expected"):
        parsed(**asked)


def test_the_log_probabilities_of_an_answer_are_limited():
    """By answers, tokens that there may be, and tokens beside each."""
    for chat, asked in ((True, {"logprobs": True, "top_logprobs": 20}), (False, {"logprobs": 20})):
        name = "top_logprobs" if chat else "logprobs"
        assert parsed(chat, n=32, max_tokens=500, **asked).params.logprobs == 20
        assert parsed(chat, max_tokens=10**9, positions=8192, **asked).params.logprobs == 20
        with pytest.raises(ValueError, match=rf"^{name}: expected at most 1048576 values.*, got {128 * 8192 * 21}$"):
            parsed(chat, n=128, max_tokens=10**9, positions=8192, **asked)
    with pytest.raises(ValueError, match="logprobs: expected at most 1048576 values"):
        parsed(False, prompt=["x"] * 4, n=32, max_tokens=500, logprobs=20)


# -- log-probabilities ------------------------------------------------------------------------------------------


def found(tokens, top=()):
    """Log-probabilities of new tokens; each has the most likely tokens `top`."""
    return [TokenLogprobs(-1.0, {token: -float(place) for place, token in enumerate(top)}) for _ in tokens]


def chat_entries(tokens, top=()):
    parts = of_chat(TokenTexts(Bytes()), [*tokens], found(tokens, top))
    return json.loads("".join(written(parts)))["content"]


def columns(tokens, top=(), prompt=b"a"):
    texts = TokenTexts(Bytes())
    parts = of_texts(texts, [*tokens], found(tokens, top), Offsets(texts, [*prompt]))
    return json.loads("".join(written(parts)))


@pytest.mark.parametrize("text", ["é", "鱻", "🐈"])
def test_parts_of_characters_have_no_bytes(text):
    entries = chat_entries(f"{text}b".encode())
    assert [entry["bytes"] for entry in entries] == [None] * len(text.encode()) + [[ord("b")]]
    assert [entry["token"] for entry in entries] == ["\ufffd"] * len(text.encode()) + ["b"]


def test_a_token_that_ends_a_character_and_has_more_text_has_no_bytes():
    entry = chat_entries(["é".encode()[0], 256])[-1]
    assert (entry["token"], entry["bytes"]) == ("\ufffdtude", None)


def test_of_tokens_with_one_text_the_most_likely_counts():
    (top,) = columns(b"x", top=[0xF0, ord("b"), 0xE2])["top_logprobs"]
    assert [*top.items()] == [("\ufffd", 0.0), ("b", -1.0)]


def test_a_token_has_the_space_that_decoders_drop_at_the_beginning():
    words = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(" ab"[id] for id in ids).removeprefix(" "))
    assert [TokenTexts(words).of(token) for token in (0, 1)] == [(" ", [32]), ("a", [97])]


def test_text_offsets_are_places_in_the_text():
    text = "a鱻b🐈"
    offsets = columns(text.encode())["text_offset"]
    assert offsets == [0, 1, 1, 1, 2, 3, 3, 3, 3]
    cut = "é".encode()
    assert columns(cut[1:] + b"xy", prompt=b"a" + cut[:1])["text_offset"] == [0, 1, 2]
    assert columns(b"a\xe9xb")["text_offset"] == [0, 1, 2, 3], "a byte that begins no character"


def test_each_token_is_decoded_once():
    tokenizer = Bytes()
    texts = TokenTexts(tokenizer)
    tokens = b"abcab" * 100
    assert len("".join(written(of_chat(texts, [*tokens], found(tokens, top=b"abcd"))))) > 10_000
    assert len(tokenizer.calls) == 2 * 4, "alone and behind itself"


# -- JSON -------------------------------------------------------------------------------------------------------


def test_json_is_written_piece_by_piece():
    made = []

    def items():
        for number in range(20_000):
            made.append(number)
            yield {"number": number, "é": None}

    whole = JsonObject(a=1, items=JsonObject(inner=items(), empty=iter(()), none=JsonObject()), last=[{"b": "\ud800"}])
    found = pieces(whole)
    first = next(found)
    assert 0 < len(made) < 5_000
    text = (first + b"".join(found)).decode("ascii")
    inner = [{"number": number, "é": None} for number in range(20_000)]
    assert json.loads(text) == {"a": 1, "items": {"inner": inner, "empty": [], "none": {}}, "last": [{"b": "\ud800"}]}


def test_a_piece_takes_milliseconds():
    """No piece of an answer with 300,000 log-probabilities holds the interpreter for long."""
    tokens, top, texts = [ord("a")] * 16_000, range(97, 117), TokenTexts(Bytes())
    worst, last = 0.0, time.thread_time()  # which does not pass while others have the CPU
    for _ in pieces(of_chat(texts, tokens, found(tokens, top))):
        worst, last = max(worst, time.thread_time() - last), time.thread_time()
    assert worst < 0.25


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "running", "status", "param", "code", "says"),
    [
        (too_large("prompt", "7 tokens"), True, 400, "prompt", "context_length_exceeded", "prompt: expected a text"),
        (ValueError("body: expected JSON, got an error"), False, 400, None, None, "body: expected JSON"),
        (ValueError("n: expected an int >= 1, got 0"), False, 400, "n", None, "n: expected"),
        (ValueError("secret: expected"), True, 500, None, None, "the request failed: ValueError"),
        (CheckpointError("secret: expected"), False, 500, None, None, "the request failed: CheckpointError"),
        (InvalidOperationError("expected an open engine"), False, 503, None, None, "got none: the server ends"),
    ],
)
def test_errors(error, running, status, param, code, says):
    answer = refusal(error, running=running)
    found = json.loads(answer.body)["error"]
    assert (answer.status_code, found["param"], found["code"]) == (status, param, code)
    assert says in found["message"]
    assert ("retry-after" in answer.headers) == (status == 503)


# -- conversations ------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]


def test_what_a_conversation_says():
    asked = {"tools": TOOLS, "parallel_tool_calls": False, "reasoning_effort": "none", "cache_salt": "mine"}
    body = parsed(**asked, chat_template_kwargs={"thinking": True, "x": [1]})
    (found,) = body.prompts
    assert (found.tools, found.choice, found.parallel, body.salt) == (TOOLS, ToolChoice(), False, "mine")
    assert found.template == {"reasoning_effort": "none", "enable_thinking": False, "thinking": True, "x": [1]}
    assert parsed(verbosity="high").prompts[0].template == {"verbosity": "high"}
    assert parsed(reasoning_effort="low").prompts[0].template["enable_thinking"]
    assert parsed(tools=TOOLS, tool_choice="none").prompts[0].choice.mode == "none"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[:1]}}
    assert parsed(tools=TOOLS, tool_choice=allowed).prompts[0].choice == ToolChoice("auto", frozenset("f"))


def test_messages_keep_their_text_and_their_place():
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "refusal", "refusal": "b"}]
    talk = [
        {"role": "developer", "content": "one"}, {"role": "system", "content": parts},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": []}, {"role": "developer", "content": "late"},
        {"role": "user", "content": "now"},
    ]
    messages = parsed(messages=talk).prompts[0].messages
    assert messages[1]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = placed(messages, knows_developer=False)
    assert found[0] == {"role": "system", "content": "one\n\nab"}
    assert [each["role"] for each in found] == ["system", "user", "assistant", "system", "user"]
    assert with_users(found)[-1] == {"role": "user", "content": "late\n\nnow"}
    assert [each["role"] for each in placed(messages, knows_developer=True)][0::3] == ["developer", "developer"]
