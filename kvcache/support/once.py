"""Values that are made at their first use."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

__all__ = ["Once"]

T = TypeVar("T")


class Once(Generic[T]):
    """A value that the first call makes; calls of other threads wait for it.

    An error leaves it unmade, and the next call tries again.

    Args:
        make: makes the value. It is dropped afterwards, with what only it holds.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._lock = Lock()
        self._made: T

    def __call__(self) -> T:
        with self._lock:
            if self._make is not None:
                self._made = self._make()
                self._make = None
            return self._made
