"""Counters of the ways that attention takes, and one warning per reason for the dense way."""

from __future__ import annotations

import warnings
from collections import Counter

__all__ = ["Ways"]

_warned: set[str] = set()


class Ways:
    """Counts of attention over the packed blocks, and over dense K and V by reason.

    Attributes:
        packed: attention calls over the blocks.
        dense: dense calls by reason.
    """

    def __init__(self) -> None:
        self.packed = 0
        self.dense: Counter[str] = Counter()

    def went_dense(self, reason: str) -> None:
        """Count a dense call; the first one of each reason in the process is a warning."""
        self.dense[reason] += 1
        if reason not in _warned:
            _warned.add(reason)
            warnings.warn(
                f"kvcache: attention made K and V dense, which is slow and takes memory: {reason}", stacklevel=3
            )
