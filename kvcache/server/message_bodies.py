"""Bodies of `/v1/messages`, Anthropic's interface."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Union

from kvcache.engine import SamplingParams
from kvcache.engine.documents import LINK
from kvcache.grammar import Grammar
from kvcache.server.asked import Asked
from kvcache.server.constraints import form_of
from kvcache.server.contents import Contents, as_list, left_out
from kvcache.server.conversations import (
    MAX_MESSAGES,
    ToolChoice,
    conversation_of,
    edits_of,
    effort,
    function_name,
    thinking,
)
from kvcache.server.fields import COUNT, FLAG, IGNORED, PLAIN, STOPS, TEXT, Field
from kvcache.server.fingerprints import without_billing
from kvcache.server.retention import MOST_MARKS, CacheMark, marked_ttl
from kvcache.support.arguments import as_instance, short

__all__ = ["COUNTED", "MESSAGES", "Said", "asked_of_message", "skipped"]

logger = logging.getLogger("kvcache")

_Marks = list[tuple[Union[int, None], float]]  # noqa: UP007  # characters and seconds, see `CacheMark`
_Marked = tuple[dict[str, Any], _Marks]  # a message, and the marks in it
_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "max_tokens")} | {"stop_sequences": "stop"}
_CHOICES = {"auto": ToolChoice(), "any": ToolChoice("required"), "none": ToolChoice("none")}


def asked_of_message(given: dict[str, Any], defaults: SamplingParams) -> Asked:
    """Read the fields of a body, `checked` by `MESSAGES`; `defaults` and errors are as of `asked_of_completion`."""
    contents = Contents("messages")
    said = [*_system(given.get("system", ""), contents), *_messages(given["messages"], contents)]
    messages, tools = [message for message, _ in said], [*_tools(given.get("tools", []))]
    choice, parallel = _choice(given.get("tool_choice", {"type": "auto"})) if tools else (ToolChoice(), True)
    config, template = as_instance(given.get("output_config", {}), dict, "output_config"), {}
    if (asked := config.get("effort")) is not None:
        template = effort(asked, "reasoning_effort")
    if given.get("thinking"):
        template |= thinking(given["thinking"], "thinking")
    last = messages[-1] if messages else {}
    continues = last.get("role") == "assistant" and bool(last["content"]) and not last.get("tool_calls")
    conversation = conversation_of(contents, messages, tools, template, choice, parallel, not continues, continues)
    link = given.get("segment_link", LINK)
    conversation = conversation._replace(edits=given.get("context_management"), link=link)
    sampling = {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING}
    params = replace(defaults, **sampling, grammar=_format(config.get("format")))
    return Asked(
        given["model"], [conversation], params, "messages", stream=given.get("stream", False), keep=marked_ttl(given),
        marks=_all_marks(given, [found for _, found in said]), warnings=tuple(contents.warnings),
    )


def _all_marks(given: dict[str, Any], found: list[_Marks]) -> tuple[CacheMark, ...]:
    """The marks of all messages, and that of the tools, which templates have beside the system message."""
    marks = [CacheMark(number, *mark) for number, own in enumerate(found) for mark in own]
    of_tools = [marked_ttl(tool) for tool in given.get("tools", []) if isinstance(tool, dict)]
    if seconds := max(filter(None, of_tools), default=0.0):
        marks.insert(0, CacheMark(0, None, seconds))
    return tuple(marks[-MOST_MARKS:])


def _system(system: Any, contents: Contents) -> Iterator[_Marked]:
    """The system message. The line that clients write for billing is left out: it would change the prefix."""
    texts, marks, characters = list[str](), _Marks(), 0
    for block in [{"type": "text", "text": system}] if isinstance(system, str) else _blocks(system, "system"):
        if said := without_billing(contents.text(block, "system")):
            characters += 2 * bool(texts) + len(said)
            texts.append(said)
            marks += [(characters, seconds) for seconds in [marked_ttl(block)] if seconds]
    if texts:
        yield {"role": "system", "content": "\n\n".join(texts)}, marks


def _messages(messages: Any, contents: Contents) -> Iterator[_Marked]:
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
            *before, last = _of_assistant(blocks, contents)
            yield from ((message, []) for message in before)
            yield last, _whole(blocks)
        else:
            yield from _of_user(role, _blocks(content, "messages"), contents)


def _blocks(content: Any, name: str) -> list[dict[str, Any]]:
    return [as_instance(block, dict, name) for block in as_list(content, name)]


_THOUGHTS = ("thinking", "redacted_thinking")
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
_RESULT = "_tool_result"  # ends the kind of a result that a service gave to a call of its own


def _of_assistant(blocks: list[dict[str, Any]], contents: Contents) -> Iterator[dict[str, Any]]:
    """The messages of an assistant: one, and for each call that a service answered one more behind its result.

    A call of a service whose result has no text is left out with it.
    """
    results = {
        str(block.get("tool_use_id")): contents.found(block.get("content"))
        for block in blocks if str(block.get("type")).endswith(_RESULT)
    }
    said, answered = Said(), set[str]()
    for block in blocks:
        kind = str(block.get("type"))
        if kind in _THOUGHTS:
            said.thoughts += [as_instance(block.get(kind), str, "messages")] if kind == "thinking" else []
        elif kind == "tool_use":
            said.calls.append(_call(block))
        elif kind in _CALLS and (result := results.get(str(block.get("id")))):
            said.calls.append(_call(block))
            yield said.message()
            yield {"role": "tool", "tool_call_id": block.get("id"), "content": result}
            said = Said()
            answered.add(str(block.get("id")))
        elif kind in _CALLS or kind.endswith(_RESULT):
            if str(block.get("tool_use_id")) not in answered:
                left_out(kind[:100])
        else:
            said.texts.append(contents.part(block, segments=False)["text"])
    if said or not answered:
        yield said.message()


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(as_instance(block.get("input", {}), dict, "messages"), ensure_ascii=False)
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


@dataclass
class Said:
    """The words, thoughts and calls of an assistant until a result."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.texts or self.thoughts or self.calls)

    def message(self) -> dict[str, Any]:
        return {
            "role": "assistant", "content": "".join(self.texts) if self.texts or not self.calls else None,
            "reasoning_content": "\n".join(self.thoughts) or None, "tool_calls": self.calls or None,
        }


