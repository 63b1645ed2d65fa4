"""`HiddenRows`: the hidden rows of a pass, which MTP layers, behind the last one, read.

Such a layer ("MTP", "nextn") takes for each token its embedding and the hidden row of the token before it, behind the
last norm of the network. Its K and V of a token are thus complete when that token has run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["HiddenRows"]

Float32 = NDArray[np.float32]


class HiddenRows:
    """The hidden rows of the tokens before those of a pass; `forward` adds those of its own tokens.

    Args:
        starts: `(texts,)`, the row of the first token of each text.
        before: `(texts, hidden_size)`, the hidden rows of the tokens before these; zeros where they are not known.

    Attributes:
        rows: `(n, hidden_size)`, of all tokens of the pass, when it has run.
    """

    def __init__(self, starts: NDArray[np.int64], before: Float32) -> None:
        self._starts, self._before = starts, before
        self.rows = before[:0]

    def set(self, rows: Float32) -> Float32:
        """Note the rows of a pass; returns for each token the row of the one before it."""
        self.rows = rows
        shifted = np.empty_like(rows)
        shifted[1:] = rows[:-1]
        shifted[self._starts] = self._before
        return shifted
