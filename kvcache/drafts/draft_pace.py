"""`DraftPace`: how likely the next draft token holds, by how those before it did."""

from __future__ import annotations

from kvcache.drafts.pass_times import PassTimes, hope

__all__ = ["MOST_DRAFTS", "DraftPace"]

MOST_DRAFTS = 8  # per pass; products of so few rows cost little more than those of one
_TEXT, _SOURCE = 0.95, 0.98  # what each token leaves of those before: about the last 20 of a text, or 50 of all, count
_FIRST, _PRIOR = 0.85, 4.0  # what is expected of a new source, and in how many tokens: it is to show itself at once


class DraftPace:
    """The draft tokens of one source: of one text, or of all.

    Args:
        times: count the passes; what was seen long ago counts less.
        source: of all texts, which this one begins as; None: this is the one of all.

    Attributes:
        proposed, accepted: tokens so far that ran, and those of them that were drawn.
    """

    def __init__(self, times: PassTimes, source: DraftPace | None = None) -> None:
        self.proposed = self.accepted = 0
        self._times, self._newest = times, times.passes
        self._source, self._kept = source, _SOURCE if source is None else _TEXT
        self._held = self._failed = 0.0

    @property
    def likely(self) -> float:
        """The chance that a draft token holds behind those that do."""
        before = _FIRST if self._source is None else self._source.likely
        counts = hope(self._times.passes - self._newest)
        return (counts * self._held + _PRIOR * before) / (counts * (self._held + self._failed) + _PRIOR)

    def learn(self, proposed: int, accepted: int) -> None:
        """Note how many draft tokens of a pass were drawn: behind the first that was not, no other tells anything."""
        self.proposed += proposed
        self.accepted += accepted
        self._note(accepted, int(accepted < proposed))
        if self._source is not None:
            self._source.learn(proposed, accepted)

    def fail(self) -> None:
        """Note a token that did not need to run: it may not follow."""
        self._note(0, 1)
        if self._source is not None:
            self._source.fail()

    def _note(self, held: int, failed: int) -> None:
        kept = self._kept ** (held + failed) * hope(self._times.passes - self._newest)
        self._held, self._failed = kept * self._held + held, kept * self._failed + failed
        self._newest = self._times.passes
