"""The JSON of OpenAI's interface: what a client asks for, checked, and what it gets."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvcache.core.arguments import as_count, as_instance, short
from kvcache.engine import Completion, SamplingParams
from kvcache.errors import CheckpointError, InvalidOperationError, OutOfMemoryError, QueueFullError
from kvcache.serving import NewTokens, Request

__all__ = ["REFUSED", "Body", "choice", "head", "parse", "refusal", "too_many", "usage"]

Reader = Callable[..., Any]  # of a value, and its `name` for messages

logger = logging.getLogger("kvcache")

_MAX_CHOICES = 128  # answers of one body: prompts times `n`
_MAX_STOPS, _MAX_STOP = 16, 500  # strings, and characters of each: the search for them takes time with each token
_STATUSES: dict[type[Exception], int] = {  # of what may be raised before a request runs
    QueueFullError: 429, InvalidOperationError: 503, CheckpointError: 500, OutOfMemoryError: 400, TypeError: 400,
    ValueError: 400,
}  # fmt: skip
REFUSED = (*_STATUSES, HTTPException)
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Body(NamedTuple):
    """A checked body. `prompts` is one list of messages, or has texts and lists of token ids."""

    chat: bool
    model: str
    prompts: list[Any]
    params: SamplingParams
    n: int
    stream: bool
    with_usage: bool  # whether a stream ends with the numbers of tokens


def parse(data: bytes, chat: bool, defaults: SamplingParams) -> Body:
    """The body of a chat completion, or of a completion.

    A setting that is not supported is refused by its name, unless its value is one that changes nothing. TypeError,
    ValueError: not such a body; the message begins with the name of what is wrong.
    """
    try:
        body = as_instance(json.loads(data), dict, "body")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: expected JSON, got an error: {short(str(error))}") from None
    prompt, readers = ("messages", _OF_CHATS) if chat else ("prompt", _OF_TEXTS)
    said = {name: value for name, value in body.items() if value is not None}
    if missing := [name for name in ("model", prompt) if name not in said]:
        raise ValueError(f"{missing[0]}: expected one, got none")
    given = {"n": 1, "stream": False, "stream_options": {}} | said
    for name, value in given.items():
        if name in readers:
            given[name] = readers[name](value, name=name)
        elif name not in _WITHOUT_EFFECT and value not in _NEUTRAL.get(name, ()):
            raise ValueError(f"{short(name)[1:-1]}: expected none, since it is not supported, got {short(value)}")
    for name, other in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if given.get(name) and not given.get(other):
            raise ValueError(f"{name}: expected {other} beside it, got none")
    if (count := given["n"] * len(given[prompt])) > _MAX_CHOICES:
        raise too_many(chat, _MAX_CHOICES, count)
    if chat:
        given["logprobs"] = given.get("top_logprobs", 0) if given.get("logprobs") else None
        given["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens", defaults.max_tokens))
    params = replace(defaults, **{name: given[name] for name in _SAMPLING if name in given})
    return Body(chat, given["model"], given[prompt], params, given["n"], given["stream"], given["stream_options"])


def too_many(chat: bool, most: int, count: int) -> ValueError:
    """A body asks for more answers than may be."""
    name = "messages" if chat else "prompt"
    return ValueError(f"{name}: expected at most {most} answers, n for each, got {count}")


def _stops(stops: Any, name: str) -> Any:
    stops = [stops] if isinstance(stops, str) else as_instance(stops, list, name)
    if len(stops) > _MAX_STOPS or any(isinstance(each, str) and len(each) > _MAX_STOP for each in stops):
        raise ValueError(f"{name}: expected at most {_MAX_STOPS} strings of {_MAX_STOP} characters, got {short(stops)}")
    return stops


def _with_usage(options: Any, name: str) -> bool:
    if set(as_instance(options, dict, name)) - {"include_usage"}:
        raise ValueError(f"{name}: expected include_usage, got {short(options)}")
    return as_instance(options.get("include_usage", False), bool, name)


def _prompts(prompt: Any, name: str) -> Any:
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
    if not all(isinstance(each, str) or (isinstance(each, list) and {*map(type, each)} == {int}) for each in prompts):
        raise TypeError(f"{name}: expected a text, token ids, or a list of these, got {short(prompt)}")
    return prompts


def _conversation(messages: Any, name: str) -> Any:
    """Messages, with contents that are lists of parts joined; the engine checks the rest."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
                raise ValueError(f"{name}: expected parts of type text, got {short(parts)}")
            message["content"] = "".join(as_instance(part.get("text"), str, name) for part in parts)
    return [messages]


