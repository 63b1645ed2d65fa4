"""Calls of Mistral: a name, `[ARGS]` and an object; or, as older networks write, objects with names."""

from __future__ import annotations

from kvcache.sampling.dialects.argument_call import ArgumentCall
from kvcache.sampling.dialects.call_span import CallSpan, CallStream
from kvcache.sampling.dialects.object_calls import ObjectCalls

__all__ = ["NamedCalls"]


class NamedCalls:
    """Reads one of both.

    Args:
        span: that it is in.
    """

    def __init__(self, span: CallSpan) -> None:
        self._span, self._head = span, ""
        self._stream: CallStream | None = None  # reads what follows

    def add(self, text: str) -> None:
        if self._stream is None:
            name, brace, rest = text.partition("{")
            self._head += name
            begins = self._head.lstrip()[:1]
            if not brace and begins != "[":
                return
            name = function_of(self._head)
            if begins == "[" or not name:
                self._stream = ObjectCalls(self._span)
            else:
                self._span.keep(self._head)
                self._stream, self._head = ArgumentCall(self._span, name), ""
            text = self._head + brace + rest
        self._stream.add(text)

    def end(self, close: str) -> None:
        if self._stream is None:
            self._span.keep(self._head)
            self._span.end(close)
        else:
            self._stream.end(close)


def function_of(head: str) -> str:
    """The name before `[ARGS]`, or before an id; "": there is none."""
    names = head.partition("[ARGS]")[0].partition("[CALL_ID]")[0].split()
    return names[0] if len(names) == 1 else ""
