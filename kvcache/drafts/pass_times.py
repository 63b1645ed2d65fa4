"""`PassTimes`: the seconds of a pass by its rows, as measured: what rows for draft tokens take beside the others."""

from __future__ import annotations

from itertools import pairwise

from kvcache.drafts.typical_seconds import TypicalSeconds

__all__ = ["PassTimes"]

_STALE = 128  # passes; in so many a text grows by few tokens beside those that it has
_SHARED = 0.5  # of a change of one count, as a power: longer texts make passes of all counts longer
_SLOPE = 0.25  # of a row's share: between 0, of products bound by memory, and 1, of those bound by operations
_HOPE = 0.75  # of the time of a count that was not measured twice: so it is, where it may be better than others
_BEYOND = 16  # rows behind those measured


class PassTimes:
    """A typical time for each count of rows, and about a straight line between those that were measured.

    More rows may take less time: a product runs some rows at once, and one behind them alone.
    """

    def __init__(self) -> None:
        self._measured: dict[int, TypicalSeconds] = {}
        self._newest: dict[int, int] = {}  # the pass that a count was measured in
        self._passes = 0
        self._line: list[float] = []  # by rows; empty: it is not known since the last measurement

    def observe(self, rows: int, seconds: float) -> None:
        """Note a pass."""
        self._passes += 1
        self._line = []
        self._newest[rows] = self._passes
        own = self._measured.setdefault(rows, TypicalSeconds())
        before = own.value
        own.observe(max(0.0, seconds))  # a caller's clock may go back
        if before and own.value and own.count > 2:
            change = (own.value / before) ** _SHARED
            for each in self._measured.values():
                if each is not own:
                    each.value *= change

    def is_known(self, rows: int) -> bool:
        """Whether passes of so many rows were measured, more than once and lately."""
        found = self._measured.get(rows)
        return found is not None and found.count > 1 and self._passes - self._newest[rows] < _STALE

    def seconds(self, rows: int) -> float:
        """The time of a pass of so many rows, as expected; 0: nothing is known."""
        found = self._measured.get(rows)
        return found.value if found is not None and found.count > 1 else self.curve(rows, 1)[0]

    def clipped(self, rows: int, seconds: float) -> float:
        """The seconds of a pass that `observe` has noted, without those of a disturbance."""
        return self._measured[rows].clipped(seconds)

    def curve(self, first: int, count: int) -> list[float]:
        """Seconds of passes of `count` numbers of rows, from `first` on."""
        if not self._measured:
            return [0.0] * count
        if len(self._line) < first + count:
            self._line = self._drawn(first + count)
        return self._line[first : first + count]

    def _drawn(self, stop: int) -> list[float]:
        """The line up to `stop` rows or more."""
        known = sorted(
            (rows, each.value * (_HOPE if each.count == 1 else 1.0)) for rows, each in self._measured.items()
        )
        (first, least), (last, most) = known[0], known[-1]
        line = [least] * (first + 1)
        for (left, low), (right, high) in pairwise(known):
            line += [_HOPE * (low + (high - low) * i / (right - left)) for i in range(1, right - left)]
            line.append(high)
        slope = _SLOPE * most / last
        return line + [_HOPE * (most + slope * i) for i in range(1, max(_BEYOND, stop - last) + 1)]
