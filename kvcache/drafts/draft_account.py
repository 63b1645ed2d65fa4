"""`DraftAccount`: the time that one source of draft tokens has saved and has taken, and what it is asked for.

It is a bucket of seconds, full at first with those of 32 passes. What the source takes flows out, to read texts, to
propose and to have its tokens checked; what the tokens that were drawn have saved flows in, and 2 % of the time of all
passes; what does not fit is gone. A source is asked as long as something is left. So whatever a source proposes, and
however long it takes, any stretch of passes with draft tokens takes at most 2 % and 32 passes longer than without, and
what the last proposal takes beyond. Several sources share both. That is as exact as the time of a pass without draft
tokens is known; one pass in 128 has none, to measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from kvcache.drafts.draft_pace import DraftPace
from kvcache.drafts.pass_times import PassTimes
from kvcache.drafts.typical_seconds import TypicalSeconds

__all__ = ["DraftAccount"]

_LOAN = 32  # passes: enough to draft for a few texts, or to read a short prompt
_ALLOWANCE = 0.02  # of the time of passes: what a source may take that saves nothing
_TRIALS = 0.01  # likewise, for tokens that are not expected to pay
_MARGINS = 1.03, 1.2  # of the rate without draft tokens, with a full bucket and an empty one: less may be an error
_SURE = 0.9  # expected to hold: one more token that holds changes no decision
_TURN = 64  # passes without a trial weigh as much as a token that surely holds
_IDLE = 5  # passes: a decision takes some 50 us
_SOONEST = 1e-12  # seconds of a pass at least, where a clock stands still


class DraftAccount:
    """The time of a source.

    Args:
        times: of passes.
        share: of the bucket and the allowance that all sources of an engine have.

    Attributes:
        pace: how its draft tokens hold.
    """

    def __init__(self, times: PassTimes, share: float) -> None:
        self._times, self._share, self.pace = times, share, DraftPace()
        self._balance: float | None = None  # seconds; None: no pass has been measured
        self._each, self._read = TypicalSeconds(), TypicalSeconds()  # of a draft token, of a token that is read
        self._passes, self._rest = 0, 0.0  # so far, and seconds of passes until the next trial
        self._idle = 0  # passes in which nothing is decided, since there was nothing to be asked for
        self._is_trial = False
        self._tried: DraftPace | None = None  # the text of a trial that has read a part of its tokens
        self._paid, self._counted = 0.0, (0, 0)  # not settled yet: seconds; settled: tokens that ran, and were drawn

    def begin(self) -> DraftPace:
        """The pace of a new text."""
        return DraftPace(self.pace, self._passes)

    def may_ask(self, base: int) -> bool:
        """Whether there is time left to be asked beside `base` rows, whose time is known, and it is not idle."""
        if self._balance is None:
            self._balance = _LOAN * self._share * self._times.seconds(base)
        return self._balance >= 0.0 and not self._idle

    def may_read(self, tokens: int) -> bool:
        """Whether half of the time that is left is enough to read so many tokens, as far as it is known."""
        return tokens * self._read.value <= (self._balance or 0.0) / 2

    # -- how many -------------------------------------------------------------------------------------------

    def plan(self, texts: Sequence[tuple[DraftPace, int]], base: int, left: int) -> list[int]:
        """How many draft tokens each text asks for: those by which most tokens are drawn in a second.

        Args:
            texts: the pace of each, and the most that it may have.
            base: other rows of the pass.
            left: the most in all.
        """
        counts = self._best(texts, base, left if self._each.count else min(left, 2))
        self._is_trial = not any(counts) and (self._tried is not None or self._rest <= 0.0)
        if self._is_trial:
            counts = self._trial(texts)
        for (pace, _), count in zip(texts, counts, strict=True):
            if count:
                pace.asked = self._passes
        return counts

    def _best(self, texts: Sequence[tuple[DraftPace, int]], base: int, left: int) -> list[int]:
        """The tokens that hold most likely, one after another, as many as pay together."""
        chances = [pace.likely for pace, _ in texts]
        heap = [(-chance, 1, i) for i, chance in enumerate(chances) if texts[i][1] > 0]
        heapify(heap)
        seconds, order, best = self._times.curve(base, left + 1), list[int](), 0
        least, drawn, rate = min(seconds), float(base), self._margin(base) * base / max(seconds[0], _SOONEST)
        while heap and len(order) < left:
            chance, depth, i = heappop(heap)
            if drawn - chance * (left - len(order)) < rate * least:
                break  # as many of them would not pay in the shortest pass
            order.append(i)
            drawn -= chance
            taken = seconds[len(order)] + len(order) * self._each.value
            if drawn / max(taken, _SOONEST) > rate:
                rate, best = drawn / max(taken, _SOONEST), len(order)
            if depth < texts[i][1]:
                heappush(heap, (chance * chances[i], depth + 1, i))
        counts = [0] * len(texts)
        for i in order[:best]:
            counts[i] += 1
        return counts

    def _margin(self, base: int) -> float:
        """How much better than without draft tokens is worth it: the best of many estimates is mostly too good."""
        full = _LOAN * self._share * self._times.seconds(base)
        left = min(1.0, (self._balance or 0.0) / full) if full > 0.0 else 1.0
        return _MARGINS[1] + (_MARGINS[0] - _MARGINS[1]) * left

    def _trial(self, texts: Sequence[tuple[DraftPace, int]]) -> list[int]:
        """One token of one text: the one whose prompt is being read, else the likeliest of those that waited long."""
        paces = [pace for pace, most in texts if most > 0]
        if self._tried not in paces:
            self._tried = max(
                paces, key=lambda pace: pace.likely + (self._passes - pace.asked) / _TURN, default=None
            )
        return [int(pace is self._tried) for pace, _ in texts]

    # -- what it took ---------------------------------------------------------------------------------------

    def read(self, tokens: int, seconds: float) -> None:
        """Note that tokens of texts were read."""
        if tokens > 0:
            self._read.observe(seconds / tokens)

    def proposed(self, tokens: int, seconds: float) -> None:
        """Note that so many draft tokens were proposed."""
        if tokens > 0:
            self._each.observe(seconds / tokens)

    def pay(self, seconds: float, *, is_asked: bool, is_reading: bool) -> None:
        """Take all that it took.

        Args:
            seconds: the time to decide, to read and to propose.
            is_asked: whether the source was asked for something.
            is_reading: whether it reads texts, and has proposed nothing yet.
        """
        self._paid += seconds
        self._idle = 0 if is_asked else _IDLE
        if not is_reading:
            self._tried = None

    def open(self) -> None:
        """Begin a pass: what an exception has ended is not settled."""
        self._counted = self.pace.proposed, self.pace.accepted

    @property
    def num_rows(self) -> int:
        """Draft tokens that ran in this pass."""
        return self.pace.proposed - self._counted[0]

    def settle(self, plain: float, base: int, seconds: float) -> None:
        """Note that the pass has run.

        Args:
            plain: its seconds without draft tokens of sources.
            base: its rows without them.
            seconds: what those of this source took.
        """
        rows, drawn = self.num_rows, self.pace.accepted - self._counted[1]
        self.open()
        self._passes += 1
        self._idle = max(0, self._idle - 1)
        self._rest = max(0.0, self._rest - plain)
        if self._is_trial:
            teaches = rows and drawn == rows and self.pace.likely < _SURE
            self._rest = 0.0 if teaches else self._rest + (self._paid + seconds) / _TRIALS
        if self._balance is not None:
            change = drawn * plain / base + _ALLOWANCE * self._share * plain - self._paid - seconds
            full = _LOAN * self._share * plain
            self._balance = min(self._balance + change, max(full, self._balance))
        self._paid, self._is_trial = 0.0, False
