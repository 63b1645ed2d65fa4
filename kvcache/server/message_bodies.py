"""Bodies of `/v1/messages`, Anthropic's interface, as those of chat completions."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Union

from kvcache.server.conversations import MAX_MESSAGES
from kvcache.server.fields import COUNT, FLAG, IGNORED, PLAIN, STOPS, TEXT, Field
from kvcache.server.refusals import BodyError
from kvcache.server.retention import MOST_MARKS, CacheMark, marked_ttl
from kvcache.support.arguments import as_instance, short

__all__ = ["COUNTED", "MESSAGES", "chat_of_messages", "skipped"]

logger = logging.getLogger("kvcache")

_Marks = list[tuple[Union[int, None], float]]  # noqa: UP007  # characters and seconds, see `CacheMark`
_Marked = tuple[dict[str, Any], _Marks]  # a message, and the marks in it
_BILLING = "x-anthropic-billing-header:"  # begins a block of clients that differs with each request
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_messages(given: dict[str, Any]) -> tuple[dict[str, Any], list[CacheMark]]:
    """The chat completion that a body asks for, and the ends of blocks that are to stay cached.

    Args:
        given: its fields, as `checked` by `MESSAGES`.

    Raises:
        TypeError, ValueError: not such a body.
    """
    said = [*_system(given.get("system", "")), *_messages(given["messages"])]
    messages, marks = [message for message, _ in said], []
    for number, (_, found) in enumerate(said):
        marks += [CacheMark(number, characters, seconds) for characters, seconds in found]
    same = ("model", "stream", "temperature", "top_p", "top_k")
    chat: dict[str, Any] = {name: given[name] for name in same if name in given} | {"messages": messages}
    chat |= {"max_completion_tokens": given.get("max_tokens"), "stop": given.get("stop_sequences")}
    tools = [*_tools(given.get("tools", []))]
    if tools:
        chat |= {"tools": tools, **_choice(given.get("tool_choice", {"type": "auto"}))}
    config = as_instance(given.get("output_config", {}), dict, "output_config")
    chat |= {"reasoning_effort": config.get("effort"), "response_format": _format(config.get("format"))}
    if thinking := given.get("thinking"):
        thinks = as_instance(thinking, dict, "thinking").get("type") in ("enabled", "adaptive")
        chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] and not last.get("tool_calls"):
        chat["continue_final_message"] = True
    of_tools = [marked_ttl(tool) for tool in given.get("tools", []) if isinstance(tool, dict)]
    if seconds := max(filter(None, of_tools), default=0.0):  # templates have them beside the system message
        marks.insert(0, CacheMark(0, None, seconds))
    if (whole := marked_ttl(given)) is not None:
        chat["prompt_cache_options"] = {"ttl": f"{whole:.0f}s"}
    return chat, marks[-MOST_MARKS:]


def _system(system: Any) -> Iterator[_Marked]:
    """The system message. The block that clients write for billing is left out: it would change the prefix."""
    text, marks = "", _Marks()
    for block in [{"type": "text", "text": system}] if isinstance(system, str) else _blocks(system, "system"):
        said = _text(block, "system")
        if said and not said.startswith(_BILLING):
            text += "\n\n" * bool(text) + said
            marks += [(len(text), seconds) for seconds in [marked_ttl(block)] if seconds]
    if text:
        yield {"role": "system", "content": text}, marks


def _messages(messages: Any) -> Iterator[_Marked]:
    if len(as_instance(messages, list, "messages")) > MAX_MESSAGES:
        raise ValueError(f"messages: expected at most {MAX_MESSAGES}, got {len(messages)}")
    for message in messages:
        role, content = as_instance(message, dict, "messages").get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ValueError(f"messages: expected the role user, assistant or system, got {short(role)}")
        if isinstance(content, str):
            yield {"role": role, "content": content}, []
        elif role == "assistant":
            blocks = _blocks(content, "messages")
            yield _of_assistant(blocks), _whole(blocks)
        else:
            yield from _of_user(role, _blocks(content, "messages"))


def _blocks(content: Any, name: str) -> list[dict[str, Any]]:
    return [as_instance(block, dict, name) for block in as_instance(content, list, name)]


def _of_assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(as_instance(block.get("thinking"), str, "messages"))
        elif kind == "tool_use":
            arguments = json.dumps(as_instance(block.get("input", {}), dict, "messages"), ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text(block, "messages"))
    return {
        "role": "assistant", "content": "".join(texts) if texts or not calls else None,
        "reasoning_content": "\n".join(thoughts) or None, "tool_calls": calls or None,
    }


def _of_user(role: str, blocks: list[dict[str, Any]]) -> Iterator[_Marked]:
    """Results of tools are messages of their own, in the order of the blocks."""
    texts: list[dict[str, Any]] = []
    marks, characters = _Marks(), 0
    for block in blocks:
        seconds = marked_ttl(block)
        if block.get("type") != "tool_result":
            texts.append({"type": "text", "text": _text(block, "messages")})
            characters += len(texts[-1]["text"])
            marks += [(characters, seconds)] if seconds else []
            continue
        if texts:
            yield {"role": role, "content": texts}, marks
            texts, marks, characters = [], [], 0
        content = block.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(_text(each, "messages") for each in _blocks(content, "messages"))
        result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        inner = block.get("content")
        yield result, _whole([*(inner if isinstance(inner, list) else []), block])
    if texts or not blocks:
        yield {"role": role, "content": texts or ""}, marks


def _whole(blocks: list[dict[str, Any]]) -> _Marks:
    """The mark at the end of a message, where one of its blocks has one: the last one counts."""
    found = [seconds for seconds in map(marked_ttl, blocks) if seconds]
    return [(None, seconds) for seconds in found[-1:]]


def _text(block: dict[str, Any], name: str) -> str:
    if block.get("type") != "text":
        raise BodyError(f"{name}: expected blocks of text, got {short(block.get('type'))}", "unsupported_parameter")
    return as_instance(block.get("text"), str, name)


def _tools(tools: Any) -> Iterator[dict[str, Any]]:
    for tool in as_instance(tools, list, "tools"):
        if (kind := as_instance(tool, dict, "tools").get("type") or "custom") != "custom":
            skipped(str(kind)[:100])
            continue
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function |= {"parameters": tool.get("input_schema"), "strict": tool.get("strict")}
        yield {"type": "function", "function": {key: each for key, each in function.items() if each is not None}}


@lru_cache(maxsize=256)
def skipped(kind: str) -> None:
    """Log, once for each kind, that a tool is left out which a service would run itself."""
    logger.warning("tools of type %s are left out: this server runs none", kind)


def _choice(choice: Any) -> dict[str, Any]:
    kind = as_instance(choice, dict, "tool_choice").get("type")
    if kind == "tool":
        found: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in _CHOICES:
        found = _CHOICES[kind]
    else:
        raise ValueError(f"tool_choice: expected the type auto, any, tool or none, got {short(kind)}")
    return {"tool_choice": found, "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}


def _format(form: Any) -> Any:
    """The form of an answer, as chat completions name it."""
    if form is None:
        return None
    schema = {"name": "output", "schema": as_instance(form, dict, "output_config").get("schema"), "strict": True}
    return {"type": form.get("type"), "json_schema": schema}


MESSAGES = {
    **dict.fromkeys(("messages", "system", "tools", "tool_choice", "thinking", "output_config"), PLAIN),
    **dict.fromkeys(("cache_control", "diagnostics", "temperature", "top_p", "top_k"), PLAIN),
    "model": TEXT, "max_tokens": COUNT, "stop_sequences": STOPS, "stream": FLAG,
    **dict.fromkeys(
        (
            "betas", "context_management", "inference_geo", "metadata", "service_tier",
            "speed",
        ),
        IGNORED,
    ),
    "container": Field(neutral=()), "mcp_servers": Field(neutral=([],)),
}
COUNTED = MESSAGES | {"max_tokens": IGNORED}
