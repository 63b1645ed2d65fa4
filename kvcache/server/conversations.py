"""Conversations as clients send them: messages, tools, and what the chat template is told beside these."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from kvcache.engine.chat import template_arguments
from kvcache.engine.documents import LINK
from kvcache.engine.edits import Edits, as_edits
from kvcache.engine.segment_spans import SegmentSpan, spans_of
from kvcache.server.contents import Contents
from kvcache.server.refusals import BodyError
from kvcache.support.arguments import as_instance, short

__all__ = [
    "MAX_MESSAGES", "Conversation", "ToolChoice", "conversation_of", "edits_of", "effort", "function_name", "placed",
    "reasoning", "template_kwargs", "text_of", "thinking", "tool_choice_of", "tools_of", "verbosity", "with_users",
]

MAX_MESSAGES = 4096  # templates have a loop over them
_MAX_TOOLS, _MAX_NAME = 1024, 256  # functions of a body, and characters of a name
_MAX_CALLS = 256  # of a message
_MAX_SEGMENTS = 256  # of a body
_INPUT = "input"  # the argument of a tool that takes a text
_SYSTEM = ("system", "developer")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ToolChoice(NamedTuple):
    """The calls that an answer may have.

    Attributes:
        mode: "none": all is text; "auto": as the network likes; "required": at least one.
        names: of the functions that may be called; None: any.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None


class Conversation(NamedTuple):
    """The input of a chat template, and which calls the answer may have.

    Attributes:
        messages, tools: as `apply_chat_template` takes them.
        template: variables of the template.
        choice: see above.
        parallel: whether an answer may have several calls.
        customs: by the name of each tool that takes a text, "lark" or "regex" and the grammar of that; "" is none.
        begins: whether the beginning of an answer follows the messages.
        continues: whether the answer goes on with the text of the last message.
        edits: what leaves the messages first; None: the body asks for none.
        segments: the parts that are segments, in the order of the text.
        link: see `SeenParts.of_segments`.
    """

    messages: list[Any]
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    customs: dict[str, tuple[str, str]] = {}  # noqa: RUF012  # nobody changes it
    begins: bool = True
    continues: bool = False
    edits: Edits | None = None
    segments: tuple[SegmentSpan, ...] = ()
    link: int = LINK


def conversation_of(
    contents: Contents, messages: Any, tools: Any, template: dict[str, Any], choice: ToolChoice,
    parallel: bool = True, begins: bool = True, continues: bool = False,
) -> Conversation:
    """Make a conversation of messages and tools in the shape of chat completions, see `_messages_of` and `tools_of`.

    The other arguments are those of `Conversation`. A call can be asked for if there are tools, and by their names.
    """
    messages = _messages_of(messages, contents)
    functions, customs = _functions_of(tools_of(tools, "tools") or [])
    known = {function["function"]["name"] for function in functions}
    if choice.names is not None and not choice.names <= known:
        raise ValueError(f"tool_choice: expected names of tools, got {short(sorted(choice.names - known))}")
    if choice.mode == "required" and not functions:
        raise ValueError("tool_choice: expected tools beside it, got none")
    messages, segments = spans_of(messages, contents.name)
    if len(segments) > _MAX_SEGMENTS:
        raise ValueError(f"{contents.name}: expected at most {_MAX_SEGMENTS} segments, got {len(segments)}")
    talk = Conversation(messages, functions or None, template, choice, parallel, customs, begins, continues)
    return talk._replace(segments=segments)


# -- messages -----------------------------------------------------------------------------------------------------


def _messages_of(messages: Any, contents: Contents) -> Any:
    """Messages whose contents have texts alone; the engine checks the rest.

    A part of a text keeps its type and text: hints for caches beside them are no words of a template. The arguments of
    calls are texts of JSON, or objects.

    Args:
        messages: of a body.
        contents: reads their parts.
    """
    name = contents.name
    if not isinstance(messages, list):
        return messages
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"{name}: expected at most {MAX_MESSAGES}, got {len(messages)}")
    return [_message(each, contents) if isinstance(each, dict) else each for each in messages]


