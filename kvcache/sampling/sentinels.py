"""Texts that nobody outside the process knows, which a template writes as they are."""

from __future__ import annotations

import re
from secrets import randbelow

__all__ = ["Sentinels"]

_DIGITS, _NUMBER = 20, 7


class Sentinels:
    """Names of numbers that no text has which was written before they were made.

    They are digits, since templates change the case of letters and escape other characters, and of one width, so that
    none begins another.

    Attributes:
        pattern: matches each of them; its group 1 is the number.
    """

    def __init__(self) -> None:
        self._secret = f"{randbelow(10**_DIGITS):0{_DIGITS}}"
        self.pattern = re.compile(rf"{self._secret}([0-9]{{{_NUMBER}}})")

    def name(self, number: int) -> str:
        """The text that stands for a number."""
        return f"{self._secret}{number:0{_NUMBER}}"
