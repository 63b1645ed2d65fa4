"""The JSON that a client of OpenAI's interface sends, checked."""

from __future__ import annotations

import json
import json.scanner
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from kvcache.engine import SamplingParams
from kvcache.server.refusals import BodyError, too_many
from kvcache.support.arguments import as_count, as_instance, short

__all__ = ["Body", "parse"]

Reader = Callable[..., Any]  # of a value, and its `name` for messages

_MAX_CHOICES = 128  # answers of one body: prompts times `n`
_MAX_MESSAGES = 4096  # templates have a loop over them
_MAX_NESTED = 1 << 16  # lists and objects of a large body
_LARGE = 1 << 16  # bytes of JSON, which take the scanner in C a few milliseconds
_MAX_STOPS, _MAX_STOP = 16, 500  # strings, and characters of each: the search for them takes time with each token
_MAX_TOKENS = 1024  # of `stop_token_ids` and `logit_bias`: each answer has a copy
_MAX_LOGPROBS = 1 << 20  # of an answer, which are 100 MB of JSON


class _Patient(json.JSONDecoder):
    """Reads JSON with the scanner in Python, which lets other threads run; the one in C holds the GIL for a second.

    A collection of hundreds of thousands of lists would hold it too.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._left = _MAX_NESTED
        self.parse_array = partial(self._counted, self.parse_array)  # type: ignore[has-type]
        self.parse_object = partial(self._counted, self.parse_object)  # type: ignore[has-type]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, read: Callable[..., Any], *arguments: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            message = f"body: expected at most {_MAX_NESTED} lists and objects, got more"
            raise BodyError(message, "array_above_max_length")
        return read(*arguments)


class Body(NamedTuple):
    """A checked body. `prompts` is one list of messages, or has texts and lists of token ids."""

    chat: bool
    model: str
    prompts: list[Any]
    params: SamplingParams
    n: int
    stream: bool
    with_usage: bool  # whether a stream ends with the numbers of tokens

    @property
    def field(self) -> str:
        """The name of the prompts."""
        return "messages" if self.chat else "prompt"


def parse(data: bytes | bytearray, chat: bool, defaults: SamplingParams, max_tokens: int | None = None) -> Body:
    """The body of a chat completion, or of a completion.

    A setting that is not supported is refused by its name, unless its value is one that changes nothing.

    Args:
        data: JSON.
        chat: which of the two.
        defaults: of what the body does not say.
        max_tokens: no answer has more tokens; None: there is no such number.

    Raises:
        TypeError, ValueError: not such a body; the message begins with the name of what is wrong.
    """
    try:
        body = as_instance(json.loads(data, cls=_Patient if len(data) > _LARGE else None), dict, "body")
    except BodyError:
        raise
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
            message = f"{short(name)[1:-1]}: expected none, since it is not supported, got {short(value)}"
            raise BodyError(message, "unsupported_parameter")
    for name, other in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if given.get(name) and not given.get(other):
            raise ValueError(f"{name}: expected {other} beside it, got none")
    if given.get("best_of", 1) not in (1, given["n"]):
        raise ValueError(f"best_of: expected as many as n, {given['n']}, got {short(given['best_of'])}")
    if (count := given["n"] * len(given[prompt])) > _MAX_CHOICES:
        raise too_many(chat, _MAX_CHOICES, count)
    if chat:
        given["logprobs"] = given.get("top_logprobs", 0) if given.get("logprobs") else None
        given["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens", defaults.max_tokens))
    params = replace(defaults, **{name: given[name] for name in _SAMPLING if name in given})
    _check_logprobs("top_logprobs" if chat else "logprobs", params, count, max_tokens)
    return Body(chat, given["model"], given[prompt], params, given["n"], given["stream"], given["stream_options"])


def _check_logprobs(name: str, params: SamplingParams, count: int, max_tokens: int | None) -> None:
    """Refuse `count` answers with more log-probabilities than may be."""
    if params.logprobs is None:
        return
    tokens = params.max_tokens if max_tokens is None else min(params.max_tokens, max_tokens)
    if (asked := count * tokens * (1 + params.logprobs)) > _MAX_LOGPROBS:
        raise ValueError(
            f"{name}: expected at most {_MAX_LOGPROBS} values, answers * max_tokens * (1 + {name}), got {asked}"
        )


def _stops(stops: Any, name: str) -> Any:
    stops = [stops] if isinstance(stops, str) else as_instance(stops, list, name)
    if len(stops) > _MAX_STOPS or any(isinstance(each, str) and len(each) > _MAX_STOP for each in stops):
        raise ValueError(f"{name}: expected at most {_MAX_STOPS} strings of {_MAX_STOP} characters, got {short(stops)}")
    return stops


def _few(tokens: Any, name: str, kind: type[list[Any]] | type[dict[Any, Any]]) -> Any:
    if len(as_instance(tokens, kind, name)) > _MAX_TOKENS:
        raise ValueError(f"{name}: expected at most {_MAX_TOKENS} tokens, got {len(tokens)}")
    return tokens


def _biases(biases: Any, name: str) -> dict[Any, Any]:
    """With tokens for keys, which are texts in JSON."""
    return {
        int(token) if token.isdecimal() and len(token) < 20 else token: bias
        for token, bias in _few(biases, name, dict).items()
    }


def _with_usage(options: Any, name: str) -> bool:
    if set(as_instance(options, dict, name)) - {"include_usage", "include_obfuscation"}:
        raise ValueError(f"{name}: expected include_usage or include_obfuscation, got {short(options)}")
    as_instance(options.get("include_obfuscation", False), bool, f"{name}.include_obfuscation")  # none is added
    return as_instance(options.get("include_usage", False), bool, f"{name}.include_usage")


def _prompts(prompt: Any, name: str) -> Any:
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
    if not all(isinstance(each, str) or (isinstance(each, list) and {*map(type, each)} == {int}) for each in prompts):
        raise TypeError(f"{name}: expected a text, token ids, or a list of these, got {short(prompt)}")
    return prompts


def _conversation(messages: Any, name: str) -> Any:
    """Messages whose contents have texts alone; the engine checks the rest."""
    if isinstance(messages, list) and len(messages) > _MAX_MESSAGES:
        raise ValueError(f"{name}: expected at most {_MAX_MESSAGES}, got {len(messages)}")
    for message in messages if isinstance(messages, list) else ():
        for part in parts if isinstance(message, dict) and isinstance(parts := message.get("content"), list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(f"{name}: expected parts of type text, got {short(part)}")
            as_instance(part.get("text"), str, name)
    return [messages]


# How each value is read; `SamplingParams` and the engine check the rest.
_FLAG, _TEXT = partial(as_instance, kind=bool), partial(as_instance, kind=str)
_FROM_1, _TOP = partial(as_count, least=1), partial(as_count, most=20)
_SAMPLING: dict[str, Reader] = {
    **{field.name: lambda value, name: value for field in fields(SamplingParams) if field.name != "logits_processor"},
    "stop": _stops, "stop_token_ids": partial(_few, kind=list), "logit_bias": _biases, "max_tokens": _FROM_1,
    "logprobs": lambda value, name: None if value is False else _TOP(value, name=name),
}
_OF_BOTH = _SAMPLING | {
    "model": _TEXT, "n": partial(as_count, least=1, most=_MAX_CHOICES), "stream": _FLAG, "stream_options": _with_usage,
}
_OF_TEXTS = _OF_BOTH | {"prompt": _prompts, "best_of": partial(as_count, least=1)}
_OF_CHATS = _OF_BOTH | {
    "messages": _conversation, "logprobs": _FLAG, "top_logprobs": _TOP, "max_completion_tokens": _FROM_1,
}
# They change no answer, or none of the answer's text: names of clients, hints for caches and routers.
_WITHOUT_EFFECT = {
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "prediction", "request_id", "separate_reasoning", "service_tier", "store", "stream_reasoning",
}
# The values of other settings that ask for nothing; routers add some of them to every request.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions", "bad_words", "documents"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(
        (
            "continue_final_message", "echo", "ignore_eos", "include_stop_str_in_output", "no_stop_trim",
            "return_hidden_states", "return_token_ids", "return_tokens_as_token_ids", "use_beam_search",
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            "add_generation_prompt", "include_reasoning", "skip_special_tokens", "spaces_between_special_tokens",
        ),
        (True,),
    ),
    **dict.fromkeys(("min_tokens", "priority", "top_logprobs"), (0,)),
    "best_of": (1,), "chat_template_kwargs": ({},), "length_penalty": (1,), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "suffix": ("",),
    "verbosity": ("medium",),
}
