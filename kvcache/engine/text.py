"""Text from tokens as they come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcache.engine.tokenizer_errors import decoded

__all__ = ["TextStream"]

_CONTEXT = 8  # tokens of the prompt: a decoder may drop the space before the first token that it sees
_CHARACTER = 4  # tokens, at most: the bytes of UTF-8
_BROKEN = "\ufffd"  # stands for bytes that are no character


class TextStream:
    """The text of new tokens after a prompt, piece by piece; the pieces together are the whole text.

    A token may be a part of a character, and its text may depend on the token before it. So two groups of tokens are
    decoded each time, with and without the new ones, and what the new ones add is a piece as soon as it does not end
    within a character. Text that may begin a stop string waits until the next tokens tell.

    Args:
        tokenizer: has `decode`, of a list of ids.
        prompt: the ids before the new tokens.
        stop: strings that end the text.

    Attributes:
        stopped: whether a stop string was found; the text ends before it.
    """

    def __init__(self, tokenizer: Any, prompt: Any = (), stop: Iterable[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        ids = [int(token) for token in prompt[1 - _CONTEXT - _CHARACTER :]]
        # Some decoders find a whole run of bytes invalid if a part of it is. So the context begins with a character,
        # and the group that is decoded again ends with one.
        lengths = range(_CONTEXT, _CONTEXT + _CHARACTER)
        self._tokens = next((ids[-n:] for n in lengths if self._begins_character(ids[-n:])), ids[-_CONTEXT:])
        self._first, self._last = 0, len(self._tokens)  # the group that is decoded again, before the new tokens
        self._prompt = self._decode(self._last)  # its text, with a part of a character at its end; "" once that is over
        while self._last > max(0, len(self._tokens) - _CHARACTER + 1) and self._decode(self._last).endswith(_BROKEN):
            self._last -= 1
        self._waiting = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The piece of text that is complete with this token; empty after a stop string."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        piece = self._new()
        if not piece or piece.endswith(_BROKEN):
            return ""
        self._first, self._last, self._prompt = self._last, len(self._tokens), ""
        return self._until_stop(piece)

    def extend(self, tokens: Iterable[int], *, ended: bool) -> str:
        """The pieces of several tokens; with `ended` also the text that still waits."""
        return "".join(map(self.add, tokens)) + (self.end() if ended else "")

    def end(self) -> str:
        """The text that still waits, when no token follows; an unfinished character is U+FFFD."""
        if self.stopped:
            return ""
        new = self._new()
        self._first, self._last, self._prompt = len(self._tokens), len(self._tokens), ""
        piece = self._until_stop(new) + self._waiting
        self._waiting = ""
        return piece

    def _new(self) -> str:
        """What the tokens behind the group add to its text; a character that the prompt ends in comes whole."""
        text = self._decode(len(self._tokens))
        is_behind = self._prompt and text.startswith(self._prompt)
        return text[len(self._prompt if is_behind else self._decode(self._last)) :]

    def _decode(self, end: int) -> str:
        return self._text(self._tokens[self._first : end])

    def _begins_character(self, ids: list[int]) -> bool:
        return any(not self._text(ids[:n]).startswith(_BROKEN) for n in range(1, _CHARACTER + 1))

    def _text(self, ids: list[int]) -> str:
        return decoded(self._tokenizer, ids)

    def _until_stop(self, piece: str) -> str:
        """The text that waited and `piece`, up to a stop string, less an end that may begin one."""
        text = self._waiting + piece
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)]
        waits = max((_overlap(text, string) for string in self._stop), default=0)
        self._waiting = text[len(text) - waits :]
        return text[: len(text) - waits]


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that `string`, which is longer, begins with."""
    lengths = range(min(len(text), len(string) - 1), 0, -1)
    return next((length for length in lengths if string.startswith(text[len(text) - length :])), 0)
