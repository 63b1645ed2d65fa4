"""Calls with a name and their arguments behind it; or, as older networks of Mistral write, objects with names."""

from __future__ import annotations

import re

from kvcache.sampling.dialects.argument_call import ArgumentCall
from kvcache.sampling.dialects.call_span import CallSpan, CallStream
from kvcache.sampling.dialects.name_style import NameStyle
from kvcache.sampling.dialects.object_calls import ObjectCalls

__all__ = ["NamedCalls"]

_LONGEST = 200  # characters of an id, and of what comes before arguments, where it may be text


class NamedCalls:
    """Reads one of both.

    Args:
        span: that it is in.
        style: the words around the name.
    """

    def __init__(self, span: CallSpan, style: NameStyle) -> None:
        self._span, self._style, self._head = span, style, ""
        self._stream: CallStream | None = None  # reads what follows
        self._is_other = False  # no call

    @property
    def is_open(self) -> bool:
        return self._stream is not None and self._stream.is_open

    @property
    def is_none(self) -> bool:
        return self._is_other or (self._stream is not None and self._stream.is_none)

    def add(self, text: str) -> None:
        if self._is_other:
            self._span.keep(text)
            return
        if self._stream is None:
            head, brace, rest = text.partition("{")
            self._head += head
            self._is_other = self._span.may_be_text and len(self._head) > _LONGEST
            if self._is_other:
                self._span.keep(self._head + brace + rest)
                self._head = ""
                return
            is_list = self._head.lstrip().startswith("[")
            if not brace and not is_list:
                return
            self._stream = None if is_list else self._named()
            if self._stream is None:
                self._stream = ObjectCalls(self._span)
            else:
                self._span.keep(self._head)
                self._head = ""
            text = self._head + brace + rest
        self._stream.add(text)

    def _named(self) -> ArgumentCall | None:
        """The reader of arguments behind the name that has come; None: there is none."""
        for form in self._style.forms:
            if found := re.fullmatch(form.head, self._head):
                return ArgumentCall(self._span, self._offered(found[1]), form.close)
        return None

    def _offered(self, name: str) -> str:
        """The name of a function: what is left of an id, if that alone is one."""
        if self._span.offers(name) or len(name) > _LONGEST:
            return name
        for pattern in self._style.ids:
            if (found := re.fullmatch(pattern, name)) and self._span.offers(found[1]):
                return found[1]
        return name

    def end(self, close: str) -> None:
        if self._stream is None:
            self._span.keep(self._head)
            self._span.end(close)
        else:
            self._stream.end(close)
