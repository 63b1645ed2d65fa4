"""The JSON that a client of OpenAI's interface sends, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvcache.engine import SamplingParams
from kvcache.grammar import Grammar
from kvcache.server.contents import Contents
from kvcache.server.conversations import Conversation, ToolChoice, functions_of, messages_of, text_of
from kvcache.server.fields import CHATS, MAX_CHOICES, SAMPLING, TEXTS, checked
from kvcache.server.refusals import BodyError, too_many
from kvcache.server.retention import CacheMark, breakpoints
from kvcache.support.arguments import as_instance, short
from kvcache.support.json_text import TooManyNested, read_json_text

__all__ = ["Body", "body_of", "check_scores", "json_of", "parse"]

_MAX_LOGPROBS = 1 << 20  # of an answer, which are 100 MB of JSON


class Body(NamedTuple):
    """A checked body. `prompts` is one conversation, or has texts and lists of token ids."""

    chat: bool
    model: str
    prompts: list[Any]
    params: SamplingParams
    n: int
    stream: bool
    with_usage: bool  # whether a stream ends with the numbers of tokens
    salt: str | None  # requests of another one share no prefixes with it
    field: str  # the name of the prompts
    keep: float | None = None  # seconds that the prompts stay cached for
    marks: tuple[CacheMark, ...] = ()  # ends of blocks of a conversation that stay for times of their own
    echo: bool = False  # whether an answer begins with its prompt
    with_tokens: bool = False  # whether it has token ids, the prompt's too
    priority: int = 0
    warnings: tuple[str, ...] = ()  # of what it says that is not read
    form: Grammar | None = None  # that the body asks for, beside the grammar of the parameters


def json_of(data: bytes | bytearray) -> dict[str, Any]:
    """The object of a body. ValueError: it is none."""
    try:
        return as_instance(read_json_text(data), dict, "body")
    except TooManyNested as error:
        raise BodyError(f"body: {error}", "array_above_max_length") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: expected JSON, got an error: {short(str(error))}") from None


def parse(data: bytes | bytearray, chat: bool, defaults: SamplingParams, max_tokens: int | None = None) -> Body:
    """The body of a chat completion, or of a completion, in JSON; see `body_of`."""
    return body_of(json_of(data), chat, defaults, max_tokens)


def body_of(
    found: dict[str, Any], chat: bool, defaults: SamplingParams, max_tokens: int | None = None,
    marks: Sequence[CacheMark] = (), contents: Contents | None = None,
) -> Body:
    """The body of a chat completion, or of a completion.

    A setting that is not supported is refused by its name, unless its value is one that changes nothing.

    Args:
        found: the object.
        chat: which of the two.
        defaults: of what the body does not say.
        max_tokens: no answer has more tokens; None: there is no such number.
        marks: of the conversation, where its messages have none.
        contents: has read parts of the messages; None: nothing has.

    Raises:
        TypeError, ValueError: not such a body; the message begins with the name of what is wrong.
    """
    prompt, table = ("messages", CHATS) if chat else ("prompt", TEXTS)
    given = {"n": 1, "stream": False} | checked(found, table, ("model", prompt))
    contents = contents or Contents(prompt)
    if chat:
        given["messages"] = messages_of(given["messages"], contents)
    for name, other in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if given.get(name) and not given.get(other):
            raise ValueError(f"{name}: expected {other} beside it, got none")
    if given.get("best_of", 1) not in (1, given["n"]):
        raise ValueError(f"best_of: expected as many as n, {given['n']}, got {short(given['best_of'])}")
    prompts = [_conversation(given)] if chat else given["prompt"]
    if (count := given["n"] * len(prompts)) > MAX_CHOICES:
        raise too_many(prompt, MAX_CHOICES, count)
    if chat:
        given["logprobs"] = given.get("top_logprobs", 0) if given.get("logprobs") else None
        given["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens", defaults.max_tokens))
    said = {name: given[name] for name in SAMPLING if name in given}
    params = replace(defaults, **said, grammar=given.get("response_format"))
    _check_logprobs("top_logprobs" if chat else "logprobs", params, count, max_tokens)
    with_usage = given.get("stream_options", False)
    salt, keep = given.get("cache_salt"), given.get("prompt_cache_options") or given.get("prompt_cache_retention")
    marks = marks or (breakpoints(found["messages"], given["messages"], keep) if chat else [])
    echo, scores = given.get("echo", False), given.get("echo", False) and params.logprobs is not None
    if scores and given["stream"]:
        raise ValueError("echo: expected none beside logprobs in a stream, got one")
    if keep is None and params.max_tokens == 0 and not scores:  # the prompt runs and nothing else
        keep = 0.0
    return Body(
        chat, given["model"], prompts, params, given["n"], given["stream"], with_usage, salt, prompt, keep,
        tuple(marks), echo, given.get("return_token_ids", False), given.get("priority", 0), tuple(contents.warnings),
    )


def _conversation(given: dict[str, Any]) -> Conversation:
    """The conversation of a body; what it tells the template by name counts more than what follows from its fields."""
    tools, customs = functions_of(given.get("tools") or [])
    choice = given.get("tool_choice", ToolChoice())
    known = {tool["function"]["name"] for tool in tools}
    if choice.names is not None and not choice.names <= known:
        raise ValueError(f"tool_choice: expected names of tools, got {short(sorted(choice.names - known))}")
    if choice.mode == "required" and not tools:
        raise ValueError("tool_choice: expected tools beside it, got none")
    names = ("reasoning", "reasoning_effort", "thinking", "verbosity", "chat_template_kwargs")
    template = {variable: value for name in names for variable, value in given.get(name, {}).items()}
    parallel, continues = given.get("parallel_tool_calls", True), given.get("continue_final_message", False)
    if continues and given.get("add_generation_prompt"):
        raise ValueError("add_generation_prompt: expected false beside continue_final_message, got true")
    if continues and not _is_begun(given["messages"]):
        raise ValueError("continue_final_message: expected a text of the assistant as the last message, got none")
    begins = given.get("add_generation_prompt", not continues)
    return Conversation(given["messages"], tools or None, template, choice, parallel, customs, begins, continues)


def _is_begun(messages: Any) -> bool:
    """Whether messages end with a text of the assistant."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant" and bool(text_of(last))


def check_scores(tokens: int, logprobs: int) -> None:
    """Refuse prompts of so many tokens with more log-probabilities than may be."""
    if (asked := tokens * (1 + logprobs)) > _MAX_LOGPROBS:
        raise ValueError(f"logprobs: expected at most {_MAX_LOGPROBS} values of prompts, got {asked}")


def _check_logprobs(name: str, params: SamplingParams, count: int, max_tokens: int | None) -> None:
    """Refuse `count` answers with more log-probabilities than may be."""
    if params.logprobs is None:
        return
    tokens = params.max_tokens if max_tokens is None else min(params.max_tokens, max_tokens)
    if (asked := count * tokens * (1 + params.logprobs)) > _MAX_LOGPROBS:
        raise ValueError(
            f"{name}: expected at most {_MAX_LOGPROBS} values, answers * max_tokens * (1 + {name}), got {asked}"
        )
