"""Rivals that answer requests, timed by the clock of their tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from time import perf_counter

import numpy as np
import numpy.typing as npt

__all__ = ["Streamed"]


class Streamed(ABC):
    """A rival that keeps the texts of requests as prefixes of others."""

    @abstractmethod
    def times(self, tokens: npt.NDArray[np.uint32], new: int) -> Iterator[float]:
        """Run a greedy request and yield the clock at each new token."""

    def first_token(self, tokens: npt.NDArray[np.uint32]) -> float:
        """Seconds from the prompt to the first token."""
        start = perf_counter()
        (end,) = self.times(tokens, 1)
        return end - start

    def step(self, tokens: npt.NDArray[np.uint32], steps: int) -> float:
        """Seconds per token behind this prompt."""
        first, *_, last = self.times(tokens, steps + 1)
        return (last - first) / steps
