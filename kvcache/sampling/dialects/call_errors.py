"""The errors of a text that says no call."""

from __future__ import annotations

__all__ = ["CALL_ERRORS", "NoCall"]


class NoCall(Exception):
    """A text that says no call. It leaves no reader: they then return None."""


CALL_ERRORS = (NoCall, ValueError, TypeError, RecursionError, MemoryError, OverflowError)
