"""Calls in tags, as `<function=NAME><parameter=KEY>..</parameter></function>`: an argument comes when it is whole."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from kvcache.sampling.dialects.argument_schema import ANY_TYPE, ArgumentSchema
from kvcache.sampling.dialects.argument_values import read_value
from kvcache.sampling.dialects.call_errors import NoCall
from kvcache.sampling.dialects.call_span import CallSpan
from kvcache.sampling.dialects.json_scan import JsonScan
from kvcache.sampling.dialects.nested_values import nested_value
from kvcache.sampling.dialects.tag_style import TagStyle

__all__ = ["TagCalls"]

_LONGEST = 1000  # characters of a tag
_JSON = re.compile(r"\s*[{\[]")


class TagCalls:
    """Reads them. A call begins with its first argument, or its end where it has none; all else is kept.

    Args:
        span: that they are in; the schemas of functions say which types arguments have.
        style: the tags.
    """

    def __init__(self, span: CallSpan, style: TagStyle) -> None:
        self._span, self._style = span, style
        self._function, self._argument = style.head_of_function(), style.head_of_value()
        self._text = ""  # what is not read
        self._searched = 0  # of it, where the end of a value is not
        self._scan, self._scanned = JsonScan(), 0  # of a value in JSON, and of how much of it
        self._inner = 0  # tags within the value that have the name of its own
        self._name = ""  # of the function that is open; "": none
        self._key: str | None = None  # of the argument that is open
        self._kind = ""  # what an attribute says of its value
        self._wanted: Any = {}  # the schema of its value
        self._schema = ArgumentSchema({})  # of its arguments
        self._given = set[str]()  # their names that have come
        self._count = -1  # arguments of the call; -1: it has not begun
        self._is_other = self._is_ended = False

    @property
    def is_open(self) -> bool:
        return self._key is not None and not self._is_other

    @property
    def is_none(self) -> bool:
        return self._is_other

    def add(self, text: str) -> None:
        if self._is_other:
            self._drop(text)
            return
        self._text += text
        while self._text and not self._is_other and self._step():
            pass

    def end(self, close: str) -> None:
        if close and not self._is_other:
            self._is_ended = not self._style.end
            self.add("")
            if self._name and self._key is None and not self._text.strip():
                self._end_call()
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
        style = self._style
        opening, end = (style.key[0], style.end) if self._name else (style.function[0], "")
        if not any(self._text.startswith(tag) or tag.startswith(self._text) for tag in (opening, end or opening)):
            return self._give_up()
        if end and self._text.startswith(end):
            return self._end_call()
        return self._head()

    def _head(self) -> bool:
        """Read what comes before a value, or before the first argument."""
        window, style = self._text[:_LONGEST], self._style
        opens, closes = (style.key[0], style.value[0] or style.key[1]) if self._name else style.function
        if closes not in window[len(opens) :]:
            return self._give_up() if len(self._text) > _LONGEST else False
        head = (self._argument if self._name else self._function).match(window)
        if head is None:
            return self._give_up()
        if not closes and head.end() == len(self._text) and not self._is_ended:
            return False  # the name may go on
        self._read(head.end())
        if self._name:
            self._key, self._kind = self._style.named(head[1]), head[2] or ""
            self._wanted = self._schema_of(self._key)
        else:
            self._name, self._count, self._given = self._style.named(head[1]), -1, set()
            self._schema = ArgumentSchema(self._span.schemas.get(self._name))
        return True

    def _value(self, key: str) -> bool:
        close = self._style.close_of(key)
        end = self._text.find(close, self._searched)
        if end < 0:
            self._searched = max(self._searched, len(self._text) - len(close) + 1)
            return False
        with suppress(NoCall, ValueError, TypeError, RecursionError):  # of a schema too
            schema = self._wanted
            if self._is_within(key, end, schema):
                self._searched = end + 1
                return True
            end, behind = self._end_of(key, end, end + len(close))
            text = self._text[:end]
            if self._style.wraps:
                text = text.removeprefix("\n").removesuffix("\n")
            begin, end_of_quote = self._style.quotes
            if begin and text.startswith(begin):
                text = text.removeprefix(begin).removesuffix(end_of_quote)
            if self._style.nests and not self._may_be_text(schema) and not self._is_json(schema):
                value = nested_value(text, schema, self._schema)
            else:
                value = read_value(text, schema, self._schema, guesses=self._style.guesses)
            member = json.dumps({key: value}, ensure_ascii=False, allow_nan=False)[1:-1]
            member.encode()  # no lone surrogate: clients could not send the call back
            if self._begin():
                self._span.put(("{" if self._count == 0 else ", ") + member)
                self._count, self._key, self._searched = self._count + 1, None, 0
                self._scan, self._scanned, self._inner = JsonScan(), 0, 0
                self._text = self._text[behind:]
                self._given.add(key)
                return True
        return self._give_up()

    def _end_of(self, key: str, end: int, behind: int) -> tuple[int, int]:
        """The end of a value, and the place behind its tag: there is none if the next argument begins on a line of
        its own, one that the function has and that has not come."""
        style, text, at = self._style, self._text, 0
        while style.wraps and (at := text.find("\n" + style.key[0], at, end) + 1):
            found = self._argument.match(text, at, min(end, at + _LONGEST))
            other = key if found is None else style.named(found[1])
            if other not in {key, *self._given} and self._schema.has_property(other):
                return at, at
        return end, behind

    def _schema_of(self, key: str) -> Any:
        """The schema of a value, which an attribute says, or that of the function."""
        if self._kind:
            is_text = self._kind == self._style.kinds["string"]
            return {"type": "string" if is_text else [each for each in self._style.kinds if each != "string"]}
        return self._schema.property_of(key)

    def _may_be_text(self, schema: Any) -> bool:
        """Whether a schema says that a value may be a text."""
        types = self._schema.types(schema)
        return types != ANY_TYPE and "string" in types

    def _is_json(self, schema: Any) -> bool:
        """Whether a value that may be tags is an object or a list in JSON."""
        return self._style.nests and not self._may_be_text(schema) and _JSON.match(self._text) is not None

    def _is_within(self, key: str, end: int, schema: Any) -> bool:
        """Whether the tag at this place stands within a string of JSON, or ends an inner tag of this name."""
        begin, close = self._style.quotes
        if begin and self._text.startswith(begin):
            return not self._text.endswith(close, len(begin), end)
        if self._style.nests and not self._is_json(schema):
            if not self._may_be_text(schema):
                self._inner += self._text.count(self._style.tag_of_key(key, ""), self._scanned, end)
            self._scanned, self._inner = end + 1, self._inner - 1
            return self._inner >= 0
        if "string" in self._schema.types(schema) and not self._is_json(schema):
            return False
        self._scan.add(self._text[self._scanned : end])
        self._scanned = end
        return self._scan.need == "string" and not self._scan.is_broken

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
        self._text, self._name, self._count = self._text[len(self._style.end) :], "", -1
        return True

    def _read(self, length: int) -> None:
        """Drop the first `length` characters, which were read."""
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
