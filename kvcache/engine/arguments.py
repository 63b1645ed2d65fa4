"""Numbers as they come in: checked by name, before anything is changed."""

from __future__ import annotations

import math
import operator
from typing import Any

__all__ = ["natural", "number"]


def natural(name: str, value: Any, least: int = 0) -> int:
    """A whole number of at least `least`. Raises TypeError or ValueError naming the argument."""
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {value!r}") from None
    if found < least:
        raise ValueError(f"{name}: expected at least {least}, got {value!r}")
    return found


def number(name: str, value: Any, low: float, high: float, expected: str, *, above: bool = False) -> float:
    """A finite number from `low` (or, with `above`, more than that) to `high`; `expected` says so in words."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None
    if not (math.isfinite(found) and low <= found <= high) or (above and found == low):
        raise ValueError(f"{name}: expected a finite number {expected}, got {value!r}")
    return found
