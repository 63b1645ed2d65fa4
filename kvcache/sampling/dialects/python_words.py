"""Python's words for values and calls, which some networks write: `[f(a='x', b=[True, None])]`."""

from __future__ import annotations

import math
import re
from typing import Any

from kvcache.sampling.dialects.call_errors import NoCall

__all__ = ["NUMBER", "WORDS", "number_of", "python_calls", "python_value"]

WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MOST_DIGITS = 400  # characters of a number
_DEPTH, _MOST = 100, 10_000  # levels, and values of a text, which take 50 ms
_NAME = re.compile(r"[^\s()\[\]{}'\"=,:]+")
_SPACE = re.compile(r"\s*")
_QUOTE = re.compile(r"([rR]?)('''|\"\"\"|'|\")")
_BODIES = {
    quote: re.compile(rf"((?:[^\\]|\\.)*?){quote}", re.DOTALL) for quote in ("'", '"', "'''", '"""')
}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": "", "\\": "\\", "'": "'",
    '"': '"', "/": "/",
}


def number_of(text: str) -> int | float | str:
    """A number, in JSON or with what Python allows: a sign, zeros and a point at its beginning, `_` between digits.

    One beyond those of 64 bits is a text, since JSON has no Infinity. ValueError: there is none.
    """
    if len(text) > _MOST_DIGITS or not NUMBER.fullmatch(text):
        raise ValueError("value: expected a number, got another text")
    digits = text.replace("_", "")
    if digits.lstrip("+-").isdecimal():
        return int(digits)
    return found if math.isfinite(found := float(digits)) else text


def python_value(text: str) -> Any:
    """The value of a whole text. NoCall, ValueError: there is none."""
    words = _PythonWords(text)
    found = words.value(_DEPTH)
    words.expect_end()
    return found


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and arguments of `f(a=1)`, or of a list of calls; names may be any words.

    Raises:
        NoCall, ValueError: there are none.
    """
    words = _PythonWords(text)
    close = words.takes_one({"[": "]", "(": ")"})
    found: list[tuple[str, dict[str, Any]]] = []
    while not found or (words.takes(",") and close):
        if close and found and words.sees(close):
            break
        found.append(words.call())
    if close and not words.takes(close):
        raise NoCall
    words.expect_end()
    return found


class _PythonWords:
    """Reads a text from its beginning on, in linear time."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._left = text, 0, _MOST

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = self._at if found is None else found.end()

    def sees(self, word: str) -> bool:
        """Whether a word comes next, behind white space."""
        self._skip()
        return self._text.startswith(word, self._at)

    def takes(self, word: str) -> bool:
        """Whether a word comes next; it is read."""
        found = self.sees(word)
        self._at += len(word) * found
        return found

    def takes_one(self, words: dict[str, str]) -> str:
        """Read the one of some words that comes next; what belongs to it, or "": none does."""
        return next((value for word, value in words.items() if self.takes(word)), "")

    def expect_end(self) -> None:
        """Raise NoCall if there is more."""
        self._skip()
        if self._at < len(self._text):
            raise NoCall

    def _expect(self, word: str) -> None:
        if not self.takes(word):
            raise NoCall

    def _name(self) -> str:
        self._skip()
        if not (found := _NAME.match(self._text, self._at)):
            raise NoCall
        self._at = found.end()
        return found[0]

    def call(self) -> tuple[str, dict[str, Any]]:
        """A name and its arguments."""
        name, arguments = self._name(), dict[str, Any]()
        self._expect("(")
        while not self.takes(")"):
            if arguments:
                self._expect(",")
                if self.takes(")"):
                    break
            key = self._name()
            self._expect("=")
            if key in arguments:
                raise NoCall
            arguments[key] = self.value(_DEPTH)
        return name, arguments

    def value(self, depth: int) -> Any:
        """The next value. NoCall: none, too many, or one in more than `depth` others."""
        self._left -= 1
        if depth == 0 or self._left < 0:
            raise NoCall
        if self.takes("{"):
            return dict(self._items("}", depth))
        if close := self.takes_one({"[": "]", "(": ")"}):
            return [value for _, value in self._items(close, depth)]
        if _QUOTE.match(self._text, self._at):
            return self._string()
        word = self._name()
        return WORDS[word] if word in WORDS else number_of(word)

    def _items(self, close: str, depth: int) -> list[tuple[Any, Any]]:
        """The entries up to a bracket; those of lists have no keys."""
        found: list[tuple[Any, Any]] = []
        while not self.takes(close):
            if found:
                self._expect(",")
                if self.takes(close):
                    break
            key = self.value(1) if close == "}" else None
            if close == "}":
                self._expect(":")
            found.append((key, self.value(depth - 1)))
        return found

    def _string(self) -> str:
        """A text in quotes, or several next to each other. NoCall: it has no end."""
        parts = []
        while quote := _QUOTE.match(self._text, self._at):
            found = _BODIES[quote[2]].match(self._text, quote.end())
            if found is None:
                raise NoCall
            self._at = found.end()
            parts.append(found[1] if quote[1] else _ESCAPE.sub(_unescaped, found[1]))
            self._skip()
        text = "".join(parts)
        return text.encode("utf-16", "surrogatepass").decode("utf-16")  # halves of pairs become characters


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0] in "01234567":
        return chr(int(code, 8))
    return _ESCAPES.get(code, found[0])
