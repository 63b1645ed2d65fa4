"""`NGrams`: draft tokens without a second network: what followed the last tokens where they stood before.

Source: Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.drafts.proposer import NO_DRAFT, Ask, Proposer
from kvcache.texts.text import Text, Tokens

__all__ = ["NGrams"]

_GRAM = 3  # tokens that must agree
_REACH = 8192  # tokens that are searched


class NGrams(Proposer):
    """Proposes what followed the newest place of a text's last tokens; see `Proposer`."""

    name = "ngram"

    def knows(self, text: Text) -> bool:
        return _place(text.tokens) > 0

    def propose(self, asked: Sequence[Ask]) -> list[Tokens]:
        return [self.follow(ask.text.tokens, ask.most) for ask in asked]

    def follow(self, tokens: Tokens, most: int) -> Tokens:
        """At most `most` tokens that may follow others."""
        place = _place(tokens)
        return tokens[place : place + most].copy() if most > 0 and place > 0 else NO_DRAFT


def _place(tokens: Tokens) -> int:
    """Where the newest place of the last tokens before the end ends; 0: there is none.

    A search in bytes takes a microsecond for a text of a thousand tokens, less than one operation over arrays.
    """
    first = max(0, len(tokens) - _REACH)
    seen, size = tokens[first:].tobytes(), tokens.itemsize
    last = seen[-_GRAM * size :]
    at = seen.rfind(last, 0, -size) if len(tokens) > _GRAM else -1
    while at % size and at > 0:  # it lies across tokens
        at = seen.rfind(last, 0, at + len(last) - 1)
    return 0 if at < 0 else first + at // size + _GRAM
