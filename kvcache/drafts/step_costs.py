"""`StepCosts`: the seconds of a pass by its rows, as measured, and what draft tokens cost beside that."""

from __future__ import annotations

import numpy as np

__all__ = ["StepCosts"]

_KEPT = 0.97  # of what was measured, in each further pass: about the last 30 count


class StepCosts:
    """Fits `seconds = first + rows * each` to the passes that were measured, the newest of which count most."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, rows, rows**2, seconds, rows * seconds

    def observe(self, rows: int, seconds: float) -> None:
        """Note a pass."""
        self._sums *= _KEPT
        self._sums += (1, rows, rows * rows, seconds, rows * seconds)

    def _line(self) -> tuple[float, float]:
        """Seconds of a pass without rows, and of each row; rows cost nothing where all passes had as many."""
        count, rows, squares, seconds, products = self._sums.tolist()
        if not count:
            return 0.0, 0.0
        spread = squares - rows * rows / count
        each = max(0.0, (products - rows * seconds / count) / spread) if spread > 0.1 else 0.0
        return max(0.0, (seconds - each * rows) / count), each

    def passes(self, texts: int, drafts: int, seconds: float) -> float:
        """The cost of draft tokens of one of so many texts, in its share of a pass without them; 0: nothing is known.

        Args:
            drafts: how many rows more they are.
            seconds: the text's share of the time that it took to propose them.
        """
        first, each = self._line()
        share = first / texts + each
        return (drafts * each + seconds) / share if share > 0 else 0.0
