"""The search for marks, such as `<tool_call>`, in a text that comes piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = ["MarkSearch"]


class MarkSearch:
    """Splits one text at its marks, the same way whatever pieces it comes in. Text that may begin a mark waits.

    Args:
        marks: none of which begins another one.
    """

    def __init__(self, marks: Iterable[str]) -> None:
        marks = sorted(set(marks))
        self._pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._beginnings = {mark[:n] for mark in marks for n in range(1, len(mark))}
        self._longest = max(map(len, marks), default=1) - 1
        self._first = re.compile(f"[{re.escape(''.join({mark[0] for mark in marks}))}]" if marks else r"(?!)")
        self._waiting = ""

    def add(self, piece: str) -> Iterable[tuple[str, bool]]:
        """The texts that are complete with this piece, each with whether it is a mark."""
        if piece and not self._waiting and not self._first.search(piece):
            return ((piece, False),)  # most pieces
        return self._divided(piece)

    def _divided(self, piece: str) -> Iterator[tuple[str, bool]]:
        text, start = self._waiting + piece, 0
        for found in self._pattern.finditer(text):
            if found.start() > start:
                yield text[start : found.start()], False
            yield found[0], True
            start = found.end()
        rest = text[start:]
        waits = next((n for n in range(min(self._longest, len(rest)), 0, -1) if rest[-n:] in self._beginnings), 0)
        self._waiting = rest[len(rest) - waits :]
        if len(rest) > waits:
            yield rest[: len(rest) - waits], False

    def end(self) -> Iterator[tuple[str, bool]]:
        """The text that still waits, when no more follows."""
        if self._waiting:
            yield self._waiting, False
        self._waiting = ""