# How each value is read; `SamplingParams` and the engine check the rest.
_FLAG, _TEXT = partial(as_instance, kind=bool), partial(as_instance, kind=str)
_FROM_1, _TOP = partial(as_count, least=1), partial(as_count, most=20)
_SAMPLING: dict[str, Reader] = {
    **{field.name: lambda value, name: value for field in fields(SamplingParams) if field.name != "logits_processor"},
    "stop": _stops, "max_tokens": _FROM_1,
    "logprobs": lambda value, name: None if value is False else _TOP(value, name=name),
    "logit_bias": lambda value, name: {  # keys of JSON are texts
        int(token) if token.isdecimal() and len(token) < 20 else token: bias
        for token, bias in as_instance(value, dict, name).items()
    },
}  # fmt: skip
_OF_BOTH = _SAMPLING | {
    "model": _TEXT, "n": partial(as_count, least=1, most=_MAX_CHOICES), "stream": _FLAG, "stream_options": _with_usage,
}  # fmt: skip
_OF_TEXTS = _OF_BOTH | {"prompt": _prompts}
_OF_CHATS = _OF_BOTH | {
    "messages": _conversation, "logprobs": _FLAG, "top_logprobs": _TOP, "max_completion_tokens": _FROM_1,
}  # fmt: skip
# They change no answer, or none of the answer's text; and the values of settings that ask for nothing.
_WITHOUT_EFFECT = {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"), "suffix": ("",),
    "functions": ([],), "function_call": ("none", "auto"), "parallel_tool_calls": (True, False), "store": (False,),
    "modalities": (["text"],), "echo": (False,), "best_of": (1,), "top_logprobs": (0,),
}  # fmt: skip


def refusal(error: Exception, *, running: bool = False) -> Response:
    """An error as a client gets it. What it did not cause goes to the log; `running`: a request failed as it ran."""
    known = not running or isinstance(error, OutOfMemoryError)  # a prompt may turn out too large when it begins
    status = next((_STATUSES[kind] for kind in type(error).__mro__ if known and kind in _STATUSES), 500)
    message = str(error)
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif status == 500:
        logger.error("a request failed", exc_info=error)
        message = f"the request failed: {type(error).__name__}"
    name, found, _ = message.partition(": expected")
    value = {"message": message, "param": name if found else None, "code": "invalid_api_key" if status == 401 else None}
    value["type"] = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    headers = {"retry-after": "1"} if status in (429, 503) else getattr(error, "headers", None)
    return Response(json.dumps({"error": value}), status, headers, "application/json")  # ASCII, whatever is in a text


def head(body: Body) -> dict[str, Any]:
    """What all parts of an answer have."""
    kind, prefix = ("chat.completion", "chatcmpl") if body.chat else ("text_completion", "cmpl")
    kind += ".chunk" if body.chat and body.stream else ""
    return {"id": f"{prefix}-{token_hex(12)}", "object": kind, "created": int(time.time()), "model": body.model}


def choice(
    body: Body, tokenizer: Any, index: int, new: Completion | NewTokens, before: list[int], first: bool = True
) -> dict[str, Any]:
    """One choice, or of a stream what is new in it, after the token `before`. HTTPException: it ended without any."""
    content: dict[str, Any] = {"text": new.text}
    reason, logprobs = new.finish_reason, None
    if reason == "cancelled" or (reason == "deadline" and first and not new.tokens):
        why = "no token within the time limit" if reason == "deadline" else "the server ends"
        raise HTTPException(503, f"answer: expected one, got none: {why}")
    if body.chat:
        role = {"role": "assistant"} if first else {}
        content = {"delta" if body.stream else "message": {**role, "content": new.text}}
    if new.logprobs is not None:
        entries = []
        for token, (logprob, top) in zip(new.tokens, new.logprobs, strict=True):
            tops = [_entry(tokenizer, before, *each) for each in top.items()]
            entries.append(_entry(tokenizer, before, token, logprob) | {"top_logprobs": tops})
            before = [token]
        logprobs = {"content": entries} if body.chat else {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_by_text(entry["top_logprobs"]) for entry in entries],
        }  # fmt: skip
    said = "length" if reason in ("deadline", "error") else reason  # of errors: memory ran out behind a token
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": said}


def _by_text(tops: list[dict[str, Any]]) -> dict[str, float]:
    """The log-probability of each text; of tokens with one text, such as parts of characters, of the most likely."""
    found: dict[str, float] = {}
    for top in tops:
        found.setdefault(top["token"], top["logprob"])
    return found


def _entry(tokenizer: Any, before: list[int], token: int, logprob: float) -> dict[str, Any]:
    groups = before, [*before, token], [token]
    known, text, alone = (tokenizer.decode(ids, skip_special_tokens=False) for ids in groups)
    # A token that ends a character changes the text before it; alone it is shown as a part.
    own = text[len(known) :] if text != known and text.startswith(known) else alone
    data = None if "\ufffd" in own else list(own.encode())  # None: a part of a character
    return {"token": own, "logprob": logprob, "bytes": data}


def usage(requests: Sequence[Request]) -> dict[str, Any]:
    """The numbers of tokens of an answer."""
    found = [request.metrics for request in requests]
    counts = {"prompt_tokens": sum(each.prompt_tokens for each in found)}
    counts["completion_tokens"] = sum(each.new_tokens for each in found)
    details = {"cached_tokens": sum(each.cached_tokens for each in found)}
    return {**counts, "total_tokens": sum(counts.values()), "prompt_tokens_details": details}
