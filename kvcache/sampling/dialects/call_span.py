"""The text between two marks of calls: as soon as it is a call for sure it is one, and its arguments come as they are
written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvcache.sampling.dialects.call_texts import WholeReader
from kvcache.sampling.dialects.transcript import ToolCall, Transcript

__all__ = ["CallSpan", "CallStream"]


class CallStream(Protocol):
    """A state machine over a span, in one of the ways in which networks write calls."""

    @property
    def is_open(self) -> bool:
        """Whether a string or the text of an argument is open, in which marks are text."""

    @property
    def is_none(self) -> bool:
        """Whether what came is no call, and what comes next neither."""

    def add(self, text: str) -> None:
        """Read on."""

    def end(self, close: str) -> None:
        """Note the mark that ends the span; "": there is none."""


class CallSpan:
    """Keeps the text until it is a call. What is none when the span ends is read as a whole, and else content.

    Args:
        transcript: takes the calls.
        read: reads a whole span that its stream has not; None: there is no other way.
        schemas: of the arguments of each function, by its name.
        mark: that begins the span.
        offered: whether the mark may be text as well: only functions with a schema may then be called.
        thinks: whether it stands within a thought, which goes on if there is no call.
    """

    def __init__(
        self, transcript: Transcript, read: WholeReader | None, schemas: Mapping[str, Any], mark: str = "", *,
        offered: bool = False, thinks: bool = False,
    ) -> None:
        self._transcript, self._read, self.schemas, self._mark = transcript, read, schemas, mark
        self._offered, self._thinks = offered, thinks
        self._kept = [mark]
        self.has_begun = False  # a call

    def keep(self, text: str) -> None:
        """Keep a text that is no call yet."""
        self._kept.append(text)

    @property
    def may_be_text(self) -> bool:
        """Whether it may be a text rather than a call, as far as is known."""
        return self._offered and not self.has_begun

    @property
    def is_thought(self) -> bool:
        """Whether it is a part of a thought, as far as is known."""
        return self._thinks and not self.has_begun

    def offers(self, name: str) -> bool:
        """Whether there is a function of this name that may be called."""
        return name in self.schemas and self._transcript.allows(name)

    def _allows(self, name: str) -> bool:
        return self.offers(name) if self._offered else self._transcript.allows(name)

    def begin(self, name: str) -> bool:
        """Begin a call, which all that is kept belongs to; whether it may be called."""
        if not self._allows(name) or not self._transcript.begin_call(name):
            return False
        self._kept, self.has_begun = [], True
        return True

    def put(self, arguments: str) -> None:
        """Add to the arguments of the call."""
        self._transcript.add_arguments(arguments)

    def finish(self, *, is_whole: bool = True) -> None:
        """End the call; where it is not whole its arguments stay what they are, which is no JSON."""
        self._transcript.end_call(is_whole)

    def take(self, calls: Sequence[ToolCall] | None) -> bool:
        """Take calls that were read as a whole; whether there are some, and all may be called."""
        if not calls or not all(self._allows(call.name) for call in calls):
            return False
        self._transcript.call(calls)
        self._kept, self.has_begun = [], True
        return True

    def say(self, text: str) -> None:
        """Add to the content what follows calls and is none."""
        self._transcript.say(text)

    def end(self, close: str = "") -> None:
        """Read what is kept."""
        text, self._kept = "".join(self._kept), []
        if not text.strip() and self.has_begun:
            return
        text, body = text + ("" if self.has_begun else close), text.removeprefix(self._mark)
        if self._read is None or not self.take(self._read(body)):
            (self._transcript.think if self.is_thought else self._transcript.say)(text)
