"""The search for stop strings in a text that comes piece by piece, in linear time (Knuth, Morris and Pratt)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

__all__ = ["Search", "StopStrings", "StopWatch", "UntilStop"]


class StopStrings:
    """Strings to search for, with their tables; any number of texts share them.

    A table says for each length of a beginning of its string how long the longest shorter one is that it ends with.
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self.tables = tuple((string, _borders(string)) for string in dict.fromkeys(strings))


class Search:
    """A search in one text.

    Attributes:
        waits: how many of the last characters may begin a stop string.
        found: the stop string that was found, the longest of those at its place; "": none.
    """

    def __init__(self, stop: StopStrings) -> None:
        self._tables = stop.tables
        self._lengths = [0] * len(stop.tables)  # of the beginning of each string that the text ends with
        self.waits, self.found = 0, ""

    def find(self, piece: str) -> int | None:
        """Search on in the next piece of the text.

        Returns:
            The place of the first stop string that ends in the piece, counted from the beginning of the piece, and
            negative before it; None: there is none. Of several the place counts, not the end.
        """
        first = None
        for number, (string, borders) in enumerate(self._tables):
            length = self._lengths[number]
            if not length and string[0] not in piece:
                continue
            for place, character in enumerate(piece):
                while length and string[length] != character:
                    length = borders[length]
                length += string[length] == character
                if length == len(string):
                    found = place + 1 - length
                    if first is None or (found, -length) < (first, -len(self.found)):
                        first, self.found = found, string
                    length = 0
                    break
            self._lengths[number] = length
        self.waits = max(self._lengths, default=0)
        return first


class StopWatch(Protocol):
    """Reads the tokens of a text, and notes a stop string where it counts."""

    @property
    def stopped(self) -> bool:
        """Whether there was one."""

    def extend(self, tokens: Iterable[int], *, ended: bool) -> object:
        """Read on; `ended`: to the end."""


class UntilStop:
    """A text that comes piece by piece, up to a stop string; its end waits where it may begin one.

    Args:
        stop: the strings.

    Attributes:
        found: the stop string that has ended the text; "": none.
    """

    def __init__(self, stop: StopStrings) -> None:
        self._stop, self._search, self._waiting, self.found = stop, Search(stop), "", ""

    def add(self, piece: str) -> str:
        """The text that is out with this piece; "" behind a stop string."""
        if not self._stop.tables or self.found:
            return "" if self.found else piece
        found, text = self._search.find(piece), self._waiting + piece
        self.found = self._search.found
        end = len(text) - self._search.waits if found is None else len(self._waiting) + found
        self._waiting = "" if found is not None else text[end:]
        return text[:end]

    def end(self) -> str:
        """The text that waits, when none follows, or another text does."""
        text, self._waiting = self._waiting, ""
        if not self.found:
            self._search = Search(self._stop)
        return text


def _borders(string: str) -> array[int]:
    borders, length = array("I", [0, 0]), 0
    for character in string[1:]:
        while length and string[length] != character:
            length = borders[length]
        length += string[length] == character
        borders.append(length)
    return borders