def _message(message: dict[str, Any], contents: Contents) -> dict[str, Any]:
    found, name = message, contents.name
    if isinstance(parts := message.get("content"), list):
        found = found | {"content": [contents.part(part) for part in parts]}
    if (calls := message.get("tool_calls")) is not None:
        if len(as_instance(calls, list, f"{name}.tool_calls")) > _MAX_CALLS:
            raise ValueError(f"{name}: expected at most {_MAX_CALLS} tool_calls in one, got {len(calls)}")
        found = found | {"tool_calls": [_call(call, name) for call in calls] or None}
    return found


def _call(call: Any, name: str) -> Any:
    kind = as_instance(call, dict, f"{name}.tool_calls").get("type", "function")
    if kind == "custom" and isinstance(custom := call.get("custom"), dict):
        given = as_instance(custom.get("input"), str, name)
        function = {"name": custom.get("name"), "arguments": json.dumps({_INPUT: given}, ensure_ascii=False)}
        call = {"id": call.get("id"), "type": "function", "function": function}
        kind = "function"
    function = call.get("function")
    if kind != "function" or not isinstance(function, dict):
        raise ValueError(f"{name}: expected tool_calls of type function or custom, got {short(call)}")
    as_instance(function.get("name"), str, f"{name}.tool_calls")
    return call


def placed(messages: list[Any], knows_developer: bool) -> list[Any]:
    """Messages with one system message at most at the beginning: those that lead become one; later ones stay in place.

    Args:
        messages: dicts.
        knows_developer: whether the template has words for the role `developer`; for others it is `system`.
    """
    named = [
        each | {"role": "system"}
        if isinstance(each, dict) and each.get("role") == "developer" and not knows_developer else each
        for each in messages
    ]
    leading = 0
    while leading < len(named) and isinstance(named[leading], dict) and named[leading].get("role") in _SYSTEM:
        leading += 1
    if leading < 2:
        return named
    return [_joined(named[:leading]), *named[leading:]]


def with_users(messages: list[Any]) -> list[Any]:
    """Messages for templates that take system messages at the beginning alone: later ones are words of the user.

    Messages of the user that follow each other become one, since such templates often want turns.
    """
    groups = [[each] for each in messages[:1]]
    for message in messages[1:]:
        if message.get("role") in _SYSTEM:
            message = message | {"role": "user"}
        if message.get("role") == groups[-1][0].get("role") == "user":
            groups[-1].append(message)
        else:
            groups.append([message])
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One message of the contents of several."""
    return messages[0] | {"content": "\n\n".join(filter(None, map(text_of, messages)))}


def text_of(message: dict[str, Any]) -> str:
    """The text of the content of a message."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return "" if content is None else as_instance(content, str, "messages")


# -- tools --------------------------------------------------------------------------------------------------------


def tools_of(tools: Any, name: str) -> list[dict[str, Any]] | None:
    """The tools of a body, checked: functions, `{"type": "function", "function": {"name": ...}}`, and `custom` ones.

    None: there are none.
    """
    if len(as_instance(tools, list, name)) > _MAX_TOOLS:
        raise ValueError(f"{name}: expected at most {_MAX_TOOLS}, got {len(tools)}")
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        known = kind in ("function", "custom")
        if not isinstance(found := tool.get(kind) if known else None, dict):
            expected = f"an object {kind} beside its type" if known else "type function or custom"
            message = f"{name}: expected {expected} in each, got {short(tool)}"
            raise BodyError(message, "unsupported_parameter")
        function_name(found.get("name"), name)
        if kind == "function":
            as_instance(found.get("parameters") or {}, dict, f"{name}.parameters")
        else:
            _format(found, name)
    return tools or None


def _format(custom: dict[str, Any], name: str) -> tuple[str, str]:
    """The syntax and the definition of the grammar of a custom tool; "": any text."""
    form = as_instance(custom.get("format") or {"type": "text"}, dict, f"{name}.format")
    if form.get("type") == "text":
        return "", ""
    grammar = as_instance(form.get("grammar"), dict, f"{name}.format")
    syntax, definition = grammar.get("syntax"), as_instance(grammar.get("definition"), str, f"{name}.format")
    if form.get("type") != "grammar" or syntax not in ("lark", "regex"):
        raise ValueError(f"{name}.format: expected text, or a grammar of lark or regex, got {short(form)}")
    return syntax, definition


