"""`Space`: memory for values, of which a part is kept for the next ones.

New memory costs more than all else that is done with a value: the system clears it, and under a hypervisor finds it
first. A piece has several values, since NumPy asks for pages of 2 MB from 4 MB on, 20 times as fast as small ones.

Slices of a piece are arrays, and each is handed out as a memoryview of its own. Slices of one memoryview would share a
count of views, which Python without the GIL (3.14) does not change atomically: a piece could be used again while a
thread reads a value in it.
"""

from __future__ import annotations

import os
from collections import deque
from threading import RLock
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

__all__ = ["SPACE", "Space"]

_PIECE = 8 << 20  # bytes
_KEPT = 8  # pieces


class _Piece(np.ndarray[Any, np.dtype[np.uint8]]):
    """An array that its slices keep alive: it is their base, not the owner of its memory, which is of another type."""


class Space:
    """Slices of pieces of memory, for several threads. A piece is used again when none of its slices is in use."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Give back what is kept; for a process that was forked, also from a thread that has the lock."""
        self._left: npt.NDArray[np.uint8] = _Piece(0, np.uint8)
        self._lock = RLock()
        self._kept: deque[npt.NDArray[np.uint8]] = deque(maxlen=_KEPT)  # a further one is given back

    def __call__(self, size: int) -> memoryview:
        """So many writable bytes, unset."""
        with self._lock:
            if len(self._left) < size:
                self._left = _Piece(0, np.uint8)  # the piece may be free now
                self._left = self._piece(size)
            taken, self._left = self._left[:size], self._left[size:]
            return taken.data

    def _piece(self, size: int) -> _Piece:
        if size > _PIECE:
            return np.empty(size, np.uint8).view(_Piece)
        memory = self._kept.pop() if self._kept else np.empty(_PIECE, np.uint8)
        piece = memory.view(_Piece)  # lives as long as its slices
        finalize(piece, self._kept.append, memory).atexit = False
        return piece


SPACE = Space()  # of the process
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=SPACE.clear)
