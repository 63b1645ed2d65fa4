"""`DraftPace`: how many draft tokens a text asks a source for: fewer and more seldom where they fail, else more."""

from __future__ import annotations

__all__ = ["MOST_DRAFTS", "DraftPace"]

MOST_DRAFTS = 8  # per pass; products of so few rows cost little more than those of one
_LONGEST_PAUSE = 64  # passes without draft tokens, after some that failed: what a try costs is a small part of them
_WEIGHT = 0.25  # of the newest proposal in the running mean


class DraftPace:
    """The draft tokens of one text from one source.

    Args:
        most: per pass; 0: it asks for none.

    Attributes:
        proposed, accepted: tokens so far.
    """

    def __init__(self, most: int = MOST_DRAFTS) -> None:
        self.proposed = self.accepted = 0
        self._limit, self._most, self._pause, self._wait, self._gain = most, min(2, most), 0, 0, 0.0

    @property
    def pays(self) -> bool:
        """Whether the draft tokens have saved as much time as they took, as far as is known."""
        return self._gain >= 0

    def wanted(self, most: int) -> int:
        """How many tokens to ask for, at most `most`; a pass counts each call."""
        if self._wait:
            self._wait -= 1
            return 0
        return max(0, min(most, self._most))

    def learn(self, proposed: int, accepted: int, cost: float = 0.0) -> None:
        """Note how many draft tokens of a pass stayed.

        Args:
            cost: the time that they took, in that of a pass without them.
        """
        self.proposed += proposed
        self.accepted += accepted
        self._gain += _WEIGHT * (accepted - cost - self._gain)
        if self._gain < 0 or not accepted:
            self._most = max(self._most // 2, 1)
            self._pause = min(2 * self._pause + 2, int(_LONGEST_PAUSE * max(1.0, cost)))
            self._wait = self._pause
        elif accepted == proposed:
            self._most, self._pause = min(2 * self._most, self._limit), 0
        elif 2 * accepted < proposed:
            self._most = max(self._most // 2, 1)
