"""`median_interval`: the median of measurements, and between which two of them that of endlessly many lies."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

__all__ = ["MedianInterval", "median_interval"]

_ERROR = 0.05  # how often the interval may miss


class MedianInterval(NamedTuple):
    """A median within its interval; `is_sure`: there are enough measurements for 95 %."""

    low: float
    middle: float
    high: float
    is_sure: bool

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} .. {self.high:.3f}{'' if self.is_sure else '; too few'})"


def median_interval(values: Sequence[float]) -> MedianInterval:
    """The 95 % interval of the sign test, for measurements of any distribution: six at least.

    Each lies below the true median with chance 1/2, so fewer than k of n do with the chance of fewer than k heads. The
    interval begins with the k-th smallest and ends with the k-th largest, for the largest k that misses in at most 5 %.

    Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
    """
    ordered, n = sorted(values), len(values)
    k, missed = 0, 2.0 * 0.5**n
    while missed <= _ERROR:
        k += 1
        missed += 2.0 * comb(n, k) * 0.5**n
    outer = max(1, k) - 1
    return MedianInterval(ordered[outer], median(ordered), ordered[n - 1 - outer], k > 0)
