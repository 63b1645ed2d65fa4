"""Checks of numeric arguments, made before anything is changed; errors name the argument."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from kvcache.core.arguments import as_number
from kvcache.engine.files import short

__all__ = ["natural", "number"]


def natural(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int of at least `least`. Raises TypeError or ValueError naming the argument."""
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
    """Return `value` as a finite float in [low, high], or (low, high] with `above`; `expected` describes the range.

    Raises TypeError or ValueError naming the argument.
    """
    found = as_number(value, name)
    if not (math.isfinite(found) and low <= found <= high) or (above and found == low):
        raise ValueError(f"{name}: expected a finite number {expected}, got {short(value)}")
    return found
