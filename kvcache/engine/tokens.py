"""Token ids as they come in: checked against the vocabulary, and as one uint32 array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import _tokens

__all__ = ["as_tokens"]


def as_tokens(tokens: Any, vocab_size: int) -> NDArray[np.uint32]:
    """One-dimensional uint32 ids, each below `vocab_size`. A uint32 array is taken without a copy.

    Raises:
        TypeError: not integers.
        ValueError: not one-dimensional, or an id is outside the vocabulary.
    """
    array = _tokens.as_tokens(tokens)
    if len(array) and array.max() >= vocab_size:
        first = int(np.argmax(array >= vocab_size))
        raise ValueError(f"expected token ids below {vocab_size}, got {array[first]} at position {first}")
    return array
