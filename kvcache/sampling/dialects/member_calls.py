"""Calls of Gemma, `call:NAME{key:value,other:[1,2]}`: an argument comes when it is whole."""

from __future__ import annotations

import json
import re
from contextlib import suppress

from kvcache.sampling.dialects.argument_schema import ArgumentSchema
from kvcache.sampling.dialects.call_errors import NoCall
from kvcache.sampling.dialects.call_span import CallSpan
from kvcache.sampling.dialects.gemma_values import QUOTES, gemma_member, is_bare

__all__ = ["MemberCalls"]

_HEAD = re.compile(r"\s*call:([^{\s]+)\s*\{")
_OUTSIDE, _OUTSIDE_KEY = re.compile(r"[^{}\[\],<\"]*"), re.compile(r"[^{}\[\],<\":]*")
_NEXT_KEY = re.compile(r"\s*(?:[^:{}\[\],\s\"<]+|\"[^\"]*\"|<.*)\s*")
_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # up to its end, or the end of what has come


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
        self._known = ArgumentSchema({})  # what its arguments are
        self._level, self._quote = 1, ""  # brackets and the quote that are open
        self._last = ""  # the last character outside of quotes, white space left out
        self._comma = -1  # where a text without quotes ends, if a key follows; -1: nowhere
        self._refuted = -1  # such a comma, behind which a colon was no key's
        self._count = -1  # arguments; -1: the call has not begun
        self._is_ended = False  # the call, or the search for one

    @property
    def is_open(self) -> bool:
        return bool(self._quote)

    @property
    def is_none(self) -> bool:
        return self._is_ended and not self._span.has_begun

    def add(self, text: str) -> None:
        if self._is_ended:
            self._drop(text)
            return
        self._text += text
        if not self._name and "{" in text:
            if found := _HEAD.match(self._text):
                self._name = found[1]
                self._known = ArgumentSchema(self._span.schemas.get(self._name))
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
        if self._quote:
            return self._string()
        text, at = self._text, self._at
        found = (_OUTSIDE if self._comma < 0 or self._level > 1 else _OUTSIDE_KEY).match(text, at)
        between = "" if found is None else found[0]
        self._last = between.rstrip()[-1:] or self._last
        self._at = at = at + len(between)
        if at == len(text):
            return False
        character, is_first = text[at], self._last in ("", ":", ",", "[", "{")
        if character == "<":
            self._quote = next((quote for quote in QUOTES if text.startswith(quote, at)), "")
            if not self._quote and any(quote.startswith(text[at:]) for quote in QUOTES):
                return False
        elif character == '"' and is_first:
            self._quote = character
        elif character in "}]" and self._level == 1:
            return self._member(at, ends=True) if character == "}" else self._give_up()
        elif character in ",:" and self._level == 1:
            if self._ends_member(at):
                return self._member(at if self._comma < 0 else self._comma, ends=False)
            if character == ",":
                self._comma = at
            else:  # no later colon is, and each would be compared with all between
                self._refuted = self._comma
        else:
            self._level += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
        self._last = character
        self._at += len(self._quote) or 1
        return True

    def _ends_member(self, at: int) -> bool:
        """Whether a comma ends the member, or a colon says that the last comma did."""
        if self._text[at] == ",":
            return self._comma < 0 and not is_bare(self._text[:at])
        return self._comma > self._refuted and _NEXT_KEY.fullmatch(self._text, self._comma + 1, at) is not None

    def _string(self) -> bool:
        """Search the end of a quote; whether it has come."""
        text, at = self._text, self._at
        if self._quote == '"':
            found = _STRING.match(text, at)
            end = at if found is None else found.end()
            is_whole = text.startswith('"', end)
            self._at = end + is_whole
        else:
            end = text.find(self._quote, at)
            is_whole = end >= 0
            self._at = end + len(self._quote) if is_whole else max(at, len(text) - len(self._quote) + 1)
        self._quote = "" if is_whole else self._quote
        return is_whole

    def _member(self, end: int, ends: bool) -> bool:
        """Give the member before a comma, or before the bracket that ends the call."""
        member = self._text[:end]
        with suppress(NoCall, ValueError, TypeError, RecursionError):
            is_none = ends and self._count <= 0 and not member.strip()
            key, value = ("", None) if is_none else gemma_member(member, self._known)
            written = "" if is_none else json.dumps({key: value}, ensure_ascii=False, allow_nan=False)[1:-1]
            written.encode()  # no lone surrogate: clients could not send the call back
            if self._count < 0 and not self._span.begin(self._name):
                raise NoCall
            self._span.put(("{" if self._count <= 0 else ", ") + written + "}" * ends)
            self._count = max(self._count, 0) + (not is_none)
            self._text, self._at, self._last, self._comma = self._text[end + 1 :], 0, "", -1
            self._refuted = -1
            if ends:
                self._span.finish()
                self._is_ended = True
                text, self._text = self._text, ""
                self._drop(text)
            return True
        return self._give_up()

    def _read(self, length: int) -> None:
        """Drop the first `length` characters of the head, which were read."""
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
