"""`Shares`: how many tokens of each prompt run in a step.

The first prompt in the order of keys, and the others by the time that they still need, the shortest first. If one of
these needs less than the first, they run before it and have half of the step, the first one the rest; a first one that
needs little, and at most twice as much as that one, goes before. So the first one needs at most twice the time that it
needs alone, whatever comes behind it, and each prompt becomes the first one.

A prompt that ends in a step has its first token when the step ends, so little runs beside it: other prompts that end,
up to 64 rows together, then one that does not, for as long as these at most. So does a first one that is long. Where
that is less than 16 tokens it waits, and what it has given up is added to its next piece.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.serving.budget import ENOUGH_ROWS, LEAST, MOST, TokenBudget
from kvcache.serving.work import Work

__all__ = ["Shares"]


class Shares:
    """The pieces of prompts of one step.

    Args:
        budget: says how long the step may last, and how long pieces take.
        num_decodes: texts that are being written in the step.
        num_drafts: their draft tokens, which take from the time of prompts.
        most_prompts: prompts of which the step may run a piece.
        most_rows: the most rows of logits of works that need one for each token.

    Attributes:
        pieces: `(work, number of its next tokens)`.
    """

    def __init__(
        self, budget: TokenBudget, num_decodes: int, num_drafts: int, most_prompts: int, most_rows: int
    ) -> None:
        self._budget, self._prompts, self._rows = budget, most_prompts, most_rows
        self._seconds = budget.seconds(num_decodes) - budget.cost(num_drafts)
        self._most = self._tokens = MOST - num_drafts
        self._least = max(1, budget.least(num_decodes) - num_drafts)
        self._ran, self._spent, self._ends, self._few = 0, 0.0, False, budget.cost(ENOUGH_ROWS)
        self.pieces: list[tuple[Work, int]] = []

    def divide(self, prompts: Sequence[Work]) -> None:
        """Give prompts, which are in the order of keys, their pieces."""
        first, *others = prompts
        need = {id(work): self._budget.cost(work.remaining, work.computed) for work in prompts}
        others.sort(key=lambda work: need[id(work)])
        shortest = need[id(others[0])] if others else need[id(first)]
        if need[id(first)] <= max(shortest, min(2 * shortest, self._few)):
            self._fill([first, *others])
            return
        room, seconds, least = self._tokens, self._seconds, self._least
        self._tokens, self._seconds, self._least = room - room // 2, seconds / 2, least - least // 2
        # The place of the first one, and its rows: half of them, or those of a piece that is not to be divided.
        own = min(self._rows, first.logits_due(first.fixed_piece if first.chunk else -(-self._rows // 2)))
        self._prompts, self._rows = self._prompts - 1, self._rows - own
        self._fill(others)
        self._prompts, self._rows = self._prompts + 1, self._rows + own
        self._tokens, spent = room - self._ran, self._spent
        left = max(seconds - spent, spent)  # others may have run some tokens more than their half
        first.owed += spent
        enough = first.fixed_piece if first.chunk else LEAST
        if not self._ends:
            self._give(first, left, least - self._ran)
        elif self._budget.tokens(first.owed, first.computed) >= enough:
            self._give(first, min(first.owed, left), enough)
        first.owed = max(0.0, first.owed - (self._spent - spent))

    def _fill(self, works: Sequence[Work]) -> None:
        """Give works their pieces, one after another. Behind one that ends, one that does not is the last."""
        for work in works:
            is_last = self._ends and self._budget.cost(work.remaining, work.computed) > self._seconds
            self._give(work, min(self._seconds, self._spent) if is_last else self._seconds, self._least)
            if is_last or self._tokens <= 0:
                return

    def _give(self, work: Work, seconds: float, least: int) -> None:
        """Give a prompt the tokens that run in `seconds`, or `least`; none leaves little for a next step."""
        count = min(max(least, self._budget.tokens(seconds, work.computed)), self._tokens)
        if count > 0 and work.remaining < count + LEAST:
            count = min(work.remaining, self._most - self._ran)
        count = fitting(work, count, self._rows) if self._prompts else 0
        if not count:
            return
        self.pieces.append((work, count))
        cost = self._budget.cost(count, work.computed)
        self._ran, self._spent = self._ran + count, self._spent + cost
        self._prompts, self._rows = self._prompts - 1, self._rows - work.logits_due(count)
        self._tokens, self._seconds, self._least = self._tokens - count, self._seconds - cost, self._least - count
        if work.shares and count >= work.remaining:
            self._ends = True
            self._tokens = min(self._tokens, ENOUGH_ROWS - self._ran)
            self._seconds, self._least = min(self._seconds, self._few - self._spent), 0


def fitting(work: Work, most: int, rows: int) -> int:
    """The number of tokens, at most `most`, that a work runs in a step with `rows` rows of logits."""
    if most <= 0:
        return 0
    if work.chunk:
        return work.fixed_piece if work.logits_due(work.fixed_piece) <= rows else 0
    count = min(work.remaining, most, work.most_rows)
    free = work.shares or not work.logits_due(1)
    return count if free else max(0, min(count, rows))  # other works took more rows than there are