def _of_user(role: str, blocks: list[dict[str, Any]], contents: Contents) -> Iterator[_Marked]:
    """Results of tools are messages of their own, in the order of the blocks."""
    texts: list[dict[str, Any]] = []
    marks, characters = _Marks(), 0
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(contents.part(block))
            characters += len(texts[-1]["text"])
            if "segment" not in texts[-1] and (seconds := marked_ttl(block)):
                marks.append((characters, seconds))
            continue
        if texts:
            yield {"role": role, "content": texts}, marks
            texts, marks, characters = [], [], 0
        content = contents.joined(block.get("content") or "", "\n")
        result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        inner = block.get("content")
        yield result, _whole([*(inner if isinstance(inner, list) else []), block])
    if texts or not blocks:
        yield {"role": role, "content": texts or ""}, marks


def _whole(blocks: list[dict[str, Any]]) -> _Marks:
    """The mark at the end of a message, where one of its blocks has one: the last one counts."""
    found = [seconds for seconds in map(marked_ttl, blocks) if seconds]
    return [(None, seconds) for seconds in found[-1:]]


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
    logger.warning("tools of type %s are left out: this server runs none", short(kind))


def _choice(choice: Any) -> tuple[ToolChoice, bool]:
    """Which calls there may be, and whether several."""
    kind = as_instance(choice, dict, "tool_choice").get("type")
    if kind == "tool":
        found = ToolChoice("required", frozenset([function_name(choice.get("name"), "tool_choice")]))
    elif isinstance(kind, str) and kind in _CHOICES:
        found = _CHOICES[kind]
    else:
        raise ValueError(f"tool_choice: expected the type auto, any, tool or none, got {short(kind)}")
    return found, not choice.get("disable_parallel_tool_use", False)


def _format(form: Any) -> Grammar | None:
    """The form of an answer, whose schema is strict."""
    if form is None:
        return None
    kind = as_instance(form, dict, "output_config").get("type")
    return form_of(kind, form.get("schema") if kind == "json_schema" else None, True)


MESSAGES = {
    **dict.fromkeys(("messages", "system", "tools", "tool_choice", "thinking", "output_config"), PLAIN),
    **dict.fromkeys(("cache_control", "diagnostics", "temperature", "top_p", "top_k"), PLAIN),
    "model": TEXT, "max_tokens": COUNT, "stop_sequences": STOPS, "stream": FLAG, "context_management": Field(edits_of),
    "segment_link": COUNT,
    **dict.fromkeys(("betas", "inference_geo", "metadata", "service_tier", "speed"), IGNORED),
    "container": Field(neutral=()), "mcp_servers": Field(neutral=([],)),
}
COUNTED = MESSAGES | {"max_tokens": IGNORED}
