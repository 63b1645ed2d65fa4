"""Bodies of completions and chat completions, OpenAI's older interfaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvcache.engine import SamplingParams
from kvcache.engine.documents import LINK
from kvcache.server.asked import Asked
from kvcache.server.contents import Contents
from kvcache.server.conversations import Conversation, ToolChoice, conversation_of, text_of
from kvcache.server.fields import CHATS, MAX_CHOICES, SAMPLING, TEXTS, checked
from kvcache.server.refusals import too_many
from kvcache.server.retention import breakpoints
from kvcache.support.arguments import short

__all__ = ["asked_of_completion", "check_scores"]

_MAX_LOGPROBS = 1 << 20  # of an answer, which are 100 MB of JSON


def asked_of_completion(
    found: Mapping[str, Any], chat: bool, defaults: SamplingParams, max_tokens: int | None = None
) -> Asked:
    """Read the body of a chat completion, or of a completion.

    A setting that is not supported is refused by its name, unless its value is one that changes nothing.

    Args:
        found: the object.
        chat: which of the two.
        defaults: of what the body does not say.
        max_tokens: no answer has more tokens; None: there is no such number.

    Raises:
        TypeError, ValueError: not such a body; the message begins with the name of what is wrong.
    """
    prompt, table = ("messages", CHATS) if chat else ("prompt", TEXTS)
    given = {"n": 1, "stream": False} | checked(found, table, ("model", prompt))
    contents = Contents(prompt)
    for name, other in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if given.get(name) and not given.get(other):
            raise ValueError(f"{name}: expected {other} beside it, got none")
    if given.get("best_of", 1) not in (1, given["n"]):
        raise ValueError(f"best_of: expected as many as n, {given['n']}, got {short(given['best_of'])}")
    prompts = [_conversation(given, contents)] if chat else given["prompt"]
    if (count := given["n"] * len(prompts)) > MAX_CHOICES:
        raise too_many(prompt, MAX_CHOICES, count)
    if chat:
        given["logprobs"] = given.get("top_logprobs", 0) if given.get("logprobs") else None
        given["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens", defaults.max_tokens))
    said = {name: given[name] for name in SAMPLING if name in given}
    params = replace(defaults, **said, grammar=given.get("response_format"))
    _check_logprobs("top_logprobs" if chat else "logprobs", params, count, max_tokens)
    keep = given.get("prompt_cache_options") or given.get("prompt_cache_retention")
    asked = Asked(
        given["model"], prompts, params, prompt, given["n"], given["stream"],
        with_usage=given.get("stream_options", False), salt=given.get("cache_salt"), keep=keep,
        marks=breakpoints(found["messages"], prompts[0].messages, keep) if chat else (), echo=given.get("echo", False),
        with_tokens=given.get("return_token_ids", False), priority=given.get("priority", 0),
        warnings=tuple(contents.warnings),
    )
    if asked.stream and asked.scores is not None:
        raise ValueError("echo: expected none beside logprobs in a stream, got one")
    return asked


def _conversation(given: dict[str, Any], contents: Contents) -> Conversation:
    """The conversation of a body; what it tells the template by name counts more than what follows from its fields."""
    names = ("reasoning", "reasoning_effort", "thinking", "verbosity", "chat_template_kwargs")
    template = {variable: value for name in names for variable, value in given.get(name, {}).items()}
    messages, continues = given["messages"], given.get("continue_final_message", False)
    begins = given.get("add_generation_prompt", not continues)
    if continues and begins:
        raise ValueError("add_generation_prompt: expected false beside continue_final_message, got true")
    choice, parallel = given.get("tool_choice", ToolChoice()), given.get("parallel_tool_calls", True)
    found = conversation_of(contents, messages, given.get("tools", []), template, choice, parallel, begins, continues)
    if continues and not _is_begun(found.messages):
        raise ValueError("continue_final_message: expected a text of the assistant as the last message, got none")
    return found._replace(edits=given.get("context_management"), link=given.get("segment_link", LINK))


def _is_begun(messages: Any) -> bool:
    """Whether messages end with a text of the assistant."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant" and bool(text_of(last))


def check_scores(tokens: int, logprobs: int) -> None:
    """Refuse prompts of `tokens` tokens with more log-probabilities than may be."""
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
