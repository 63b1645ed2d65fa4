"""Gemma's own words for arguments, `key:<|"|>text<|"|>,other:[1,true]`; texts may be in JSON's quotes, or in none."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from kvcache.sampling.dialects.argument_schema import ANY_TYPE, ArgumentSchema
from kvcache.sampling.dialects.argument_values import json_value, read_value
from kvcache.sampling.dialects.call_errors import NoCall
from kvcache.sampling.dialects.python_words import WORDS, number_of

__all__ = ["QUOTES", "gemma_member", "is_bare"]

QUOTES = ('<|"|>', "<escape>")
_KEY = re.compile(r"\s*([^:{}\[\],\s]+)\s*:")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BARE = re.compile(r"[^,{}\[\]]*")
_MOST_DIGITS = 400  # characters of a number or a word
_DEPTH, _MOST = 100, 10_000  # levels, and values of a call, which take 50 ms


def gemma_member(text: str, known: ArgumentSchema) -> tuple[str, Any]:
    """A key and its value in Gemma's words. NoCall: none; ValueError: a text without end.

    Args:
        text: all of it: a text without quotes may have commas.
        known: the schemas of values.
    """
    values = _Values(text, known)
    key = values.key()
    found = values.value(known.property_of(key), _DEPTH, is_rest=True)
    if text[values.at :].strip():
        raise NoCall
    return key, found


def is_bare(text: str) -> bool:
    """Whether the value of a member is a text without quotes."""
    key = _KEY.match(text)
    value = "" if key is None else text[key.end() :].strip()
    if not value or value.startswith(("{", "[", '"', *QUOTES)):
        return False
    return _plain(value) is value


def _plain(text: str) -> Any:
    """A number or a word, or the text."""
    if text in WORDS:
        return WORDS[text]
    if len(text) <= _MOST_DIGITS:
        with suppress(ValueError):
            return number_of(text)
    return text


class _Values:
    """Reads values from the beginning of a text on.

    Attributes:
        at: the place behind what was read.
    """

    def __init__(self, text: str, known: ArgumentSchema) -> None:
        self._text, self._known, self.at, self._left = text, known, 0, _MOST

    def value(self, schema: Any, depth: int, *, is_rest: bool = False) -> Any:
        """The next value. NoCall: none, too many, one in more than `depth` others; ValueError: a text without end.

        Args:
            is_rest: whether a text without quotes is all that follows.
        """
        self._left -= 1
        if depth == 0 or self._left < 0:
            raise NoCall
        self._skip()
        if self._takes("{"):
            return dict(self._items(schema, depth, "}"))
        if self._takes("["):
            return [value for _, value in self._items(schema, depth, "]")]
        if (text := self._quoted()) is not None:
            return text
        found = None if is_rest else _BARE.match(self._text, self.at)
        end = len(self._text) if found is None else found.end()
        text, self.at = self._text[self.at : end].strip(), end
        if not text:
            raise NoCall
        return _plain(text) if self._known.types(schema) == ANY_TYPE else read_value(text, schema, self._known)

    def _items(self, schema: Any, depth: int, close: str) -> list[tuple[Any, Any]]:
        """The entries up to a bracket; those of lists have no keys."""
        found: list[tuple[Any, Any]] = []
        self._skip()
        while not self._takes(close):
            if found and not self._takes(","):
                raise NoCall
            key = self.key() if close == "}" else None
            inner = self._known.items_of(schema) if key is None else self._known.property_of(key, schema)
            found.append((key, self.value(inner, depth - 1)))
            self._skip()
        return found

    def key(self) -> str:
        """The next key, and the colon behind it."""
        self._skip()
        if (text := self._quoted()) is not None:
            self._skip()
            if not self._takes(":"):
                raise NoCall
            return text
        if not (found := _KEY.match(self._text, self.at)):
            raise NoCall
        self.at = found.end()
        return found[1]

    def _quoted(self) -> str | None:
        """The text in quotes that comes next; None: none does."""
        for quote in QUOTES:
            if self._takes(quote):
                end = self._text.index(quote, self.at)
                text, self.at = self._text[self.at : end], end + len(quote)
                return text
        if not (found := _STRING.match(self._text, self.at)):
            return None
        self.at = found.end()
        return str(json_value(found[0]))

    def _takes(self, text: str) -> bool:
        if self._text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _skip(self) -> None:
        while self.at < len(self._text) and self._text[self.at].isspace():
            self.at += 1
