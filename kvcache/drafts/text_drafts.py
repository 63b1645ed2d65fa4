"""`TextDrafts`: where the draft tokens of one text come from, and how each source has done."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.drafts.draft_pace import DraftPace

__all__ = ["TextDrafts"]


class TextDrafts:
    """The draft tokens of a text.

    Args:
        paces: how many it asks each source for.

    Attributes:
        paces: see above.
    """

    def __init__(self, paces: Sequence[DraftPace]) -> None:
        self.paces = tuple(paces)
        self._source, self._cost = -1, 0.0

    def set(self, source: int = -1, cost: float = 0.0) -> None:
        """Note where the draft tokens of a pass come from.

        Args:
            source: its number; -1: a grammar, of which nothing is learnt.
            cost: see `DraftPace.learn`.
        """
        self._source, self._cost = source, cost

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
