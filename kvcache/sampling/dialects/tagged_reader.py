"""Answers with marks around thoughts and calls, and those that are calls from their first character on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from kvcache.sampling.dialects.call_span import CallSpan, CallStream
from kvcache.sampling.dialects.dialect import Dialect
from kvcache.sampling.dialects.transcript import Transcript

__all__ = ["CALL_BEGINNINGS", "TaggedReader"]

# Beginnings of calls without a mark, white space left out.
_OBJECTS = ('{"name":', '{"type":"function"', '{"function":', '[{"name":')
_HEAD = 200  # characters
_PYTHON = re.compile(r"\[(?:[A-Za-z_][\w.-]*(?:\(.*)?)?", re.DOTALL)
# A regular expression of the texts that begin as such calls for sure.
CALL_BEGINNINGS = "|".join(
    [*(r"\s*" + r"\s*".join(map(re.escape, each)) for each in _OBJECTS), r"\s*\[\s*[A-Za-z_][A-Za-z0-9_.\s-]*\("]
)


class TaggedReader:
    """Reads an answer with tags; see `Dialect` for the arguments.

    Thoughts begin before any content, or after calls, and a call ends them. A mark of calls within a thought that is no
    special token may be text, and so may one of calls whose first mark is left out: there a call is one if the function
    is known. A mark that has no meaning where it stands is text, and so is one within a string or an argument, unless
    it is a special token.
    """

    def __init__(
        self, dialect: Dialect, transcript: Transcript, calls: bool, schemas: Mapping[str, Any], thinks: bool
    ) -> None:
        self._dialect, self._transcript, self._schemas = dialect, transcript, schemas
        self._main = dialect.calls if calls and dialect.calls else ("", "")
        self._lone = dialect.lone.calls if calls and dialect.lone else ("", "")
        self._section = dialect.section or () if calls else ()
        self._leads = calls and dialect.leads
        self._state: Literal["content", "title", "thought", "call", "lead"] = "lead" if self._leads else "content"
        self._begin_thought, self._end_thought = dialect.thoughts or ("", "")
        self._span: CallSpan | None = None  # calls that have not ended
        self._calls: CallStream | None = None  # reads these
        self._close = ""  # the mark that ends these
        self._in_thought = False  # whether they began there
        self._held = ""  # that mark within a string, which may have no end, and white space behind it
        self._strays: tuple[str, ...] = ()  # marks that say nothing behind a call
        self._lead: list[str] = []  # what may be calls without a mark
        self._head = ""  # its first characters
        if thinks:
            self._state = "thought"

    @property
    def is_thinking(self) -> bool:
        return self._state in ("title", "thought") or (self._span is not None and self._span.is_thought)

    def text(self, text: str) -> None:
        if self._state == "title":
            _, found, text = text.partition("\n")
            self._state = "thought" if found else "title"
        if self._state == "thought":
            self._transcript.think(text)
        elif self._state == "content":
            self._strays = () if text.strip() else self._strays
            self._transcript.say(text)
        elif self._state == "call":
            self._add(text)
        else:
            self._lead.append(text)
            self._head += text[: _HEAD - len(self._head)]
            start = re.sub(r"\s", "", self._head)
            if start.startswith(_OBJECTS):
                self._begin_calls("")
            elif not _may_be_calls(start):
                self._transcript.say(self._taken())

    def mark(self, mark: str, special: bool) -> None:
        if self._state == "call" and self._is_of_call(mark, special):
            return
        thinks, is_first = self.is_thinking, not self._head.strip()
        if mark in self._section:
            return
        if thinks and mark == self._end_thought:
            self._transcript.end_thought()
            self._state = "lead" if self._leads and self._transcript.is_silent else "content"
        elif mark in self._strays and not thinks:
            self._transcript.drop_space()
        elif mark in self._dialect.silent:
            if not thinks:
                self._transcript.drop_space()
        elif mark == self._main[0] or (mark == self._lone[0] and is_first):
            self.end()
            self._begin_calls(mark, may_be_text=mark == self._lone[0] or (thinks and not special))
        elif mark == self._begin_thought and self._transcript.is_silent and not thinks and is_first:
            self._taken()
            self._state = "title" if self._dialect.titled else "thought"
        elif not special or self._state == "lead":
            self.text(mark)

    def end(self) -> None:
        if self._lead:
            self._begin_calls("")
        self._end_unclosed()

    def _is_of_call(self, mark: str, special: bool) -> bool:
        """Read a mark within calls; False: it ends them, and says something behind them."""
        is_text = self._calls is not None and self._calls.is_open and not special
        begins = mark == self._main[0] or (mark == self._lone[0] and self._close == self._lone[1])
        if begins and (self._held or not is_text):
            self._end_unclosed()
            return False
        if mark == self._close and is_text:
            self._flush()
            self._held = mark
        elif mark in (self._close, self._main[1]) and not is_text:
            self._end_calls(mark)
        elif mark in self._section and not is_text:
            self._end_calls()
        elif mark == self._end_thought and self._in_thought and not is_text:
            self._end_calls()
            return False
        else:
            self._add(mark)
        return True

    def _begin_calls(self, mark: str, *, may_be_text: bool = False) -> None:
        """Begin calls, with what may have been some."""
        dialect, thinks = self._dialect, self.is_thinking
        form = dialect.lone if mark and mark == self._lone[0] else None
        read = dialect.read if form is None else None
        self._in_thought = thinks
        self._span = CallSpan(
            self._transcript, read, self._schemas, mark, offered=may_be_text, thinks=thinks and may_be_text
        )
        self._calls = dialect.reader_of_calls(self._span, form)
        self._close = self._main[1] if form is None else form.calls[1]
        text = self._taken()
        self._state = "call"
        self._add(text)

    def _add(self, text: str) -> None:
        """Read on within calls; what may be text is some as soon as there are none."""
        if self._held and not text.strip():
            self._held += text
            return
        self._flush()
        if self._calls is not None and self._span is not None:
            self._calls.add(text)
            if self._calls.is_none and self._span.may_be_text:
                self._end_calls()

    def _flush(self) -> None:
        """Read a mark within a string, which goes on behind it."""
        text, self._held = self._held, ""
        if text and self._calls is not None:
            self._calls.add(text)

    def _end_unclosed(self) -> None:
        """End calls without their mark, unless that was within a string which has no end."""
        held, self._held = self._held, ""
        self._end_calls(self._close if held else "")
        if space := held.removeprefix(self._close):
            self.text(space)

    def _end_calls(self, close: str = "") -> None:
        """End calls, and the thought that they are in, if there were some."""
        if self._calls is None or self._span is None:
            return
        self._calls.end(close)
        is_thought, has_begun = self._span.is_thought, self._span.has_begun
        self._state = "thought" if is_thought else "content"
        if has_begun:
            others = (self._main[1],) if self._close == self._lone[1] else ()
            self._strays = (self._end_thought, *others) if self._in_thought else others
        self._calls, self._span, self._held = None, None, ""

    def _taken(self) -> str:
        """Take the text that may have been calls; content follows."""
        text, self._lead, self._head, self._state = "".join(self._lead), [], "", "content"
        return text


def _may_be_calls(start: str) -> bool:
    """Whether a text without white space may be the beginning of calls."""
    return any(each.startswith(start) for each in _OBJECTS) or _PYTHON.fullmatch(start) is not None
