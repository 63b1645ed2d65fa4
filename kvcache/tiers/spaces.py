"""`Space`: memory for values, taken from the system in pieces of several values."""

from __future__ import annotations

from threading import RLock

import numpy as np

__all__ = ["Space"]

_PIECE = 8 << 20  # bytes: NumPy asks for pages of 2 MB from 4 MB on, which the system gives 20 times as fast


class Space:
    """Slices of pieces of new memory, for several threads. A piece is given back when none of its slices is in use."""

    def __init__(self) -> None:
        self._left, self._lock = memoryview(b""), RLock()

    def __call__(self, size: int) -> memoryview:
        """So many writable bytes, unset."""
        with self._lock:
            if len(self._left) < size:
                self._left = np.empty(max(size, _PIECE), np.uint8).data
            taken, self._left = self._left[:size], self._left[size:]
            return taken
