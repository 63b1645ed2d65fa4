"""Token ids as they come in: checked, and as one uint32 array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_tokens"]


def as_tokens(tokens: Any, vocab_size: int) -> NDArray[np.uint32]:
    """One-dimensional uint32 ids, each below `vocab_size`. A uint32 array is taken without a copy.

    Raises:
        TypeError: not integers.
        ValueError: not one-dimensional, or an id is outside the vocabulary.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError):
        raise ValueError("tokens: expected one dimension, got rows of unequal length") from None
    if array.ndim != 1:
        raise ValueError(f"tokens: expected one dimension, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.dtype.kind == "O" and all(isinstance(token, int) for token in array):
        pass  # Python ints that fit no machine word: out of the vocabulary, said below
    elif array.dtype.kind not in "iu":
        raise TypeError(f"tokens: expected integers, got {array.dtype}")
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if outside.size:
        first = int(outside[0])
        raise ValueError(
            f"tokens: expected ids from 0 to {vocab_size - 1}, got {array[first]} at index {first}"
        )
    return np.ascontiguousarray(array, np.uint32)
