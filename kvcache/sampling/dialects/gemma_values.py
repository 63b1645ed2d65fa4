"""Gemma's own words for arguments: `call:NAME{key:<|"|>text<|"|>,other:[1,true]}`."""

from __future__ import annotations

import re
from typing import Any

from kvcache.sampling.dialects.call_texts import NoCall

__all__ = ["QUOTES", "gemma_object"]

QUOTES = ('<|"|>', "<escape>")
_KEY = re.compile(r"\s*([^:{}\[\],\s]+)\s*:")
_NUMBER = re.compile(r"-?[0-9]{1,300}(?:\.[0-9]{1,300})?(?:[eE][+-]?[0-9]{1,3})?")
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
_DEPTH, _MOST = 100, 10_000  # levels, and values of a call, which take 50 ms


def gemma_object(text: str) -> dict[str, Any]:
    """An object in these words. NoCall: none; ValueError: a text without end."""
    values = _Values(text, 0)
    found = values.value(_DEPTH)
    if text[values.at :].strip() or not isinstance(found, dict):
        raise NoCall
    return found


class _Values:
    """Reads values from a place of a text on.

    Attributes:
        at: the place behind what was read.
    """

    def __init__(self, text: str, at: int) -> None:
        self._text, self.at, self._left = text, at, _MOST

    def value(self, depth: int) -> Any:
        """The next value. NoCall: none, too many, one in more than `depth` others; ValueError: a text without end."""
        self._left -= 1
        if depth == 0 or self._left < 0:
            raise NoCall
        self._skip()
        if self._takes("{"):
            return dict(self._items(depth, "}"))
        if self._takes("["):
            return [value for _, value in self._items(depth, "]")]
        for quote in QUOTES:
            if self._takes(quote):
                return self._until(quote)
        return self._plain()

    def _items(self, depth: int, close: str) -> list[tuple[Any, Any]]:
        """The entries up to a bracket; those of lists have no keys."""
        found: list[tuple[Any, Any]] = []
        self._skip()
        while not self._takes(close):
            if found and not self._takes(","):
                raise NoCall
            key = self._key() if close == "}" else None
            found.append((key, self.value(depth - 1)))
            self._skip()
        return found

    def _key(self) -> str:
        self._skip()
        for quote in QUOTES:
            if self._takes(quote):
                key = self._until(quote)
                self._skip()
                if not self._takes(":"):
                    raise NoCall
                return key
        if not (found := _KEY.match(self._text, self.at)):
            raise NoCall
        self.at = found.end()
        return found[1]

    def _plain(self) -> Any:
        if found := _NUMBER.match(self._text, self.at):
            self.at, text = found.end(), found[0]
            return int(text) if re.fullmatch(r"-?[0-9]+", text) else float(text)
        for word, value in _WORDS.items():
            if self._takes(word):
                return value
        raise NoCall

    def _until(self, quote: str) -> str:
        end = self._text.index(quote, self.at)
        text, self.at = self._text[self.at : end], end + len(quote)
        return text

    def _takes(self, text: str) -> bool:
        if self._text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _skip(self) -> None:
        while self.at < len(self._text) and self._text[self.at].isspace():
            self.at += 1
