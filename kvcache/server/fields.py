"""The fields of bodies: which are honoured, which change nothing whatever they say, and which values of others do.

`CHATS` and `TEXTS` are the tables of chat completions and of completions. Every other name is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from kvcache.engine import SamplingParams
from kvcache.server.constraints import response_format
from kvcache.server.contents import as_list
from kvcache.server.conversations import (
    edits_of,
    effort,
    reasoning,
    template_kwargs,
    thinking,
    tool_choice_of,
    verbosity,
)
from kvcache.server.refusals import BodyError
from kvcache.server.retention import cache_options, cache_retention
from kvcache.support.arguments import as_count, as_instance, short

__all__ = [
    "CHATS", "COUNT", "DETOKENIZE", "FLAG", "FROM_1", "IGNORED", "MAX_CHOICES", "PLAIN", "SAMPLING", "STOPS", "TEXT",
    "TEXTS", "TOKENIZE", "Field", "checked", "salt_of",
]

MAX_CHOICES = 128  # answers of one body: prompts times `n`
_MAX_STOPS, _MAX_STOP = 16, 500  # strings, and characters of each: the search for them takes time with each token
_MAX_TOKENS = 1024  # of `stop_token_ids` and `logit_bias`: each answer has a copy
_MAX_SALT = 1024  # characters
_MAX_PRIORITY = 1 << 20  # which is months of waiting


class Field(NamedTuple):
    """The treatment of a field.

    Attributes:
        read: reads a value, given its `name` for messages; None: no value is honoured.
        neutral: where none is honoured, the values that ask for nothing; None: any value.
    """

    read: Callable[..., Any] | None = None
    neutral: tuple[Any, ...] | None = ()


def checked(body: Mapping[str, Any], table: Mapping[str, Field], required: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a body that are honoured, as they are read.

    Args:
        body: an object of JSON; a field of none is no field.
        table: of the fields that it may have.
        required: fields that it must have.

    Raises:
        TypeError, ValueError: a field is missing, unknown, or has another value; its name begins the message.
    """
    said = {name: value for name, value in body.items() if value is not None}
    if missing := [name for name in required if name not in said]:
        raise ValueError(f"{missing[0]}: expected one, got none")
    found = {}
    for name, value in said.items():
        field = table.get(name, _REFUSED)
        if field.read is not None:
            found[name] = field.read(value, name=name)
        elif field.neutral is not None and value not in field.neutral:
            message = f"{short(name)[1:-1]}: expected none, since it is not supported, got {short(value)}"
            raise BodyError(message, "unsupported_parameter")
    return found


# -- readers of values; `SamplingParams` and the engine check the rest -----------------------------------------------


def _as_it_is(value: Any, name: str) -> Any:
    return value


def _stops(stops: Any, name: str) -> Any:
    stops = [stops] if isinstance(stops, str) else as_list(stops, name)
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


def salt_of(salt: Any, name: str) -> str:
    """A name within the namespace of the key: bodies of different ones share no prefixes."""
    if not 0 < len(as_instance(salt, str, name)) <= _MAX_SALT or not _is_unicode(salt):
        raise ValueError(f"{name}: expected 1 to {_MAX_SALT} characters, got {short(salt)}")
    return str(salt)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


PLAIN = Field(_as_it_is)
FLAG, TEXT = Field(partial(as_instance, kind=bool)), Field(partial(as_instance, kind=str))
FROM_1, STOPS, COUNT = Field(partial(as_count, least=1)), Field(_stops), Field(as_count)
IGNORED = Field(neutral=None)
_REFUSED, _TOP = Field(), partial(as_count, most=20)

# The fields of `SamplingParams` that a body sets under their names: all but these.
_OWN = {"grammar", "logits_processor"}
SAMPLING = {
    **{each.name: PLAIN for each in fields(SamplingParams) if each.name not in _OWN},
    "stop": STOPS, "stop_token_ids": Field(partial(_few, kind=list)), "logit_bias": Field(_biases),
    "max_tokens": COUNT,
    "logprobs": Field(lambda value, name: None if value is False else _TOP(value, name=name)),
}
_BOTH = {
    **SAMPLING, "model": TEXT, "n": Field(partial(as_count, least=1, most=MAX_CHOICES)), "stream": FLAG,
    "stream_options": Field(_with_usage), "cache_salt": Field(salt_of), "prompt_cache_options": Field(cache_options),
    "prompt_cache_retention": Field(cache_retention), "return_token_ids": FLAG,
    "priority": Field(partial(as_count, most=_MAX_PRIORITY)),  # nobody comes before others by it
    # Names of clients, and hints for caches and routers: they change no token.
    **dict.fromkeys(
        (
            "client_metadata", "metadata", "prediction", "prompt_cache_key", "request_id", "safety_identifier",
            "separate_reasoning", "service_tier", "store", "stream_reasoning", "user",
        ),
        IGNORED,
    ),
    # Values that routers and clients add to every request, and that ask for nothing.
    **dict.fromkeys(("bad_words", "documents", "functions"), Field(neutral=([],))),
    **dict.fromkeys(
        (
            "continue_final_message", "echo", "include_stop_str_in_output", "no_stop_trim",
            "return_hidden_states", "return_tokens_as_token_ids", "use_beam_search",
        ),
        Field(neutral=(False,)),
    ),
    **dict.fromkeys(
        (
            "add_generation_prompt", "include_reasoning", "skip_special_tokens", "spaces_between_special_tokens",
        ),
        Field(neutral=(True,)),
    ),
    "top_logprobs": Field(neutral=(0,)),
    "best_of": Field(neutral=(1,)), "function_call": Field(neutral=("none", "auto")),
    "length_penalty": Field(neutral=(1,)), "modalities": Field(neutral=(["text"],)), "suffix": Field(neutral=("",)),
}
TEXTS = _BOTH | {
    "prompt": Field(_prompts), "echo": FLAG, "best_of": FROM_1, "chat_template_kwargs": Field(neutral=({},)),
    "parallel_tool_calls": IGNORED, "response_format": Field(neutral=({"type": "text"},)),
    "tool_choice": Field(neutral=("none", "auto")), "tools": Field(neutral=([],)),
    "verbosity": Field(neutral=("medium",)),
}
CHATS = _BOTH | {
    "messages": PLAIN, "logprobs": FLAG, "top_logprobs": Field(_TOP), "max_completion_tokens": COUNT,
    "tools": PLAIN, "tool_choice": Field(tool_choice_of), "parallel_tool_calls": FLAG,
    "response_format": Field(response_format), "chat_template_kwargs": Field(template_kwargs),
    "reasoning_effort": Field(effort), "verbosity": Field(verbosity), "add_generation_prompt": FLAG,
    "continue_final_message": FLAG, "reasoning": Field(reasoning), "thinking": Field(thinking),
    "context_management": Field(edits_of), "segment_link": COUNT,
}
TOKENIZE = {
    **{name: CHATS[name] for name in ("model", "messages", "tools", "chat_template_kwargs", "reasoning_effort")},
    "prompt": TEXTS["prompt"], "return_token_strs": FLAG, "add_special_tokens": FLAG,
    "add_generation_prompt": CHATS["add_generation_prompt"], "continue_final_message": CHATS["continue_final_message"],
}
DETOKENIZE = {"model": TEXT, "tokens": Field(partial(as_instance, kind=list))}
