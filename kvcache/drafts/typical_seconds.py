"""`TypicalSeconds`: a running mean of what takes about as long each time; disturbances count little."""

from __future__ import annotations

__all__ = ["TypicalSeconds"]

_WEIGHT = 0.125  # of the newest measurement, behind as many that count alike
_MOST = 2.0  # times as long as expected: what took longer was disturbed


class TypicalSeconds:
    """A running mean of seconds.

    Attributes:
        value: the mean; 0 before the first measurement.
        count: measurements.
    """

    __slots__ = ("count", "value")  # many are visited behind each pass, which has emptied the caches

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def observe(self, seconds: float) -> None:
        """Note a measurement. The first may be of cold memory: the second stands for both, where it is far less."""
        self.count += 1
        if self.count == 1 or (self.count == 2 and self.value > _MOST * seconds):
            self.value = seconds
        else:
            self.value += max(1 / self.count, _WEIGHT) * (min(seconds, _MOST * self.value) - self.value)

    def clipped(self, seconds: float) -> float:
        """A measurement as far as it counts."""
        return min(seconds, _MOST * self.value)
