"""Calls of Gemma, `call:NAME{key:value,other:[1,2]}`: an argument comes when it is whole."""

from __future__ import annotations

import json
import re
from contextlib import suppress

from kvcache.sampling.dialects.call_span import CallSpan
from kvcache.sampling.dialects.call_texts import NoCall
from kvcache.sampling.dialects.gemma_values import QUOTES, gemma_object

__all__ = ["MemberCalls"]

_HEAD = re.compile(r"\s*call:([^{\s]+)\s*\{")
_OUTSIDE = re.compile(r"[^{}\[\],<]*")


class MemberCalls:
    """Reads one. It begins with its first argument, or its end where it has none; all else is kept.

    Args:
        span: that it is in.
    """

    def __init__(self, span: CallSpan) -> None:
        self._span = span
        self._text = ""  # what is not read: the head, then the member that is open
        self._at = 0  # of it, up to which it is searched
        self._name = ""  # of the function; "": its head has not come
        self._level, self._quote = 1, ""  # brackets and the quote that are open
        self._count = -1  # arguments; -1: the call has not begun
        self._is_ended = False  # the call, or the search for one

    def add(self, text: str) -> None:
        if self._is_ended:
            self._drop(text)
            return
        self._text += text
        if not self._name and "{" in text:
            if found := _HEAD.match(self._text):
                self._name = found[1]
                self._read(found.end())
            else:
                self._give_up()
        while self._name and not self._is_ended and self._at < len(self._text) and self._step():
            pass

    def end(self, close: str) -> None:
        if not self._is_ended:
            self._give_up()
        self._span.end(close)

    def _step(self) -> bool:
        """Search on; whether there is more to search in what has come."""
        text, at = self._text, self._at
        if self._quote:
            end = text.find(self._quote, at)
            self._at = max(at, len(text) - len(self._quote) + 1) if end < 0 else end + len(self._quote)
            self._quote = self._quote if end < 0 else ""
            return end >= 0
        found = _OUTSIDE.match(text, at)
        self._at = at = at if found is None else found.end()
        if at == len(text):
            return False
        if text[at] == "<":
            self._quote = next((quote for quote in QUOTES if text.startswith(quote, at)), "")
            if not self._quote:
                may_be = any(quote.startswith(text[at:]) for quote in QUOTES)
                return False if may_be else self._give_up()
            self._at += len(self._quote)
        elif text[at] == "," and self._level == 1:
            return self._member(at, ends=False)
        elif text[at] in "}]" and self._level == 1:
            return self._member(at, ends=True) if text[at] == "}" else self._give_up()
        else:
            self._level += {"{": 1, "[": 1, ",": 0}.get(text[at], -1)
            self._at += 1
        return True

    def _member(self, end: int, ends: bool) -> bool:
        """Give the member before a comma, or before the bracket that ends the call."""
        member = self._text[:end]
        with suppress(NoCall, ValueError, TypeError):
            is_none = ends and self._count <= 0 and not member.strip()
            found = {} if is_none else gemma_object(f"{{{member}}}")
            if not is_none and len(found) != 1:
                raise NoCall
            written = json.dumps(found, ensure_ascii=False, allow_nan=False)[1:-1]
            written.encode()  # no lone surrogate: clients could not send the call back
            if self._count < 0 and not self._span.begin(self._name):
                raise NoCall
            self._span.put(("{" if self._count <= 0 else ", ") + written + "}" * ends)
            self._count = max(self._count, 0) + bool(found)
            self._text, self._at = self._text[end + 1 :], 0
            if ends:
                self._span.finish()
                self._is_ended = True
                text, self._text = self._text, ""
                self._drop(text)
            return True
        return self._give_up()

    def _read(self, length: int) -> None:
        """Be done with so many characters of the head."""
        self._span.keep(self._text[:length])
        self._text, self._at = self._text[length:], 0

    def _give_up(self) -> bool:
        """Read what follows as text: kept, or content within a call, whose arguments end there."""
        if self._count >= 0:
            self._span.finish(is_whole=False)
        self._is_ended = True
        text, self._text = self._text, ""
        self._drop(text)
        return False

    def _drop(self, text: str) -> None:
        (self._span.keep if self._count < 0 else self._span.say)(text)
