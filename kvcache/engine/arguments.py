"""Numbers as they come in: checked by name, before anything is changed."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from kvcache.core.arguments import as_number
from kvcache.engine.files import short

__all__ = ["natural", "number"]


def natural(name: str, value: Any, least: int = 0) -> int:
    """A whole number of at least `least`. Raises TypeError or ValueError naming the argument."""
    try:
        if isinstance(value, (bool, np.ndarray, np.timedelta64)):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {short(value)}") from None
    if found < least:
        raise ValueError(f"{name}: expected at least {least}, got {short(value)}")
    return found


def number(name: str, value: Any, low: float, high: float, expected: str, *, above: bool = False) -> float:
    """A finite number from `low` (or, with `above`, more than that) to `high`; `expected` says so in words."""
    found = as_number(value, name)
    if not (math.isfinite(found) and low <= found <= high) or (above and found == low):
        raise ValueError(f"{name}: expected a finite number {expected}, got {short(value)}")
    return found
