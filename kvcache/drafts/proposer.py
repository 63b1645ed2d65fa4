"""`Proposer`: a source of draft tokens, the tokens that may follow a text.

The network checks all draft tokens of a text in one pass. Each place of the text draws its own token, with its own
random number, and a draft token stays if it is the token that was drawn: the text is the one without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcache.texts.text import Text, Tokens

__all__ = ["NO_DRAFT", "Ask", "Proposer"]

NO_DRAFT: Tokens = np.empty(0, np.uint32)


class Ask(NamedTuple):
    """A text that asks for draft tokens.

    Attributes:
        text: all its tokens but the last one have run.
        most: draft tokens, at least one.
        key: an object that the text has from its first tokens to its end; it may be another `Text` each time.
    """

    text: Text
    most: int
    key: object


class Proposer:
    """A source of draft tokens for many texts at once. What it proposes never changes a text.

    The methods are those of a source that keeps nothing; each overrides what it has more of.

    Attributes:
        name: what messages call it.
    """

    name: str

    def knows(self, text: Text) -> bool:
        """Whether the source may propose something for a text: asked in each pass, before anything is decided."""
        return True

    def behind(self, ask: Ask) -> int:
        """How many tokens of a text, about, `prepare` is to read before `propose` may be called."""
        return 0

    def prepare(self, asked: Sequence[Ask]) -> list[Ask]:
        """Read a part of texts of which many tokens are new; return those that `propose` may be called with now."""
        return list(asked)

    def propose(self, asked: Sequence[Ask]) -> list[Tokens]:
        """Draft tokens of each text, at most `Ask.most`; none if the source knows none."""
        raise NotImplementedError

    def end(self, key: object) -> None:
        """Forget the text with this key; its tokens may stay cached."""

    def settle(self) -> None:
        """Forget what an exception has left half done; may run at any time."""

    def memory(self) -> dict[str, int]:
        """Bytes of its own, as `BatchEngine.memory` names them."""
        return {}

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
