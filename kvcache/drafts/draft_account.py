"""`DraftAccount`: which draft tokens of one source are worth their time, and the time that the source may lose.

A pass has the draft tokens by which most tokens are drawn in a second, by what was measured: how those of each text
held, how long passes of more rows take, and how long the source takes. What was measured long ago is hoped to be better
now, and so a source that does not pay is tried again, seldom.

A bucket bounds what a source loses. Its unit is the time of a pass without draft tokens, and it begins full, with 32.
All that the source takes flows out; what its tokens save flows in, and 2 % of the time of all passes. With an empty
bucket nothing is asked for. So in any stretch of passes, draft tokens take at most 2 % and 32 passes longer than none,
and what the last proposal takes beyond. Several sources share both. One pass in 128 has no draft tokens, to measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from kvcache.drafts.draft_pace import DraftPace
from kvcache.drafts.pass_times import PassTimes, hope
from kvcache.drafts.typical_seconds import TypicalSeconds

__all__ = ["DraftAccount"]

_FULL = 32.0  # passes: enough to draft for a few texts, or to read a short prompt
_ALLOWANCE = 0.02  # of the time of passes: what a source may lose
_MARGIN = 1.05  # of the rate without draft tokens: the best of many estimates is mostly too good
_REST = 4  # passes without a decision, when nothing is worth it: one takes some 20 us
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
        self._times, self._share, self.pace = times, share, DraftPace(times)
        self._bucket = _FULL * share
        self._each, self._read = TypicalSeconds(), TypicalSeconds()  # of a draft token, of a token that is read
        self._newest = 0  # the pass that was planned with draft tokens last
        self._next = 0  # the pass that is planned next
        self._spent = 0.0  # seconds of this pass
        self._settled = 0, 0  # draft tokens of earlier passes that ran, and that were drawn

    def begin(self) -> DraftPace:
        """The pace of a new text."""
        return DraftPace(self._times, self.pace)

    @property
    def may_ask(self) -> bool:
        """Whether the bucket has something left, and the source does not rest."""
        return self._bucket >= 0.0 and self._times.passes >= self._next

    def may_read(self, tokens: int, base: int) -> bool:
        """Whether half of the bucket, in passes of `base` rows, is enough to read `tokens`, as far as is known."""
        return tokens * self._read.value <= self._bucket / 2 * self._times.seconds(base)

    def plan(self, texts: Sequence[tuple[DraftPace, int]], base: int, left: int) -> list[int]:
        """How many draft tokens each text asks for: the likeliest of all, as many as pay together.

        Args:
            texts: the pace of each, and the most that it may have.
            base: other rows of the pass.
            left: the most in all.
        """
        passes = self._times.passes
        chances = [pace.likely for pace, _ in texts]
        heap = [(-chance, 1, i) for i, chance in enumerate(chances) if texts[i][1] > 0]
        heapify(heap)
        each = self._each.value * hope(passes - self._newest)
        left = left if self._each.count else min(left, 2)
        seconds, order, best = self._times.curve(base, left + 1), list[int](), 0
        drawn, rate = float(base), _MARGIN * base / max(seconds[0], _SOONEST)
        while heap and len(order) < left:
            chance, depth, i = heappop(heap)
            order.append(i)
            drawn -= chance
            found = drawn / max(seconds[len(order)] + len(order) * each, _SOONEST)
            if found > rate:
                rate, best = found, len(order)
            if depth < texts[i][1]:
                heappush(heap, (chance * chances[i], depth + 1, i))
        if best:
            self._newest = passes
        else:
            self._next = passes + _REST
        return [order[:best].count(i) for i in range(len(texts))]

    def read(self, tokens: int, seconds: float) -> None:
        """Note that tokens of texts were read."""
        if tokens > 0:
            self._read.observe(seconds / tokens)

    def proposed(self, tokens: int, seconds: float) -> None:
        """Note that draft tokens were proposed."""
        if tokens > 0:
            self._each.observe(seconds / tokens)

    def pay(self, seconds: float) -> None:
        """Note the time that was needed to decide, to read and to propose."""
        self._spent += seconds

    def open(self) -> None:
        """Begin a pass: one that an exception has ended is not settled."""
        self._settled, self._spent = (self.pace.proposed, self.pace.accepted), 0.0

    @property
    def num_rows(self) -> int:
        """Draft tokens that ran in this pass."""
        return self.pace.proposed - self._settled[0]

    def settle(self, plain: float, base: int, seconds: float) -> None:
        """Note that the pass has run.

        Args:
            plain: its seconds without draft tokens of sources.
            base: its rows without them.
            seconds: what those of this source took.
        """
        saved = (self.pace.accepted - self._settled[1]) / base + _ALLOWANCE * self._share
        self._bucket += saved - (self._spent + seconds) / max(plain, _SOONEST)
        self._bucket = min(self._bucket, _FULL * self._share)
        self.open()
