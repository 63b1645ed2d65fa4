"""`PassTimes`: the seconds of a pass by its rows, as measured: what rows for draft tokens take with the others."""

from __future__ import annotations

from itertools import pairwise

from kvcache.drafts.typical_seconds import TypicalSeconds

__all__ = ["PassTimes", "hope"]

_STALE = 128  # passes, in which a text grows by few tokens
_HALF = 2048  # passes after which a measurement counts half
_SLOPE = 0.25  # of a row's share: between 0, of products bound by memory, and 1, of those bound by operations
_HOPE = 0.75  # of the time of a count that was not measured twice: so it is, where it may be better than others
_BEYOND = 16  # rows behind those measured


def hope(passes: int) -> float:
    """How much a measurement of `passes` ago counts: time and failures less, until they are measured again."""
    return float(0.5 ** (passes / _HALF))


class PassTimes:
    """A typical time for each count of rows, and about a straight line between those that were measured.

    More rows may take less time: a product runs some rows at once, and one behind them alone.

    Attributes:
        passes: that were measured.
    """

    def __init__(self) -> None:
        self._measured: dict[int, TypicalSeconds] = {}
        self._newest: dict[int, int] = {}  # the pass that a count was measured in
        self.passes = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Note a pass."""
        self.passes += 1
        self._newest[rows] = self.passes
        self._measured.setdefault(rows, TypicalSeconds()).observe(max(0.0, seconds))  # a caller's clock may go back

    def is_known(self, rows: int) -> bool:
        """Whether passes of `rows` rows were measured, more than once and lately."""
        found = self._measured.get(rows)
        return found is not None and found.count > 1 and self.passes - self._newest[rows] < _STALE

    def seconds(self, rows: int) -> float:
        """The time of a pass of `rows` rows, as expected; 0: nothing is known."""
        found = self._measured.get(rows)
        return found.value if found is not None and found.count > 1 else self.curve(rows, 1)[0]

    def clipped(self, rows: int, seconds: float) -> float:
        """The seconds of a pass that `observe` has noted, without those of a disturbance."""
        return self._measured[rows].clipped(seconds)

    def curve(self, first: int, count: int) -> list[float]:
        """Seconds of passes of `count` numbers of rows, from `first` on, as far as they are hoped to be."""
        if not self._measured:
            return [0.0] * count
        known = sorted(
            (rows, each.value * (_HOPE if each.count == 1 else hope(self.passes - self._newest[rows])))
            for rows, each in self._measured.items()
        )
        (start, least), (last, most) = known[0], known[-1]
        line = [least] * (start + 1)
        for (left, low), (right, high) in pairwise(known):
            line += [_HOPE * (low + (high - low) * i / (right - left)) for i in range(1, right - left)]
            line.append(high)
        slope = _SLOPE * most / last
        line += [_HOPE * (most + slope * i) for i in range(1, max(_BEYOND, first + count - last) + 1)]
        return line[first : first + count]
