"""Bodies of `/v1/responses`, OpenAI's newer interface, as those of chat completions. Nothing is kept between two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcache.server.conversations import MAX_MESSAGES
from kvcache.server.fields import CHATS, FLAG, FROM_1, IGNORED, PLAIN, TEXT, Field
from kvcache.server.message_bodies import skipped
from kvcache.server.refusals import BodyError
from kvcache.support.arguments import as_instance, short

__all__ = ["RESPONSES", "chat_of_responses", "flattened"]

_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def chat_of_responses(given: dict[str, Any]) -> dict[str, Any]:
    """The chat completion that a body asks for.

    Args:
        given: its fields, as `checked` by `RESPONSES`.

    Raises:
        TypeError, ValueError: not such a body.
    """
    same = (
        "model", "stream", "temperature", "top_p", "parallel_tool_calls", "cache_salt", "chat_template_kwargs",
        "prompt_cache_options", "prompt_cache_retention",
    )
    chat: dict[str, Any] = {name: given[name] for name in same if name in given}
    system = [{"role": "system", "content": given["instructions"]}] if given.get("instructions") else []
    chat |= {"messages": [*system, *_messages(given["input"])], "max_completion_tokens": given.get("max_output_tokens")}
    if tools := [*_tools(given.get("tools", []))]:
        chat |= {"tools": tools, "tool_choice": _choice(given.get("tool_choice", "auto"))}
    text = as_instance(given.get("text", {}), dict, "text")
    chat |= {"verbosity": text.get("verbosity"), "response_format": _format(text.get("format"))}
    chat["reasoning_effort"] = as_instance(given.get("reasoning", {}), dict, "reasoning").get("effort")
    return chat


def _messages(items: Any) -> Iterator[dict[str, Any]]:
    """Messages of the items; thoughts, texts and calls of an assistant that follow each other become one."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if len(as_instance(items, list, "input")) > MAX_MESSAGES:
        raise ValueError(f"input: expected at most {MAX_MESSAGES} items, got {len(items)}")
    said: dict[str, Any] = {}  # by the assistant
    for item in items:
        kind = as_instance(as_instance(item, dict, "input").get("type") or "message", str, "input")
        if said and (kind in _OUTPUTS or _begins_another(kind, item, said)):
            yield {"role": "assistant", "content": None, **said}
            said = {}
        if kind == "reasoning":
            if thoughts := _text(item.get("content") or item.get("summary") or ""):
                said["reasoning_content"] = thoughts
        elif kind == "function_call":
            function = {"name": _flat(item), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        elif kind == "custom_tool_call":
            custom = {"name": _flat(item), "input": item.get("input")}
            said.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "custom", "custom": custom})
        elif kind in _OUTPUTS:
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output") or "")}
        elif kind == "message" and item.get("role") == "assistant":
            said["content"] = _text(item.get("content"))
        elif kind == "message":
            yield {"role": item.get("role"), "content": _text(item.get("content"))}
        elif kind.endswith(("_call", "_call_output")):
            skipped(kind[:100])
        else:
            message = f"input: expected messages, calls and their results, got {short(kind)}"
            raise BodyError(message, "unsupported_parameter")
    if said:
        yield {"role": "assistant", "content": None, **said}


def _begins_another(kind: str, item: dict[str, Any], said: dict[str, Any]) -> bool:
    """Whether an item is no part of what the assistant has said before it."""
    if kind == "message":
        return item.get("role") != "assistant" or "content" in said or "tool_calls" in said
    return kind == "reasoning" and bool(said)


def _text(content: Any) -> str:
    """A text, or the texts of its parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in as_instance(content, list, "input"):
        kind = as_instance(part, dict, "input").get("type")
        if kind not in _TEXTS:
            raise BodyError(f"input: expected parts of text, got {short(kind)}", "unsupported_parameter")
        texts.append(as_instance(part.get("refusal" if kind == "refusal" else "text"), str, "input"))
    return "".join(texts)


def _flat(named: dict[str, Any]) -> Any:
    """The name of a tool for the network, which has that of its namespace before it."""
    name, space = named.get("name"), named.get("namespace")
    return f"{space}__{name}" if isinstance(space, str) and space else name


def _flat_tools(tools: Any) -> Iterator[dict[str, Any]]:
    """The tools of a body, and those within its namespaces, each of which knows that."""
    for tool in as_instance(tools, list, "tools"):
        if as_instance(tool, dict, "tools").get("type") != "namespace":
            yield tool
            continue
        space = as_instance(tool.get("name"), str, "tools")
        for each in as_instance(tool.get("tools"), list, "tools"):
            yield as_instance(each, dict, "tools") | {"namespace": space}


def flattened(tools: Any) -> dict[str, dict[str, str]]:
    """The name and the namespace of tools that have one, by their names for the network."""
    found = [tool for tool in _flat_tools(tools or []) if "namespace" in tool]
    return {_flat(tool): {"name": tool.get("name", ""), "namespace": tool["namespace"]} for tool in found}


def _tools(tools: Any) -> Iterator[dict[str, Any]]:
    for tool in _flat_tools(tools):
        kind, flat = tool.get("type"), {"name": _flat(tool)}
        names = ("description", "parameters", "strict")
        if kind == "function":
            yield {"type": kind, kind: flat | {name: tool[name] for name in names if tool.get(name) is not None}}
        elif kind == "custom":
            form = as_instance(tool.get("format") or {"type": "text"}, dict, "tools.format")
            grammar = {name: form.get(name) for name in ("syntax", "definition")}
            custom = flat | {"description": tool.get("description"), "format": form | {"grammar": grammar}}
            yield {"type": kind, kind: custom}
        else:
            skipped(str(kind)[:100])


def _choice(choice: Any) -> Any:
    """The choice of tools, as chat completions name it."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        named = [_named(tool) for tool in as_instance(choice.get("tools"), list, "tool_choice")]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return _named(choice)


def _named(tool: Any) -> dict[str, Any]:
    found = as_instance(tool, dict, "tool_choice")
    kind = str(found.get("type"))
    return {"type": kind, kind: {"name": _flat(found)}}


def _format(form: Any) -> Any:
    """The form of an answer, as chat completions name it."""
    if form is None:
        return None
    if as_instance(form, dict, "text").get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: each for name, each in form.items() if name != "type"}}


RESPONSES = {
    **dict.fromkeys(("input", "tools", "tool_choice", "reasoning", "text", "temperature", "top_p"), PLAIN),
    "prompt_cache_options": PLAIN, "prompt_cache_retention": PLAIN,
    "model": TEXT, "instructions": TEXT, "max_output_tokens": FROM_1, "stream": FLAG, "parallel_tool_calls": FLAG,
    **{name: CHATS[name] for name in ("cache_salt", "chat_template_kwargs")},
    **dict.fromkeys(
        (
            "client_metadata", "include", "max_tool_calls", "metadata", "prompt_cache_key",
            "safety_identifier", "service_tier", "store", "stream_options", "truncation",
            "user",
        ),
        IGNORED,
    ),
    "background": Field(neutral=(False,)), "top_logprobs": Field(neutral=(0,)),
    **dict.fromkeys(("conversation", "previous_response_id", "prompt"), Field()),
}
