"""Bodies of `/v1/messages`, Anthropic's interface, as those of chat completions."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from kvcache.server.conversations import MAX_MESSAGES
from kvcache.server.fields import COUNT, FLAG, IGNORED, PLAIN, STOPS, TEXT, Field
from kvcache.server.refusals import BodyError
from kvcache.server.retention import marked_ttl
from kvcache.support.arguments import as_instance, short

__all__ = ["COUNTED", "MESSAGES", "chat_of_messages", "skipped"]

logger = logging.getLogger("kvcache")

_BILLING = "x-anthropic-billing-header:"  # begins a block of clients that differs with each request
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_messages(given: dict[str, Any]) -> dict[str, Any]:
    """The chat completion that a body asks for.

    Args:
        given: its fields, as `checked` by `MESSAGES`.

    Raises:
        TypeError, ValueError: not such a body.
    """
    messages = [*_system(given.get("system", "")), *_messages(given["messages"])]
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
    if (ttl := marked_ttl(given)) is not None:
        chat["prompt_cache_options"] = {"ttl": ttl}
    return chat


def _system(system: Any) -> Iterator[dict[str, Any]]:
    """The system message. The block that clients write for billing is left out: it would change the prefix."""
    if not isinstance(system, str):
        texts = [_text(block, "system") for block in _blocks(system, "system")]
        system = "\n\n".join(text for text in texts if not text.startswith(_BILLING))
    if system:
        yield {"role": "system", "content": system}


def _messages(messages: Any) -> Iterator[dict[str, Any]]:
    if len(as_instance(messages, list, "messages")) > MAX_MESSAGES:
        raise ValueError(f"messages: expected at most {MAX_MESSAGES}, got {len(messages)}")
    for message in messages:
        role, content = as_instance(message, dict, "messages").get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ValueError(f"messages: expected the role user, assistant or system, got {short(role)}")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield _of_assistant(_blocks(content, "messages"))
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


def _of_user(role: str, blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, in the order of the blocks."""
    texts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append({"type": "text", "text": _text(block, "messages")})
            continue
        if texts:
            yield {"role": role, "content": texts}
            texts = []
        content = block.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(_text(each, "messages") for each in _blocks(content, "messages"))
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    if texts or not blocks:
        yield {"role": role, "content": texts or ""}


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
    **dict.fromkeys(("cache_control", "temperature", "top_p", "top_k"), PLAIN),
    "model": TEXT, "max_tokens": COUNT, "stop_sequences": STOPS, "stream": FLAG,
    **dict.fromkeys(
        (
            "betas", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier",
            "speed",
        ),
        IGNORED,
    ),
    "container": Field(neutral=()), "mcp_servers": Field(neutral=([],)),
}
COUNTED = MESSAGES | {"max_tokens": IGNORED}
