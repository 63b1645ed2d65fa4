"""The transcript of an answer, in channels: thoughts, content and calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from kvcache.sampling.stop_strings import StopStrings, UntilStop

__all__ = ["Channel", "ChannelPiece", "ToolCall", "Transcript"]

Channel = Literal["reasoning", "content", "call", "arguments"]
_SPACE = " \t\r\n"


class ChannelPiece(NamedTuple):
    """A piece of an answer.

    Attributes:
        channel: "reasoning" and "content" are text; "call" begins a call, and its text is the name; "arguments" are
            JSON, of the call before; no JSON if the answer ends within it, or the network writes something else.
        text: of the channel.
    """

    channel: Channel
    text: str


class ToolCall(NamedTuple):
    """A call: the name of a function, and its arguments, an object in JSON."""

    name: str
    arguments: str


class Transcript:
    """Collects what is said. White space around thoughts and calls is no content.

    Args:
        holds: whether calls may follow: white space then waits for what comes next.
        names: of the functions that may be called; None: any.
        parallel: whether there may be several calls; all but the first are dropped otherwise.
        stop: strings that end it, within the content; nothing is said behind one.

    Attributes:
        calls: how many whole ones there were.
        is_silent: whether there was no content since the beginning, or since the last call.
    """

    def __init__(
        self, holds: bool, names: frozenset[str] | None = None, parallel: bool = True, stop: Iterable[str] = ()
    ) -> None:
        self._holds, self._names, self._parallel = holds, names, parallel
        self._content = UntilStop(StopStrings(stop))
        self._pieces: list[ChannelPiece] = []
        self._held = ""  # white space, which counts if content follows
        self._trims = False  # whether white space that comes next is dropped
        self._thinks = False
        self._has_begun = self._drops = False  # a call; the one that comes
        self.calls, self.is_silent = 0, True

    @property
    def stop_string(self) -> str:
        """The stop string that has ended it; "": none."""
        return self._content.found

    def think(self, text: str) -> None:
        """Add to the thoughts."""
        if not self._thinks:
            self._let_out()
            self._thinks, self._trims, self._held = True, True, ""
        self._say("reasoning", text)

    def end_thought(self) -> None:
        """End the thoughts; content follows."""
        self._thinks = False
        self.drop_space()

    def drop_space(self) -> None:
        """Drop the white space that waits, and that which comes next."""
        self._let_out()
        self._trims, self._held = True, ""

    def say(self, text: str) -> None:
        """Add to the content."""
        if self._thinks:
            self.end_thought()
        self._say("content", text)
        self.is_silent = self.is_silent and not text.strip(_SPACE)

    def _say(self, channel: Channel, text: str) -> None:
        if self._trims:
            text = text.lstrip(_SPACE)
        if not text or self.stop_string:
            return
        self._trims = False
        self._put(channel, self._content.add(text) if channel == "content" else text)

    def _let_out(self) -> None:
        """Add the content that may begin a stop string, since something else follows."""
        if text := self._content.end():
            self._put("content", text)

    def _put(self, channel: Channel, text: str) -> None:
        text = self._held + text
        end = len(text.rstrip(_SPACE)) if self._holds or self._thinks else len(text)
        self._held = text[end:]
        if end:
            self._pieces.append(ChannelPiece(channel, text[:end]))

    def allows(self, name: str) -> bool:
        """Whether a function may be called."""
        return self._names is None or name in self._names

    def call(self, calls: Sequence[ToolCall]) -> None:
        """Add whole calls."""
        for call in calls:
            self.begin_call(call.name)
            self.add_arguments(call.arguments)
            self.end_call(True)

    def begin_call(self, name: str) -> bool:
        """Begin a call; whether the function may be called."""
        if not self.allows(name):
            return False
        self._let_out()
        self._held, self._trims, self._thinks, self.is_silent = "", True, False, True
        self._drops = self._has_begun and not self._parallel
        self._has_begun = True
        if not self._drops:
            self._pieces.append(ChannelPiece("call", name))
        return True

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call."""
        if not self._drops:
            self._pieces.append(ChannelPiece("arguments", text))

    def end_call(self, is_whole: bool) -> None:
        """End the call."""
        self.calls += is_whole and not self._drops

    def end(self) -> None:
        """Note that no more follows: white space that was held is content, unless thoughts or calls are before it."""
        self._let_out()
        if self._held and not self._thinks:
            self._pieces.append(ChannelPiece("content", self._held))
        self._held = ""

    def take(self) -> list[ChannelPiece]:
        """The pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces
