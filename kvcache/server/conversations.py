"""Conversations as clients send them: messages, tools, and what the chat template is told beside these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from kvcache.engine.chat import template_arguments
from kvcache.server.refusals import BodyError
from kvcache.support.arguments import as_instance, short

__all__ = [
    "MAX_MESSAGES", "Conversation", "ToolChoice", "effort", "messages_of", "placed", "template_kwargs",
    "tool_choice_of", "tools_of", "verbosity", "with_users",
]

MAX_MESSAGES = 4096  # templates have a loop over them
_MAX_TOOLS, _MAX_NAME = 1024, 256  # functions of a body, and characters of a name
_MAX_CALLS = 256  # of a message
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
    """

    messages: list[Any]
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it
    choice: ToolChoice = ToolChoice()
    parallel: bool = True


# -- messages -----------------------------------------------------------------------------------------------------


def messages_of(messages: Any, name: str) -> Any:
    """Messages whose contents have texts alone; the engine checks the rest.

    A part of a text keeps its type and text: hints for caches beside them are no words of a template. The arguments of
    calls are texts of JSON, or objects.
    """
    if not isinstance(messages, list):
        return messages
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"{name}: expected at most {MAX_MESSAGES}, got {len(messages)}")
    return [_message(each, name) if isinstance(each, dict) else each for each in messages]


def _message(message: dict[str, Any], name: str) -> dict[str, Any]:
    found = message
    if isinstance(parts := message.get("content"), list):
        found = found | {"content": [_part(part, name) for part in parts]}
    if (calls := message.get("tool_calls")) is not None:
        if len(as_instance(calls, list, f"{name}.tool_calls")) > _MAX_CALLS:
            raise ValueError(f"{name}: expected at most {_MAX_CALLS} tool_calls in one, got {len(calls)}")
        found = found | {"tool_calls": [_call(call, name) for call in calls] or None}
    return found


def _part(part: Any, name: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise ValueError(f"{name}: expected parts of type text, got {short(part)}")
    return {"type": "text", "text": as_instance(part.get(kind), str, name)}


def _call(call: Any, name: str) -> Any:
    function = as_instance(call, dict, f"{name}.tool_calls").get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError(f"{name}: expected tool_calls of type function, got {short(call)}")
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
    found: list[Any] = messages[:1]
    for message in messages[1:]:
        if message.get("role") in _SYSTEM:
            message = message | {"role": "user"}
        if message.get("role") == found[-1].get("role") == "user":
            found[-1] = _joined([found[-1], message])
        else:
            found.append(message)
    return found


def _joined(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One message of the contents of several."""
    return messages[0] | {"content": "\n\n".join(filter(None, map(_text, messages)))}


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return "" if content is None else as_instance(content, str, "messages")


# -- tools --------------------------------------------------------------------------------------------------------


def tools_of(tools: Any, name: str) -> list[dict[str, Any]] | None:
    """Functions that a network may call, `{"type": "function", "function": {"name": ...}}`; None: there are none."""
    if len(as_instance(tools, list, name)) > _MAX_TOOLS:
        raise ValueError(f"{name}: expected at most {_MAX_TOOLS}, got {len(tools)}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            message = f"{name}: expected tools of type function, got {short(tool)}"
            raise BodyError(message, "unsupported_parameter")
        _name(function.get("name"), name)
        as_instance(function.get("parameters") or {}, dict, f"{name}.parameters")
    return tools or None


def _name(function: Any, name: str) -> str:
    if not isinstance(function, str) or not 0 < len(function) <= _MAX_NAME:
        raise ValueError(f"{name}: expected a name of 1 to {_MAX_NAME} characters, got {short(function)}")
    return function


def tool_choice_of(choice: Any, name: str) -> ToolChoice:
    """Which calls there may be: a mode, a function, or `allowed_tools` with a mode and functions."""
    if choice in ("none", "auto", "required"):
        found = ToolChoice(choice)
    elif isinstance(choice, dict) and choice.get("type") == "function":
        found = ToolChoice("required", _named([choice], name))
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = as_instance(choice.get("allowed_tools"), dict, name)
        if (mode := allowed.get("mode")) not in ("auto", "required"):
            raise ValueError(f"{name}: expected the mode auto or required, got {short(mode)}")
        found = ToolChoice(mode, _named(as_instance(allowed.get("tools"), list, name), name))
    else:
        raise ValueError(f"{name}: expected none, auto, required, a function or allowed_tools, got {short(choice)}")
    return found


def _named(tools: Iterable[Any], name: str) -> frozenset[str]:
    functions = [as_instance(tool, dict, name).get("function") for tool in tools]
    return frozenset(_name(as_instance(each, dict, name).get("name"), name) for each in functions)


# -- variables of templates ---------------------------------------------------------------------------------------


def template_kwargs(value: Any, name: str) -> dict[str, Any]:
    """Variables of the template that a body gives by name."""
    return template_arguments(as_instance(value, dict, name), name)


def effort(value: Any, name: str) -> dict[str, Any]:
    """The variables that say how much a network is to think; templates know some of them, or none."""
    _one_of(_EFFORTS, value, name)
    return {"reasoning_effort": value, "enable_thinking": value != "none", "thinking": value != "none"}


def verbosity(value: Any, name: str) -> dict[str, Any]:
    """The variable that says how long an answer is to be."""
    return {"verbosity": _one_of(("low", "medium", "high"), value, name)}


def _one_of(values: tuple[str, ...], value: Any, name: str) -> Any:
    if value not in values:
        raise ValueError(f"{name}: expected one of {', '.join(values)}, got {short(value)}")
    return value
