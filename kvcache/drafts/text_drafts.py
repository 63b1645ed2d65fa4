"""`TextDrafts`: where the draft tokens of one text come from, and how each source has done."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.drafts.draft_pace import DraftPace

__all__ = ["TextDrafts"]


class TextDrafts:
    """The draft tokens of a text.

    Args:
        paces: how those of each source hold.

    Attributes:
        paces: see above.
        source: the number of the source of those of this pass; -1: a grammar, of which nothing is learnt.
    """

    def __init__(self, paces: Sequence[DraftPace]) -> None:
        self.paces, self.source = tuple(paces), -1

    def learn(self, proposed: int, accepted: int) -> None:
        """Note how many of the draft tokens that ran were drawn."""
        if proposed and self.source >= 0:
            self.paces[self.source].learn(proposed, accepted)
