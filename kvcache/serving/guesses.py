"""Guesses of the next tokens without a second network: what followed the last tokens where they stood before.

Source: Saxena, "Prompt Lookup Decoding" (2023). The network checks all guesses in one pass. Each place of the text
draws its own token, with its own random number, and a guess stays if it is the token that was drawn: the text is the
one without guesses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_GUESS", "Guesses"]

Tokens = NDArray[np.uint32]

NO_GUESS: Tokens = np.empty(0, np.uint32)
MOST = 8  # guesses per pass; products of so few rows cost little more than those of one
_GRAM = 3  # tokens that must agree
_REACH = 8192  # tokens that are searched
_LONGEST_PAUSE = 64  # passes without guesses after guesses that failed


class Guesses:
    """The guesses of one text. Where they fail they become fewer and rarer, where they hold more.

    Attributes:
        guessed, accepted: tokens so far.
    """

    def __init__(self) -> None:
        self.guessed = self.accepted = 0
        self._most, self._pause, self._wait = 2, 0, 0

    def propose(self, tokens: Tokens, most: int) -> Tokens:
        """At most `most` tokens that may follow a text; none where there is nothing to go by."""
        most = min(most, self._most)
        if self._wait:
            self._wait -= 1
            return NO_GUESS
        if most <= 0 or len(tokens) <= _GRAM:
            return NO_GUESS
        seen = tokens[-_REACH:]
        ends = seen[_GRAM - 1 : -1] == seen[-1]
        for back in range(1, _GRAM):
            ends &= seen[_GRAM - 1 - back : -1 - back] == seen[-1 - back]
        found = np.flatnonzero(ends)
        if not len(found):
            return NO_GUESS
        first = int(found[-1]) + _GRAM  # behind the newest place
        return seen[first : first + most].copy()

    def learn(self, guessed: int, accepted: int) -> None:
        """Note how many guesses of a pass stayed."""
        self.guessed += guessed
        self.accepted += accepted
        if accepted == guessed:
            self._most, self._pause = min(2 * self._most, MOST), 0
        elif 2 * accepted < guessed:
            self._most = max(self._most // 2, 1)
            if not accepted:
                self._pause = min(2 * self._pause + 2, _LONGEST_PAUSE)
                self._wait = self._pause
