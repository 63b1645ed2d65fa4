"""Calls in tags, `<function=NAME><parameter=KEY>..</parameter></function>`: an argument comes when it is whole."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from kvcache.sampling.dialects.call_span import CallSpan
from kvcache.sampling.dialects.call_texts import resolved, typed

__all__ = ["TagCalls"]

_FUNCTION, _PARAMETER = re.compile(r"<function=([^>\n]+)>"), re.compile(r"<parameter=([^>\n]+)>")
_END, _VALUE_END = "</function>", "</parameter>"
_LONGEST = 1000  # characters of a tag


class TagCalls:
    """Reads them. A call begins with its first argument, or its end where it has none; all else is kept.

    Args:
        span: that they are in; the schemas of functions say which types arguments have.
    """

    def __init__(self, span: CallSpan) -> None:
        self._span = span
        self._text = ""  # what is not read
        self._searched = 0  # of it, where the end of a value is not
        self._name = ""  # of the function that is open; "": none
        self._key: str | None = None  # of the argument that is open
        self._schema: Any = {}  # of its arguments
        self._count = -1  # arguments of the call; -1: it has not begun
        self._is_other = False

    def add(self, text: str) -> None:
        if self._is_other:
            self._drop(text)
            return
        self._text += text
        while self._text and not self._is_other and self._step():
            pass

    def end(self, close: str) -> None:
        self._give_up()
        self._span.end(close)

    def _step(self) -> bool:
        """Read the next tag or value; whether there may be another one in what has come."""
        if self._key is not None:
            return self._value(self._key)
        space = len(self._text) - len(self._text.lstrip())
        self._read(space)
        if not self._text:
            return False
        tags = ("<parameter=", _END) if self._name else ("<function=",)
        if not any(self._text.startswith(tag) or tag.startswith(self._text) for tag in tags):
            return self._give_up()
        if self._name and self._text.startswith(_END):
            return self._end_call()
        if ">" not in self._text:
            return self._give_up() if len(self._text) > _LONGEST else False
        found = (_PARAMETER if self._name else _FUNCTION).match(self._text)
        if found is None or not found[1].strip():
            return self._give_up()
        self._read(found.end())
        if self._name:
            self._key = found[1].strip()
        else:
            self._name, self._count = found[1].strip(), -1
            self._schema = self._span.schemas.get(self._name, {})
        return True

    def _value(self, key: str) -> bool:
        end = self._text.find(_VALUE_END, self._searched)
        if end < 0:
            self._searched = max(0, len(self._text) - len(_VALUE_END))
            return False
        text = self._text[:end].removeprefix("\n").removesuffix("\n")
        with suppress(ValueError, TypeError, RecursionError):  # of a schema too
            properties = self._schema.get("properties")
            schema = properties.get(key) if isinstance(properties, dict) else None
            value = typed(text, resolved(schema, self._schema))
            member = json.dumps({key: value}, ensure_ascii=False, allow_nan=False)[1:-1]
            member.encode()  # no lone surrogate: clients could not send the call back
            if self._begin():
                self._span.put(("{" if self._count == 0 else ", ") + member)
                self._count, self._key, self._searched = self._count + 1, None, 0
                self._text = self._text[end + len(_VALUE_END) :]
                return True
        return self._give_up()

    def _begin(self) -> bool:
        """Begin the call, unless it has begun; whether it may be."""
        if self._count < 0 and self._span.begin(self._name):
            self._count = 0
        return self._count >= 0

    def _end_call(self) -> bool:
        if not self._begin():
            return self._give_up()
        self._span.put("}" if self._count else "{}")
        self._span.finish()
        self._text, self._name, self._count = self._text[len(_END) :], "", -1
        return True

    def _read(self, length: int) -> None:
        """Be done with so many characters."""
        if self._count < 0:
            self._span.keep(self._text[:length])
        self._text = self._text[length:]

    def _give_up(self) -> bool:
        """Read what follows as text: kept, or content within a call, whose arguments end there."""
        if not self._is_other and self._count >= 0:
            self._span.finish(is_whole=False)
        self._is_other = True
        text, self._text = self._text, ""
        self._drop(text)
        return False

    def _drop(self, text: str) -> None:
        (self._span.keep if self._count < 0 else self._span.say)(text)
