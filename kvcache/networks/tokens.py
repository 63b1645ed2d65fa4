"""Conversion of token ids, checked against a vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.support.token_ids import as_tokens as as_ids

__all__ = ["as_tokens"]


def as_tokens(tokens: Any, vocab_size: int) -> NDArray[np.uint32]:
    """Convert to one-dimensional uint32 ids, each below `vocab_size`; always a copy, so checked ids cannot change.

    Raises:
        TypeError: not integers.
        ValueError: not one-dimensional, or an id is outside the vocabulary.
    """
    if isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.size == 0:
        return np.empty(0, np.uint32)  # `np.array([])` defaults to float64
    ids = as_ids(tokens)
    ids = ids if ids is not tokens and ids.flags.owndata else ids.copy()
    if len(ids) and int(np.maximum.reduce(ids)) >= vocab_size:
        first = int(np.argmax(ids >= vocab_size))
        raise ValueError(f"tokens: expected ids from 0 to {vocab_size - 1}, got {ids[first]} at index {first}")
    return ids
