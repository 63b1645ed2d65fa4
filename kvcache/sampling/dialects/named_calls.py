"""Calls with a name and their arguments behind it; or, as older networks of Mistral write, objects with names."""

from __future__ import annotations

import re

from kvcache.sampling.dialects.argument_call import ArgumentCall
from kvcache.sampling.dialects.call_span import CallSpan, CallStream
from kvcache.sampling.dialects.name_style import NameStyle
from kvcache.sampling.dialects.object_calls import ObjectCalls

__all__ = ["NamedCalls"]


class NamedCalls:
    """Reads one of both.

    Args:
        span: that it is in.
        style: the words around the name.
    """

    def __init__(self, span: CallSpan, style: NameStyle) -> None:
        self._span, self._style, self._head = span, style, ""
        self._stream: CallStream | None = None  # reads what follows

    def add(self, text: str) -> None:
        if self._stream is None:
            head, brace, rest = text.partition("{")
            self._head += head
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
                return ArgumentCall(self._span, found[1], form.close)
        return None

    def end(self, close: str) -> None:
        if self._stream is None:
            self._span.keep(self._head)
            self._span.end(close)
        else:
            self._stream.end(close)
