"""`NGrams`: draft tokens without a second network: what followed the last tokens where they stood before.

Source: Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.drafts.proposer import NO_DRAFT, Ask
from kvcache.texts.text import Tokens

__all__ = ["NGrams"]

_GRAM = 3  # tokens that must agree
_REACH = 8192  # tokens that are searched


class NGrams:
    """Proposes what followed the newest place of a text's last tokens; see `Proposer`."""

    name = "ngram"

    def behind(self, ask: Ask) -> int:
        return 0

    def prepare(self, asked: Sequence[Ask]) -> list[Ask]:
        return list(asked)

    def propose(self, asked: Sequence[Ask]) -> list[Tokens]:
        return [self.follow(ask.text.tokens, ask.most) for ask in asked]

    def follow(self, tokens: Tokens, most: int) -> Tokens:
        """At most `most` tokens that may follow others."""
        if most <= 0 or len(tokens) <= _GRAM:
            return NO_DRAFT
        seen = tokens[-_REACH:]
        ends = seen[_GRAM - 1 : -1] == seen[-1]
        for back in range(1, _GRAM):
            ends &= seen[_GRAM - 1 - back : -1 - back] == seen[-1 - back]
        found = np.flatnonzero(ends)
        if not len(found):
            return NO_DRAFT
        first = int(found[-1]) + _GRAM  # behind the newest place
        return seen[first : first + most].copy()

    def end(self, key: object) -> None:
        """Do nothing: nothing is kept."""

    def settle(self) -> None:
        """Do nothing, likewise."""

    def memory(self) -> dict[str, int]:
        return {}

    def check(self) -> None:
        """Do nothing: there are no invariants."""
