"""`PassTimes`: the seconds of a pass by its rows, as measured: what rows for draft tokens take beside the others."""

from __future__ import annotations

import numpy as np

from kvcache.drafts.typical_seconds import TypicalSeconds

__all__ = ["PassTimes"]

_STALE = 128  # passes; in so many a text grows by few tokens beside those that it has
_SHARED = 0.5  # of a change of one count, as a power: longer texts make passes of all counts longer
_SLOPE = 0.25  # of a row's share: between 0, of products bound by memory, and 1, of those bound by operations


class PassTimes:
    """A typical time for each count of rows; a straight line between two that were measured; never less for more."""

    def __init__(self) -> None:
        self._measured: dict[int, TypicalSeconds] = {}
        self._newest: dict[int, int] = {}  # the pass that a count was measured in
        self._passes = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Note a pass."""
        self._passes += 1
        self._newest[rows] = self._passes
        own = self._measured.setdefault(rows, TypicalSeconds())
        before = own.value
        own.observe(seconds)
        if before and own.value and own.count > 2:
            for each in self._measured.values():
                if each is not own:
                    each.value *= (own.value / before) ** _SHARED

    def is_known(self, rows: int) -> bool:
        """Whether passes of so many rows were measured, more than once and lately."""
        found = self._measured.get(rows)
        return found is not None and found.count > 1 and self._passes - self._newest[rows] < _STALE

    def seconds(self, rows: int) -> float:
        """The time of a pass of so many rows, as expected; 0: nothing is known."""
        return self.curve(rows, 1)[0]

    def clipped(self, rows: int, seconds: float) -> float:
        """The seconds of a pass that `observe` has noted, without those of a disturbance."""
        return self._measured[rows].clipped(seconds)

    def curve(self, first: int, count: int) -> list[float]:
        """Seconds of passes of `count` numbers of rows, from `first` on."""
        if not self._measured:
            return [0.0] * count
        known = sorted(self._measured)
        values = np.maximum.accumulate([self._measured[rows].value for rows in known])
        rows, last = np.arange(first, first + count), known[-1]
        slope = _SLOPE * values[-1] / last
        if len(known) > 1:
            slope = max(slope, (values[-1] - values[0]) / (last - known[0]))
        found: list[float] = (np.interp(rows, known, values) + slope * np.maximum(rows - last, 0)).tolist()
        return found
