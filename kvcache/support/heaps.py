"""The heaps of the C library."""

from __future__ import annotations

import ctypes
from contextlib import suppress

__all__ = ["give_back"]


def give_back() -> None:
    """Return freed memory to the system, in some milliseconds. The C library keeps much of it otherwise."""
    with suppress(AttributeError, OSError, TypeError):  # a C library without this call
        ctypes.CDLL(None).malloc_trim(0)
