"""Calls as networks write them, read when they are whole: a list of calls, or None where a text says none."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvcache.sampling.dialects.transcript import ToolCall

__all__ = [
    "NoCall", "WholeReader", "json_calls", "pythonic_calls", "resolved", "tool_call", "typed", "types_of",
]

WholeReader = Callable[[str], "list[ToolCall] | None"]

_MAX_EXPRESSION = 1 << 14  # characters of Python, which its parser takes without letting other threads run
_DECODER = json.JSONDecoder()
_MOST_REFERENCES = 16  # from one to the next
_MOST = 256  # calls of one text
_BETWEEN = re.compile(r"\s*(?:;\s*)?")  # objects of JSON
_ENDS = {"\n": "\\n", "\r": "\\r"}  # of lines
_TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
}


class NoCall(Exception):
    """A text that says no call. It leaves no reader: these then return None."""


_ERRORS = (NoCall, ValueError, TypeError, RecursionError, MemoryError, SyntaxError)


def tool_call(name: Any, arguments: Any) -> ToolCall:
    """A call. NoCall: no name, or no object; TypeError, ValueError: none that JSON can say, or no Unicode text."""
    if isinstance(arguments, str):  # some networks write them as a text within JSON
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise NoCall
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + written).encode()  # no lone surrogate: clients could not send the call back
    return ToolCall(name, written)


def json_calls(text: str) -> list[ToolCall] | None:
    """Objects with a name and arguments (or parameters): one, a list of them, or several with `;` between."""
    found: list[Any] = []
    with suppress(*_ERRORS):
        at = len(text) - len(text.lstrip())
        while at < len(text) and len(found) <= _MOST:
            value, end = _DECODER.raw_decode(text, at)
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


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema behind its references within `root`; others stay."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        schema = found
    return schema


def typed(text: str, schema: Any, *, guesses: bool = False) -> Any:
    """A value of the type that a schema says: a text, unless it is JSON of another type that may be, or such a list or
    object in Python's words where no text may be.

    Args:
        guesses: whether any type may be where it says none.
    """
    types = types_of(schema) or ({*_TYPES, "null"} if guesses else set())
    if not types - {"string"}:
        return text
    with suppress(ValueError, RecursionError):
        value = json.loads(text, parse_constant=_no_number)
        if "string" not in types or any(_is_of(value, kind) for kind in types - {"string"}):
            return value
    if "string" not in types and text.lstrip()[:1] in ("[", "{") and len(text) <= _MAX_EXPRESSION:
        with suppress(*_ERRORS):  # templates that write a list without tojson write Python's words for it
            value = _literal(ast.parse(text.strip(), mode="eval").body)
            json.dumps(value, allow_nan=False)
            return value
    return text


def _no_number(name: str) -> Any:
    raise ValueError(f"value: expected one of JSON, got {name}")


def types_of(schema: Any) -> set[str]:
    """The types that a schema names, or those of the values that it lists; none: it names none."""
    if not isinstance(schema, dict):
        return set()
    found = schema.get("type")
    types = {found} if isinstance(found, str) else {each for each in found or () if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            types |= types_of(each if isinstance(each, dict) and not {"anyOf", "oneOf"} & each.keys() else None)
    if not types:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        for value in values if isinstance(values, list) else ():
            types |= {kind for kind in (*_TYPES, "null") if _is_of(value, kind)}
    return types


def _is_of(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    found = _TYPES.get(kind)
    return found is not None and isinstance(value, found) and (kind == "boolean" or not isinstance(value, bool))


def _in_one_line(text: str) -> str:
    """An expression with the ends of lines in quotes as Python writes them; some templates leave them as they are."""
    found, quote, is_escaped = list[str](), "", False
    for each in text:
        if quote and not is_escaped and each in _ENDS:
            found.append(_ENDS[each])
            continue
        found.append(each)
        if not quote:
            quote = each if each in "'\"" else ""
        elif each == quote and not is_escaped:
            quote = ""
        is_escaped = each == "\\" and not is_escaped
    return "".join(found)


def pythonic_calls(text: str) -> list[ToolCall] | None:
    """Python's list of calls with literals by name, `[f(a=1), g()]`; or JSON."""
    if (found := json_calls(text)) is not None or len(text) > _MAX_EXPRESSION:
        return found
    with suppress(*_ERRORS):
        body = ast.parse(_in_one_line(text.strip()), mode="eval").body
        calls = body.elts if isinstance(body, (ast.List, ast.Tuple)) else [body]
        if calls and all(isinstance(call, ast.Call) for call in calls):
            return [_of_expression(call) for call in calls]
    return None


def _of_expression(call: Any) -> ToolCall:
    if call.args or not all(keyword.arg for keyword in call.keywords):
        raise NoCall
    return tool_call(ast.unparse(call.func), {each.arg: _literal(each.value) for each in call.keywords})


def _literal(node: Any) -> Any:
    """A value; JSON's words for some values count too."""
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key) if key else None: _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
        }
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(each) for each in node.elts]
    return ast.literal_eval(node)
