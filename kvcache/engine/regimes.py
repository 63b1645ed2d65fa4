"""Texts whose position embedding depends on their length: one that enters another regime runs again from its start.

`Model.regime` says which regime a text of so many tokens has (longrope: whether it exceeds the original context). All K
and V of a text are of one regime, so that its logits are those of a cold run, however it was divided into calls.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.engine.sequence import ModelSequence
from kvcache.errors import InvalidOperationError
from kvcache.networks.protocols import Float32, Logits

__all__ = ["Regimes"]

Tokens = NDArray[np.uint32]


class _Known(NamedTuple):
    """The tokens and the regime of the sequence as it was at `version`."""

    version: int
    tokens: Tokens
    regime: int


class Regimes:
    """Extends a sequence, and runs its text again where its regime changes.

    Args:
        sequence: for a network of one regime it is extended as it is, and its tokens are not remembered.
    """

    def __init__(self, sequence: ModelSequence) -> None:
        self._sequence, self._known = sequence, _Known(-1, np.empty(0, np.uint32), 0)
        self._several = sequence.several_regimes

    def of(self, num_tokens: int) -> int:
        """The regime of a text of `num_tokens`."""
        return self._sequence.regime_of(num_tokens)

    @property
    def current(self) -> int:
        """The regime of the sequence's tokens."""
        return self._known.regime

    def key(self, namespace: Hashable, regime: int) -> Hashable:
        """The namespace of cached prefixes of this regime."""
        return (regime, namespace) if self._several else namespace

    def know(self, tokens: Tokens, regime: int) -> None:
        """Note the tokens of a sequence that was replaced."""
        if self._several:
            self._known = _Known(self._sequence.version, tokens, regime)

    def extend(self, tokens: Tokens, pos: int, logits: Logits = "last", whole: int = 0) -> Float32:
        """As `ModelSequence.extend`.

        Args:
            whole: tokens of the whole text, where more are to follow; they decide the regime.

        Raises:
            InvalidOperationError: the tokens before `pos` are not known, as after `InferenceEngine.begin`.
        """
        if not self._several:
            return self._sequence.extend(tokens, pos, logits)
        regime, known = self.of(max(whole, pos + len(tokens))), self._known
        if pos and known.version != self._sequence.version:
            raise InvalidOperationError(
                f"pos: expected 0, since positions of this network depend on the length of the text, and the tokens "
                f"before {pos} are not known, got {pos}"
            )
        text = np.concatenate([known.tokens[:pos], tokens])
        again = pos > 0 and regime != known.regime
        self._sequence.regime = regime
        rows = self._sequence.extend(text, 0) if again else self._sequence.extend(tokens, pos, logits)
        self.know(text, regime)
        return rows
