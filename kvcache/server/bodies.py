"""What a client asks for: the JSON body of a request, checked.

Every setting that is not supported is refused by its name, unless its value is the one that changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from kvcache.core.arguments import as_count, as_instance, short
from kvcache.engine import SamplingParams

__all__ = ["MAX_CHOICES", "Body", "parse"]

MAX_CHOICES = 128  # answers of one body: prompts times `n`
_MAX_STOPS, _MAX_STOP, _MAX_TOP = 16, 500, 20  # the search for stop strings takes time with each token
# Fields of `SamplingParams` that have the same name in a body.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids")
_KNOWN = {*_SAMPLING, "max_tokens", "logit_bias", "logprobs", "n", "stream", "stream_options", "model"}
_OF_CHAT = {"messages", "top_logprobs", "max_completion_tokens"}
# They change no answer, or none of the answer's text.
_WITHOUT_EFFECT = {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"}
# The values of settings that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "response_format": ({"type": "text"},), "tools": ([],),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "store": (False,), "modalities": (["text"],),
    "echo": (False,), "best_of": (1,), "suffix": ("",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Body:
    """A checked body.

    Attributes:
        chat: whether it is a conversation, the only item of `prompts`: a list of messages.
        prompts: of completions: texts, or lists of token ids.
        model: the name that it asks for.
        params: how to sample.
        n: samples of each prompt.
        stream: whether the answer comes in pieces.
        with_usage: whether a stream ends with the numbers of tokens.
    """

    chat: bool
    prompts: list[Any]
    model: str
    params: SamplingParams
    n: int
    stream: bool
    with_usage: bool


def parse(data: bytes, chat: bool, defaults: SamplingParams) -> Body:
    """The body of a chat completion or of a completion.

    Raises:
        TypeError, ValueError: not such a body; the message begins with the name of what is wrong.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: expected JSON, got an error: {short(str(error))}") from None
    given = {name: value for name, value in as_instance(body, dict, "body").items() if value is not None}
    for name, value in given.items():
        known = name in _KNOWN or name in _WITHOUT_EFFECT or name in (_OF_CHAT if chat else {"prompt"})
        if not known and value not in _NEUTRAL.get(name, ()):
            raise ValueError(f"{short(name)[1:-1]}: expected none, since it is not supported, got {short(value)}")
    prompts = [_messages(given.get("messages"))] if chat else _prompts(given.get("prompt"))
    n = as_count(given.get("n", 1), "n", 1, MAX_CHOICES)
    if n * len(prompts) > MAX_CHOICES:
        raise ValueError(f"prompt: expected at most {MAX_CHOICES} answers, n for each, got {n * len(prompts)}")
    stream, options = _bool(given, "stream"), as_instance(given.get("stream_options", {}), dict, "stream_options")
    if options and (not stream or set(options) != {"include_usage"}):
        raise ValueError(f"stream_options: expected include_usage, and stream, got {short(options)}")
    return Body(
        chat, prompts, as_instance(given.get("model"), str, "model"), _params(given, chat, defaults), n, stream,
        _bool(options, "include_usage"),
    )  # fmt: skip


def _params(given: dict[str, Any], chat: bool, defaults: SamplingParams) -> SamplingParams:
    found = {name: given[name] for name in _SAMPLING if name in given}
    stops = found.get("stop", [])
    stops = [stops] if isinstance(stops, str) else as_instance(stops, list, "stop")
    if len(stops) > _MAX_STOPS or any(isinstance(each, str) and len(each) > _MAX_STOP for each in stops):
        raise ValueError(f"stop: expected at most {_MAX_STOPS} strings of {_MAX_STOP} characters, got {short(stops)}")
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    found["max_tokens"] = as_count(given.get(name, defaults.max_tokens), name, 1)
    try:
        biases = as_instance(given.get("logit_bias", {}), dict, "logit_bias").items()
        found["logit_bias"] = {int(token): bias for token, bias in biases}
    except ValueError:
        raise ValueError("logit_bias: expected token ids as keys, got another text") from None
    top = given.get("logprobs")
    if chat:
        wanted = _bool(given, "logprobs")
        if "top_logprobs" in given and not wanted:
            raise ValueError("top_logprobs: expected logprobs beside it, got none")
        top = given.get("top_logprobs", 0) if wanted else None
    found["logprobs"] = None if top is None else as_count(top, "top_logprobs" if chat else "logprobs", 0, _MAX_TOP)
    return replace(defaults, **found)


def _bool(given: dict[str, Any], name: str) -> bool:
    return as_instance(given.get(name, False), bool, name)


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(each, (str, list)) for each in prompt):
        return prompt
    raise TypeError(f"prompt: expected a text, token ids, or a list of these, got {short(prompt)}")


def _messages(messages: Any) -> Any:
    """Messages whose contents are texts, where they are lists of parts; the rest is the chat template's to check."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TypeError(f'messages: expected a list of objects with "role" and "content", got {short(messages)}')
    return [
        {**message, "content": "".join(map(_part, message["content"]))}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"messages: expected parts of type text, got {short(part)}")
    return str(part["text"])
