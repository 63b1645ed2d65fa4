"""Kinds of hits: the text that runs before a prompt, and the part of the prompt that is cached then."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcache.certificates.seeded_prompts import Case
from kvcache.certificates.subject import BLOCK, Subject

__all__ = ["HITS", "Hit"]

_TAIL = 5  # tokens of an earlier text behind the part that it shares: the window of that part is still there


class Hit(NamedTuple):
    """A kind of hit.

    Attributes:
        name: of the row.
        exists: whether a network has this kind.
        shared: how many tokens the earlier text shares with the prompt of a case; 0: the prompt is too short.
        tail: how many tokens of its own follow in the earlier text; None: as many as fill a block.
        least: how many cached tokens are a hit of this kind at least; None: all that are shared.
    """

    name: str
    exists: Callable[[Subject], bool]
    shared: Callable[[Subject, Case], int]
    tail: int | None
    least: Callable[[Subject], int] | None

    def earlier(self, subject: Subject, case: Case) -> list[int]:
        """The tokens of the earlier text; empty: the prompt is too short."""
        count = self.shared(subject, case)
        if not count:
            return []
        own = subject.other(
            f"behind {count} tokens of prompt {case.number}", -count % BLOCK if self.tail is None else self.tail
        )
        shared: list[int] = case.tokens[:count].tolist()
        if own and count < len(case.tokens) and own[0] == case.tokens[count]:
            own[0] = (own[0] + 1) % subject.model.config.vocab_size
        return shared + own

    def least_cached(self, subject: Subject, case: Case) -> int:
        """How many tokens of the prompt are cached at least where the hit is of this kind."""
        return self.shared(subject, case) if self.least is None else self.least(subject)


def _half(subject: Subject, case: Case) -> int:
    return len(case.tokens) // 2 // BLOCK * BLOCK


def _all(subject: Subject, case: Case) -> int:
    return len(case.tokens)


def _behind_window(subject: Subject, case: Case) -> int:
    """All but the last tokens of a prompt, where that is more than the shortest window."""
    count = len(case.tokens) - 12
    return count if count > subject.windows[0] + BLOCK else 0


# Blocks are cached once they are full. A text continues behind any cached token; with windows the window must be
# cached too, and with states a state, which is kept behind some tokens alone: of a prompt four tokens before its end.
HITS = (
    Hit("hit of whole blocks", lambda subject: not subject.has_states, _half, _TAIL, None),
    Hit("hit inside of a block", lambda subject: not subject.has_states, lambda *of: _half(*of) + 7, None, None),
    Hit("hit of the whole prompt", lambda subject: not subject.has_states and not subject.windows, _all, None, None),
    Hit("the same prompt again", lambda subject: True, _all, 0, lambda subject: 1),
    Hit("hit behind a window", lambda subject: bool(subject.windows), _behind_window, 1,
        lambda subject: subject.windows[0] + 1),
    Hit("hit of a state", lambda subject: subject.has_states,
        lambda subject, case: len(case.tokens) // BLOCK * BLOCK - 4, None, lambda subject: 1),
)
