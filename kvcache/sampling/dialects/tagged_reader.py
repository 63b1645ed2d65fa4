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
_PYTHON = re.compile(r"\[(?:[A-Za-z_][\w.]*(?:\(.*)?)?", re.DOTALL)
# A regular expression of the texts that begin as such calls for sure.
CALL_BEGINNINGS = "|".join(
    [*(r"\s*" + r"\s*".join(map(re.escape, each)) for each in _OBJECTS), r"\s*\[\s*[A-Za-z_][A-Za-z0-9_.\s]*\("]
)


class TaggedReader:
    """Reads such an answer; see `Dialect` for the arguments.

    Thoughts begin before any content, or after calls; calls whose mark is a special token end them. A mark that has no
    meaning where it stands is text.
    """

    def __init__(
        self, dialect: Dialect, transcript: Transcript, calls: bool, schemas: Mapping[str, Any], thinks: bool
    ) -> None:
        self._dialect, self._transcript, self._schemas = dialect, transcript, schemas
        self._open, self._close = dialect.calls if calls and dialect.calls else ("", "")
        self._section = dialect.section or () if calls else ()
        self._state: Literal["content", "title", "thought", "call", "lead"] = "content"
        self._begin_thought, self._end_thought = dialect.thoughts or ("", "")
        self._calls: CallStream | None = None  # reads calls that have not ended
        self._lead: list[str] = []  # what may be calls without a mark
        self._head = ""  # its first characters
        if thinks:
            self._state = "thought"
        elif calls and dialect.leads:
            self._state = "lead"

    @property
    def is_thinking(self) -> bool:
        return self._state in ("title", "thought")

    def text(self, text: str) -> None:
        if self._state == "title":
            _, found, text = text.partition("\n")
            self._state = "thought" if found else "title"
        if self._state == "thought":
            self._transcript.think(text)
        elif self._state == "content":
            self._transcript.say(text)
        elif self._calls is not None:
            self._calls.add(text)
        else:
            self._lead.append(text)
            self._head += text[: _HEAD - len(self._head)]
            start = re.sub(r"\s", "", self._head)
            if start.startswith(_OBJECTS):
                self._begin_calls("")
            elif not _may_be_calls(start):
                self._transcript.say(self._taken())

    def mark(self, mark: str, special: bool) -> None:
        begins = mark == self._begin_thought
        if mark in self._section:
            if self._state == "call":
                self._end_calls()
            return
        if self.is_thinking and mark == self._end_thought:
            self._transcript.end_thought()
            self._state = "content"
        elif mark in self._dialect.silent and self._state != "call":
            if not self.is_thinking:
                self._transcript.drop_space()
        elif self._state == "call" and mark == self._close:
            self._end_calls(mark)
        elif mark == self._open and (special or not self.is_thinking):
            self.end()
            self._begin_calls(mark)
        elif begins and self._transcript.is_silent and self._state in ("content", "lead") and not self._head.strip():
            self._taken()
            self._state = "title" if self._dialect.titled else "thought"
        elif not special or self._state in ("call", "lead"):
            self.text(mark)

    def end(self) -> None:
        if self._lead:
            self._begin_calls("")
        self._end_calls()

    def _begin_calls(self, mark: str) -> None:
        """Begin calls, with what may have been some."""
        dialect = self._dialect
        if dialect.stream is not None:
            self._calls = dialect.reader_of_calls(CallSpan(self._transcript, dialect.read, self._schemas, mark))
            self._calls.add(self._taken())
            self._state = "call"

    def _end_calls(self, close: str = "") -> None:
        if self._calls is not None:
            self._calls.end(close)
            self._calls = None
        self._state = "content"

    def _taken(self) -> str:
        """Take the text that may have been calls; content follows."""
        text, self._lead, self._head, self._state = "".join(self._lead), [], "", "content"
        return text


def _may_be_calls(start: str) -> bool:
    """Whether a text without white space may be the beginning of calls."""
    return any(each.startswith(start) for each in _OBJECTS) or _PYTHON.fullmatch(start) is not None
