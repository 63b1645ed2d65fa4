"""Kinds of hits: which text ran before a prompt, and so which part of the prompt is cached when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcache.certificates.prompts import Case
from kvcache.certificates.subject import BLOCK, Subject

__all__ = ["HITS", "Hit"]

_TAIL = 5  # tokens of an earlier text behind the part that it shares: the window of that part is still there


class Hit(NamedTuple):
    """A kind of hit.

    Attributes:
        name: of the row.
        shared: how many tokens the earlier text shares with the prompt of a case; 0: this kind does not exist for it.
        tail: how many tokens of its own follow in the earlier text.
        exists: whether a network has this kind.
    """

    name: str
    shared: Callable[[Subject, Case], int]
    tail: int
    exists: Callable[[Subject], bool]

    def earlier(self, subject: Subject, case: Case) -> list[int]:
        """The tokens of the earlier text; empty: this kind does not exist for the case."""
        count = self.shared(subject, case)
        if not count:
            return []
        own = subject.other(f"behind {count} tokens of prompt {case.number}", self.tail)
        shared: list[int] = case.tokens[:count].tolist()
        if own and count < len(case.tokens) and own[0] == case.tokens[count]:
            own[0] = (own[0] + 1) % subject.model.config.vocab_size
        return shared + own


def _half(case: Case) -> int:
    return len(case.tokens) // 2 // BLOCK * BLOCK


def _behind_window(subject: Subject, case: Case) -> int:
    """All but the last tokens of a prompt, where that is more than the shortest window."""
    count = len(case.tokens) - 12
    return count if count > subject.windows[0] + BLOCK else 0


def _anywhere(subject: Subject) -> bool:
    """Whether a text may continue behind any token; a state is kept behind some tokens alone."""
    return not subject.has_states


HITS = (
    Hit("hit of whole blocks", lambda subject, case: _half(case), _TAIL, _anywhere),
    Hit("hit inside of a block", lambda subject, case: _half(case) + 7, _TAIL, _anywhere),
    Hit("hit of the whole prompt", lambda subject, case: len(case.tokens), 0, lambda subject: True),
    Hit("hit behind a window", _behind_window, 1, lambda subject: bool(subject.windows)),
    Hit("hit of a state", lambda subject, case: _half(case) + 5, 0, lambda subject: subject.has_states),
)
