"""`TextDrafts`: the draft tokens of one text: those of the pass that runs, and how each source has done."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.drafts.draft_pace import DraftPace
from kvcache.drafts.proposer import NO_DRAFT
from kvcache.texts.text import Tokens

__all__ = ["TextDrafts"]


class TextDrafts:
    """The draft tokens of a text.

    Args:
        paces: how many it asks each source for.

    Attributes:
        paces: see above.
        tokens: those that may follow the text, of the pass that runs.
    """

    def __init__(self, paces: Sequence[DraftPace]) -> None:
        self.paces, self.tokens = tuple(paces), NO_DRAFT
        self._source, self._cost = -1, 0.0

    def set(self, tokens: Tokens, source: int = -1, cost: float = 0.0) -> None:
        """Note the draft tokens of a pass.

        Args:
            source: its number; -1: a grammar, of which nothing is learnt.
            cost: see `DraftPace.learn`.
        """
        self.tokens, self._source, self._cost = tokens, source, cost

    def learn(self, proposed: int, accepted: int) -> None:
        """Note how many of the draft tokens that ran were drawn."""
        if proposed and self._source >= 0:
            self.paces[self._source].learn(proposed, accepted, self._cost)

    @property
    def proposed(self) -> int:
        """Draft tokens so far, without those of grammars."""
        return sum(pace.proposed for pace in self.paces)

    @property
    def accepted(self) -> int:
        """The ones that were drawn."""
        return sum(pace.accepted for pace in self.paces)
