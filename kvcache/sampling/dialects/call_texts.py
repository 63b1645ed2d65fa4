"""Calls as networks write them, read when they are whole: a list of calls, or None if a text says none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvcache.sampling.dialects.argument_values import DECODER, json_value
from kvcache.sampling.dialects.call_errors import CALL_ERRORS, NoCall
from kvcache.sampling.dialects.python_words import python_calls
from kvcache.sampling.dialects.transcript import ToolCall

__all__ = ["WholeReader", "json_calls", "pythonic_calls", "tool_call"]

WholeReader = Callable[[str], "list[ToolCall] | None"]

_MOST = 256  # calls of one text
_BETWEEN = re.compile(r"\s*(?:;\s*)?")  # objects of JSON


def tool_call(name: Any, arguments: Any) -> ToolCall:
    """A call. NoCall: no name, or no object; TypeError, ValueError: none that JSON can say, or no Unicode text."""
    if isinstance(arguments, str):  # some networks write them as a text within JSON
        arguments = json_value(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise NoCall
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + written).encode()  # no lone surrogate: clients could not send the call back
    return ToolCall(name, written)


def json_calls(text: str) -> list[ToolCall] | None:
    """Objects with a name and arguments (or parameters): one, a list of them, or several with `;` between."""
    found: list[Any] = []
    with suppress(*CALL_ERRORS):
        at = len(text) - len(text.lstrip())
        while at < len(text) and len(found) <= _MOST:
            value, end = DECODER.raw_decode(text, at)
            found.append(value)
            at = _end_of_gap(text, end)
            if at < len(text) and ";" not in text[end:at]:
                return None
        found = found[0] if len(found) == 1 and isinstance(found[0], list) else found
        return [_of_object(each) for each in found] if 0 < len(found) <= _MOST else None
    return None


def _end_of_gap(text: str, at: int) -> int:
    """The place behind white space with at most one semicolon."""
    found = _BETWEEN.match(text, at)
    return at if found is None else found.end()


def _of_object(found: Any) -> ToolCall:
    if not isinstance(found, dict):
        raise NoCall
    if isinstance(function := found.get("function"), dict):
        found = function
    arguments = found.get("arguments", found.get("parameters"))
    return tool_call(found.get("name", found.get("tool_name", function)), {} if arguments is None else arguments)


def pythonic_calls(text: str) -> list[ToolCall] | None:
    """Python's list of calls with literals by name, `[f(a=1), g()]`; or JSON."""
    if (found := json_calls(text)) is not None:
        return found
    with suppress(*CALL_ERRORS):
        calls = python_calls(text)
        return [tool_call(*each) for each in calls] if len(calls) <= _MOST else None
    return None
