"""The bodies of requests and answers, without a server."""

import json

import pytest

from kvcache import OutOfMemoryError, SamplingParams, TokenLogprobs
from kvcache.server.bodies import Body, choice, parse, refusal
from kvcache.serving import NewTokens

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


class Bytes:
    """A tokenizer whose ids are bytes of UTF-8; 256 is the last byte of an é and more text."""

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        found = ("é".encode()[1:] + b"tude" if id == 256 else bytes([id]) for id in ids)
        return b"".join(found).decode(errors="replace")


@pytest.mark.parametrize(
    "neutral",
    [
        {"functions": []},
        {"function_call": "none"},
        {"logprobs": False, "top_logprobs": 0},
        {"top_logprobs": 0},
        {"stream": False, "stream_options": {"include_usage": False}},
        {"stream_options": {}},
    ],
)
def test_values_that_ask_for_nothing(neutral):
    asked = {"model": "tiny", **neutral}
    for chat, prompt in ((True, {"messages": [{"role": "user", "content": "Hi"}]}), (False, {"prompt": "x"})):
        parsed = parse(json.dumps(asked | prompt).encode(), chat, SamplingParams())
        assert (parsed.params, parsed.stream, parsed.with_usage) == (SamplingParams(), False, False)


def logprobs(chat, tokens, top=()):
    """Log-probabilities of new tokens after "a"; each has the most likely tokens `top`."""
    body = Body(chat, "tiny", ["a"], SamplingParams(), 1, False, False)
    each = TokenLogprobs(-1.0, {token: -float(place) for place, token in enumerate(top)})
    new = NewTokens(0, list(tokens), [each] * len(tokens), None, "")
    return choice(body, Bytes(), 0, new, [ord("a")])["logprobs"]


@pytest.mark.parametrize("text", ["é", "鱻", "🐈"])
def test_parts_of_characters_have_no_bytes(text):
    entries = logprobs(True, f"{text}b".encode())["content"]
    assert [entry["bytes"] for entry in entries] == [None] * len(text.encode()) + [[ord("b")]]
    assert [entry["token"] for entry in entries] == ["\ufffd"] * len(text.encode()) + ["b"]


def test_a_token_that_ends_a_character_and_has_more_text_has_no_bytes():
    entry = logprobs(True, ["é".encode()[0], 256])["content"][-1]
    assert (entry["token"], entry["bytes"]) == ("\ufffdtude", None)


def test_of_tokens_with_one_text_the_most_likely_counts():
    (top,) = logprobs(False, b"x", top=[0xF0, ord("b"), 0xE2])["top_logprobs"]
    assert [*top.items()] == [("\ufffd", 0.0), ("b", -1.0)]


def test_memory_that_does_not_suffice_is_said():
    answer = refusal(OutOfMemoryError(7, 6), running=True)
    assert (answer.status_code, b"requested 7 blocks, available 6" in answer.body) == (400, True)
