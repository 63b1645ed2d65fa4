"""A value of JSON that comes piece by piece: where it ends, and whether it is one as far as it has come."""

from __future__ import annotations

import json
import re
from typing import Literal

__all__ = ["JsonScan"]

_DEPTH = 200  # levels
_DIGITS = 400  # characters of a number
_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BEGINNING = re.compile(r"-|-?(?:0|[1-9][0-9]*)(?:\.[0-9]*(?:(?<=[0-9])[eE][+-]?[0-9]*)?|[eE][+-]?[0-9]*)?")
_WORDS = ("true", "false", "null")

Need = Literal["value", "first value", "key", "first key", "colon", "comma", "string", "escape", "hex", "plain"]


class JsonScan:
    """Follows one value, character by character; what it finds does not depend on the pieces.

    A text with half of a surrogate pair, a number of more than 400 characters, and more than 200 levels are no value.

    Args:
        lenient: whether control characters within strings belong to it, which is no JSON: `take` escapes them.

    Attributes:
        is_whole: whether the value has ended.
        is_broken: whether what came is no beginning of a value.
        need: what comes next.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        self._lenient, self._controls = lenient, list[int]()  # the places of these characters
        self.is_whole = self.is_broken = False
        self.need: Need = "value"
        self._open: list[str] = []  # brackets
        self._is_key = self._is_high = False  # of the string that is open; whether its last escape is half of a pair
        self._plain = ""  # what came of a number or a word, or of the digits of an escape

    @property
    def level(self) -> int:
        """How many objects and lists are open."""
        return len(self._open)

    @property
    def is_in_string(self) -> bool:
        """Whether a string is open."""
        return self.need in ("string", "escape", "hex") and not self.is_broken

    def take(self, text: str, at: int = 0, level: int = 0) -> tuple[int, str]:
        """The place behind what belongs to the value, as of `add`, and this in JSON."""
        self._controls = []
        end, parts = self.add(text, at, level), list[str]()
        for place in self._controls:
            parts += text[at:place], json.dumps(text[place])[1:-1]
            at = place + 1
        return end, "".join((*parts, text[at:end]))

    def add(self, text: str, at: int = 0, level: int = 0) -> int:
        """Follow a text from a place on; the place behind what belongs to the value.

        Args:
            level: of the value whose end is waited for, an object or a list unless it is 0.
        """
        while at < len(text) and not self.is_whole and not self.is_broken:
            before = len(self._open)
            at += self._string(text, at) if self.need in ("string", "escape", "hex") else self._step(text[at])
            if len(self._open) == level < before:
                break
        return at

    def _string(self, text: str, at: int) -> int:
        """Go on within a string; how many characters belong to it."""
        if self.need != "string":
            return self._escaped(text[at])
        found = _PLAIN.match(text, at)
        length = 0 if found is None else found.end() - at
        if self._is_high and not text.startswith("\\", at):
            return self._break()
        if length:
            return length
        if text[at] == '"':
            self.need = "colon" if self._is_key else self._ended()
        elif text[at] == "\\":
            self.need = "escape"
        elif self._lenient:
            self._controls.append(at)
        else:
            return self._break()
        return 1

    def _escaped(self, character: str) -> int:
        if self.need == "escape":
            self.need, self._plain = "hex" if character == "u" else "string", ""
            return 1 if character == "u" or (character in '"\\/bfnrt' and not self._is_high) else self._break()
        if character not in "0123456789abcdefABCDEF":
            return self._break()
        self._plain += character
        if len(self._plain) == 4:
            half = int(self._plain, 16) >> 10
            if (half == 0x37) != self._is_high:  # the second half of a pair follows the first
                return self._break()
            self._is_high, self.need = half == 0x36, "string"
        return 1

    def _step(self, character: str) -> int:
        """Go on outside of strings; whether the character belongs to the value."""
        need = self.need
        if need == "plain":
            return self._go_on(character)
        if character in _SPACE:
            return 1
        if need == "colon" and character == ":":
            self.need = "value"
        elif need == "comma" and character == ",":
            self.need = "key" if self._open[-1] == "{" else "value"
        elif need in ("key", "first key") and character == '"':
            self.need, self._is_key = "string", True
        elif need in ("comma", "first key", "first value") and character in "}]":
            if self._open.pop() != ("{" if character == "}" else "["):
                return self._break()
            self.need = self._ended()
        elif need in ("value", "first value"):
            return self._begin(character)
        else:
            return self._break()
        return 1

    def _begin(self, character: str) -> int:
        if character == '"':
            self.need, self._is_key = "string", False
        elif character in "{[" and len(self._open) < _DEPTH:
            self._open.append(character)
            self.need = "first key" if character == "{" else "first value"
        elif character in "-0123456789tfn":
            self.need, self._plain = "plain", character
        else:
            return self._break()
        return 1

    def _go_on(self, character: str) -> int:
        """Go on with a number or a word."""
        longer = self._plain + character
        if any(word.startswith(longer) for word in _WORDS) or _BEGINNING.fullmatch(longer):
            self._plain = longer
            return 1 if len(longer) <= _DIGITS else self._break()
        if self._plain not in _WORDS and not _NUMBER.fullmatch(self._plain):
            return self._break()
        self.need = self._ended()
        return 0

    def _ended(self) -> Need:
        """Note that a value has ended; the need behind it."""
        self.is_whole = not self._open
        return "comma"

    def _break(self) -> int:
        self.is_broken = True
        return 0