def _functions_of(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """Tools as functions, which templates have words for, and the formats of custom ones by their names.

    A custom tool is a function of one text, `input`; its description has the grammar of that.
    """
    functions, customs = [], {}
    for tool in tools:
        if tool["type"] == "custom":
            custom = tool["custom"]
            customs[custom["name"]] = syntax, definition = _format(custom, "tools")
            said = f"The input follows this grammar, a {syntax}:\n{definition}" if syntax else ""
            function = {
                "name": custom["name"], "description": "\n\n".join(filter(None, (custom.get("description"), said))),
                "parameters": {
                    "type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT],
                    "additionalProperties": False,
                },
            }
            tool = {"type": "function", "function": function}
        functions.append(tool)
    return functions, customs


def function_name(function: Any, name: str) -> str:
    """Check the name of a function; `name`: of the field."""
    if not isinstance(function, str) or not 0 < len(function) <= _MAX_NAME:
        raise ValueError(f"{name}: expected a name of 1 to {_MAX_NAME} characters, got {short(function)}")
    return function


def _function_in(tool: dict[str, Any], name: str) -> Any:
    """The name in a tool of chat completions."""
    found = tool.get("custom") if tool.get("type") == "custom" else tool.get("function")
    return as_instance(found, dict, name).get("name")


def tool_choice_of(
    choice: Any, name: str, function_in: Callable[[dict[str, Any], str], Any] = _function_in
) -> ToolChoice:
    """Which calls there may be: a mode, a function, or `allowed_tools` with a mode and functions, named in tools."""

    def named(tools: Iterable[Any]) -> frozenset[str]:
        return frozenset(function_name(function_in(as_instance(tool, dict, name), name), name) for tool in tools)

    if choice in ("none", "auto", "required"):
        found = ToolChoice(choice)
    elif isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        found = ToolChoice("required", named([choice]))
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = as_instance(choice.get("allowed_tools"), dict, name)
        if (mode := allowed.get("mode")) not in ("auto", "required"):
            raise ValueError(f"{name}: expected the mode auto or required, got {short(mode)}")
        found = ToolChoice(mode, named(as_instance(allowed.get("tools"), list, name)))
    else:
        raise ValueError(f"{name}: expected none, auto, required, a function or allowed_tools, got {short(choice)}")
    return found


def edits_of(value: Any, name: str) -> Edits:
    """The edits of an object with a list of them, `context_management`."""
    given = as_instance(value, dict, name)
    if unknown := [short(key)[1:-1] for key in given if key != "edits"]:
        raise ValueError(f"{name}: expected edits alone, got {unknown[0]}")
    return as_edits(given.get("edits") or [], f"{name}.edits") or Edits()


# -- variables of templates ---------------------------------------------------------------------------------------


def template_kwargs(value: Any, name: str) -> dict[str, Any]:
    """Variables of the template that a body gives by name."""
    return template_arguments(as_instance(value, dict, name), name)


def effort(value: Any, name: str) -> dict[str, Any]:
    """The variables that say how much a network is to think; templates know some of them, or none."""
    _one_of(_EFFORTS, value, name)
    return {"reasoning_effort": value, "enable_thinking": value != "none", "thinking": value != "none"}


def reasoning(value: Any, name: str) -> dict[str, Any]:
    """The variables of an object with an `effort`, as routers send it."""
    found = as_instance(value, dict, name).get("effort")
    return {} if found is None else effort(found, name)


def thinking(value: Any, name: str) -> dict[str, Any]:
    """The variables of an object whose `type` says whether the network is to think."""
    kind = _one_of(("enabled", "adaptive", "disabled"), as_instance(value, dict, name).get("type"), name)
    return {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"}


def verbosity(value: Any, name: str) -> dict[str, Any]:
    """The variable that says how long an answer is to be."""
    return {"verbosity": _one_of(("low", "medium", "high"), value, name)}


def _one_of(values: tuple[str, ...], value: Any, name: str) -> Any:
    if value not in values:
        raise ValueError(f"{name}: expected one of {', '.join(values)}, got {short(value)}")
    return value
