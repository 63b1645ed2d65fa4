"""`Text`: tokens, of which the first ones have their K and V in some groups of layers.

    tokens     prompt prompt prompt prompt new new
    computed   ^^^^^^^^^^^^^^^^^^^^                      K and V of these are in the pool

Prefill, decode, a resumption after a preemption and a prefix hit are one case: `remaining` tokens are to run. The
logits of the last one give the next token.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache.texts.behind import Behind, base_of

if TYPE_CHECKING:
    from kvcache.texts.text_adapter import TextAdapter

__all__ = ["NO_TOKEN", "Text", "Tokens"]

Tokens = NDArray[np.uint32]
NO_TOKEN = 2**32 - 1  # fills a cached block behind the end of a text; no vocabulary has this token
_NO_TOKENS: Tokens = np.empty(0, np.uint32)
_MOST_QUERIES = 4096  # of a text in a pass, parts counted: their memory is that of 4096 rows of queries
Self = TypeVar("Self", bound="Text")


class Text:
    """A text, and how far it is.

    Args:
        tokens: those to run; a copy of the caller's.
        namespace: texts share cached blocks within one namespace.
        prefix: it stands behind this one, whose tokens are not among its own; None: it stands alone.
        adapter: of its tokens; None: they are those of the network itself.

    Attributes:
        base: the position of its token `i` is `base + i`, but for the `places` of its prefix.
        least: it has the regime of a text of this many tokens at least: those of the request that it is for.
        num_tokens, num_prompt: tokens so far, and those that it began with.
        seq_id: its sequence in the caches of all groups; -1: it has none.
        computed: tokens whose K and V the groups have.
        places: what each group knows of this text beside its sequence; see there.
        space: the namespace of its cached blocks; one for each regime, if the network has several.
        regime: of the tokens that ran, see `protocols.Model`.
        keep_at: after how many tokens another text may continue; groups keep what it needs when these have run.
        draft: tokens that may follow, of the pass that runs.
        parts_at: after how many tokens later texts are expected to differ from this one, as far as is known.
        hidden: the position of a token, and the hidden rows of it and of those behind it; None: none are known.
        most_rows: the most tokens of a pass: each has a query for each part that it sees.
        shares_to: how many of its first tokens other texts may have too: those behind an activated adapter are its own.
        is_known: whether `tokens` are those of the sequence; not so where a caller made the sequence.
    """

    shares: bool = True  # whether its first tokens may come from cached blocks, and its blocks be cached
    head: bool = True  # whether its rows are logits; else those behind the last norm

    def __init__(
        self, tokens: Tokens, namespace: Hashable = None, prefix: Behind | None = None,
        adapter: TextAdapter | None = None,
    ) -> None:
        self.prefix, self.adapter, self.base = prefix, adapter, base_of(prefix)
        self._buffer, self.num_tokens = tokens, len(tokens)
        self.namespace, self.space, self.num_prompt = namespace, namespace, len(tokens)
        self.seq_id, self.computed, self.regime, self.least = -1, 0, 0, 0
        self.places: tuple[Any, ...] = ()
        self.keep_at: list[int] = []
        self.parts_at: tuple[int, ...] = ()
        self.draft = _NO_TOKENS
        self.hidden: tuple[int, NDArray[np.float32]] | None = None
        self.is_known, self.shares_to = True, sys.maxsize if adapter is None else adapter.shares_to
        parts = 0 if prefix is None else len(prefix.parts)
        self.most_rows = max(1, _MOST_QUERIES // parts) if parts else sys.maxsize

    @property
    def tokens(self) -> Tokens:
        """All tokens so far, `(num_tokens,)`."""
        return self._buffer[: self.num_tokens]

    @property
    def remaining(self) -> int:
        """Tokens that are to run."""
        return self.num_tokens - self.computed

    @property
    def reach(self) -> int:
        """The number of tokens that decides its regime."""
        return max(self.base + self.num_tokens, self.least)

    def places_of(self, start: int, count: int) -> NDArray[np.int64]:
        """The positions of `count` tokens from token `start` on."""
        positions = np.arange(start, start + count) + self.base
        if self.prefix is not None and start < len(self.prefix.places):
            own = self.prefix.places[start : start + count]
            positions[: len(own)] = own
        return positions

    def next_tokens(self, count: int) -> Tokens:
        """The next `count` tokens to run; behind the last one draft tokens."""
        stop, end = self.computed + count, self.num_tokens
        if stop <= end:
            return self._buffer[self.computed : stop]
        return np.concatenate([self._buffer[self.computed : end], self.draft[: stop - end]])

    def add(self, token: int) -> None:
        """Add one token that is to run."""
        if self.num_tokens == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(len(self._buffer) + 64, np.uint32)])
        self._buffer[self.num_tokens] = token
        self.num_tokens += 1

    def continued(self: Self, tokens: Tokens, pos: int) -> Self:
        """A text with the same places, of which `tokens` are those from `pos` on; `pos` is at most `computed`."""
        other = copy(self)
        if len(tokens) == 1 and pos == self.num_tokens:
            other.add(int(tokens[0]))
        else:
            other._buffer = np.concatenate([self._buffer[:pos], tokens])
            other.num_tokens = pos + len(tokens)
        other.keep_at, other.draft = [], _NO_TOKENS
        return other

    def hidden_before(self) -> NDArray[np.float32] | None:
        """The hidden row of the last token that has run; None: it is not known."""
        if self.hidden is None:
            return None
        first, rows = self.hidden
        at = self.computed - 1 - first
        return rows[at] if 0 <= at < len(rows) else None

    def moved(self, seq_id: int, computed: int, places: tuple[Any, ...]) -> None:
        """Note another sequence, or none, in one step."""
        self.__dict__.update(seq_id=seq_id, computed=computed, places=places)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.computed} of {self.num_tokens} tokens, sequence {self.seq_id})"
