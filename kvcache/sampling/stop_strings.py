"""The search for stop strings in a text that comes piece by piece, in linear time (Knuth, Morris and Pratt)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

__all__ = ["Search", "StopStrings"]


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
    """

    def __init__(self, stop: StopStrings) -> None:
        self._tables = stop.tables
        self._lengths = [0] * len(stop.tables)  # of the beginning of each string that the text ends with
        self.waits = 0

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
                    first = found if first is None else min(first, found)
                    length = 0
                    break
            self._lengths[number] = length
        self.waits = max(self._lengths, default=0)
        return first


def _borders(string: str) -> array[int]:
    borders, length = array("I", [0, 0]), 0
    for character in string[1:]:
        while length and string[length] != character:
            length = borders[length]
        length += string[length] == character
        borders.append(length)
    return borders
