"""`Matcher`: where one text stands in its grammar, and which tokens may follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import GrammarError

__all__ = ["Matcher", "step_error"]

Words = NDArray[np.uint32]


class Matcher:
    """Follows one text. The mask of a place depends on the grammar and the tokens before it alone.

    Where the grammar forces the next bytes, the mask has the one token that the tokenizer writes them with.

    Args:
        start: an `LLMatcher` at its start, which stays there.
        vocab_size: length of the masks.
        end_token: a token whose bit says that the text may end.
        stop_tokens: those that may end it where the grammar lets it end.
        text: its tokens so far.
        first: the matcher that made this one, which is at the start; None: this one is.
        remade: returns another `start`, whose lexer is new; None: that takes too long within a step.

    Attributes:
        is_complete: whether the text is whole and no token but one that ends it may follow.
        is_spent: of the first one, whether the lexer that all of them share has reached a limit, and computes nothing.
    """

    def __init__(
        self, start: Any, vocab_size: int, end_token: int, stop_tokens: Iterable[int] = (), text: Sequence[int] = (),
        first: Matcher | None = None, remade: Callable[[], Any] | None = None,
    ) -> None:
        self._start, self._vocab_size, self._end_token = start, vocab_size, end_token
        self._first, self._remade, self.is_spent = first, remade, False
        self._stops, self._before = frozenset(stop_tokens), tuple(text)
        self._ends = np.array(sorted({*self._stops, end_token}), np.int64)
        self._made: Any = None
        self._after: list[int] = []  # tokens, behind those before
        self._is_alone = False  # whether it has a lexer of its own
        self._ready: deque[tuple[int | None, Words]] = deque()  # masks, and the draft token that each one is behind
        self.is_complete = False

    def fresh(self, stop_tokens: Iterable[int], text: Sequence[int] = ()) -> Matcher:
        """A matcher of another text of the same grammar."""
        first = self._first or self
        return Matcher(self._start, self._vocab_size, self._end_token, stop_tokens, text, first, self._remade)

    def at(self, text: Sequence[int]) -> Matcher:
        """A matcher of the same text, after its tokens `text`."""
        return self.fresh(self._stops, text)

    @property
    def state(self) -> Any:
        """The `LLMatcher` of the text; it is made at first use, so that texts that wait have none."""
        if self._made is None:
            made = self._start.deep_copy()
            if self._before:
                made.consume_tokens(list(self._before))  # an error stays, and the next mask raises it
            self._made = made
        return self._made

    @property
    def num_words(self) -> int:
        """The length of a mask in words of 32 bits."""
        return (self._vocab_size + 31) // 32

    def prepare(self, rows: Words, draft: Sequence[int]) -> None:
        """Take the masks `(1 + len(draft), num_words)` here and behind draft tokens; empty ones are unknown."""
        self._ready.clear()
        for token, row in zip((None, *draft), rows, strict=True):
            if not row.any():
                break
            self._ready.append((token, row))

    def masked(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of logits `(vocab_size,)` with minus infinity for tokens that may not follow.

        Raises:
            GrammarError: beyond the limits of a step.
        """
        words = self._ready[0][1] if self._ready else self._mask()
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=self._vocab_size).view(np.bool_)
        if allowed[self._ends].any():  # some may be text too, and end nothing within the grammar's
            allowed[self._ends] = self.state.is_accepting()
        return np.where(allowed, logits, np.float32(-np.inf))

    def _mask(self) -> Words:
        words = np.zeros(self.num_words, np.uint32)
        self.state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.state.is_error():
            self._begin_again()
            self.state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self.state.is_error():
                raise step_error(str(self.state.get_error()))
        return words

    def _begin_again(self) -> None:
        """Go on with a lexer of its own, once, where the one of all texts is full: others may have filled it.

        Raises:
            GrammarError: otherwise.
        """
        error = str(self.state.get_error())
        is_full = "lexer error" in error and not self._is_alone
        (self._first or self).is_spent |= is_full
        if not is_full or self._remade is None:
            raise step_error(error)
        self._is_alone = True
        self._made = self._remade()
        self._made.consume_tokens([*self._before, *self._after])

    def advance(self, token: int) -> None:
        """Follow the text by a token that may follow; one that ends the text changes nothing.

        Raises:
            GrammarError: it may not follow, or beyond the limits of a step.
        """
        if token in self._stops:
            return
        if not self.state.consume_token(token):
            self._begin_again()
            if not self.state.consume_token(token):
                raise step_error(str(self.state.get_error()))
        self._after.append(token)
        self.is_complete = self.state.is_stopped()
        if self._ready:
            self._ready.popleft()
        if self._ready and self._ready[0][0] != token:
            self._ready.clear()

    def forced(self) -> list[int]:
        """The tokens that must follow, as far as the grammar says it."""
        tokens: list[int] = self.state.compute_ff_tokens()
        return tokens

    def holds(self, draft: Sequence[int]) -> int:
        """How many tokens of `draft` may follow one another."""
        count: int = self.state.validate_tokens(list(draft))
        return count


def step_error(fault: str) -> GrammarError:
    """The error of a grammar at a limit of a step, with the first line of what llguidance says."""
    line = fault.strip().partition("\n")[0]
    return GrammarError(f"grammar: expected the next tokens within the limits of a step, got {line or 'an error'}")
