"""`TextRows`: a text whose rows are read, that of its last token, the mean of all, or some logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.protocols import Float32
from kvcache.texts.text import Tokens

__all__ = ["LastLogits", "LastRow", "MeanRow", "SharedRow", "TextRows", "common_tokens"]


class TextRows(ABC):
    """A text whose rows are read as they come.

    Args:
        tokens: of the text, at least one.

    Attributes:
        head: whether the rows are logits; else those behind the last norm.
        every: whether the rows of all tokens are read; else that of the last one.
        shares: whether it shares cached blocks with other texts that begin alike.
        parts_at: as of `BatchEngine.submit`.
        result: what was read; None: not all has come.
    """

    head, every, shares = False, False, False

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.parts_at: tuple[int, ...] = ()
        self.result: Float32 | None = None

    @abstractmethod
    def take(self, rows: Float32, start: int) -> None:
        """Read the rows of the tokens from `start` on; those that are read may come again."""


class LastRow(TextRows):
    """The row of the last token, `(hidden_size,)`."""

    def take(self, rows: Float32, start: int) -> None:
        self.result = rows[-1].copy()


class SharedRow(LastRow):
    """The row of the last token of a text that begins as others do."""

    shares = True


class LastLogits(TextRows):
    """The logits of some tokens behind the last one.

    Args:
        tokens: of the text.
        chosen: the ids whose logits are read.
    """

    head, shares = True, True

    def __init__(self, tokens: Tokens, chosen: tuple[int, ...]) -> None:
        super().__init__(tokens)
        self._chosen = list(chosen)

    def take(self, rows: Float32, start: int) -> None:
        self.result = rows[-1][self._chosen]


class MeanRow(TextRows):
    """The mean of the rows of all tokens: they are added one after another in float64, whatever the pieces."""

    every = True

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._sum: tuple[int, NDArray[np.float64] | None] = 0, None  # replaced as one, for an interrupt between lines

    def take(self, rows: Float32, start: int) -> None:
        count, total = self._sum
        with np.errstate(invalid="ignore"):  # infinities of a damaged network, which are an error when all have run
            for row in rows[count - start :]:
                count, total = count + 1, row.astype(np.float64) if total is None else total + row
        self._sum = count, total
        if total is not None and count == len(self.tokens):
            self.result = (total / count).astype(np.float32)


def common_tokens(texts: Sequence[Tokens]) -> int:
    """How many first tokens all texts have in common."""
    if not texts:
        return 0
    most, first = min(map(len, texts)), texts[0]
    for each in texts[1:]:
        differ = each[:most] != first[:most]
        most = int(differ.argmax()) if differ.any() else most
    return most
