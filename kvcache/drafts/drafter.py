"""`Drafter`: gives the texts of a pass their draft tokens, each of the first source that has some."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvcache.core.memory import total
from kvcache.drafts.draft_pace import DraftPace
from kvcache.drafts.proposer import NO_DRAFT, Ask, Proposer
from kvcache.drafts.step_costs import StepCosts
from kvcache.drafts.text_drafts import TextDrafts
from kvcache.grammar.matcher import Matcher
from kvcache.support.arguments import short
from kvcache.texts.text import Text, Tokens

__all__ = ["Drafted", "Drafter"]

logger = logging.getLogger("kvcache")

_TRIED = 8  # of so many texts one tries a source that has failed: it may read a whole prompt for that


class Drafted(Protocol):
    """A text that may have draft tokens."""

    @property
    def itself(self) -> Text:
        """The text, all but the last of whose tokens have run."""
        ...

    @property
    def drafts(self) -> TextDrafts | None:
        """Its draft tokens; None: it has none."""
        ...

    def most_drafts(self, most: int) -> int:
        """How many draft tokens may follow it, at most `most`."""
        ...

    @property
    def matcher(self) -> Matcher | None:
        """Its grammar; None: it has none."""
        ...


class Drafter:
    """The sources of draft tokens of an engine.

    A source that fails is given up; texts go on without it.

    Args:
        proposers: the sources, in the order in which they are asked.
        most: draft tokens of a text per pass.
        clock: seconds. What was measured decides how many draft tokens there are, never which tokens come out.

    Attributes:
        most: see above.
        seconds: that the last `give` took in sources whose draft tokens cost something.
    """

    def __init__(self, proposers: Sequence[Proposer], most: int, clock: Callable[[], float]) -> None:
        self._proposers, self.most, self._clock = list(proposers), most, clock
        self._costs, self.seconds = StepCosts(), 0.0
        self._left_out = [0] * len(self._proposers)  # texts that a source does without yet, since it did not pay

    def begin(self) -> TextDrafts | None:
        """The draft tokens of a new text; None: there is no source."""
        if not self._proposers:
            return None
        paces = []
        for i, left_out in enumerate(self._left_out):
            paces.append(DraftPace(0 if left_out else self.most))
            self._left_out[i] = max(0, left_out - 1)
        return TextDrafts(paces)

    def end(self, text: Drafted) -> None:
        """Forget a text."""
        if text.drafts is None:
            return
        for i, (proposer, pace) in enumerate(zip(self._proposers, text.drafts.paces, strict=True)):
            proposer.end(text.drafts)
            if proposer.costs and pace.proposed:
                self._left_out[i] = 0 if pace.pays else _TRIED - 1

    def give(self, texts: Sequence[Drafted], left: int) -> None:
        """Give texts their draft tokens, at most `left` in all: a grammar's, or those of the first source with some."""
        self.seconds, waiting = 0.0, list[tuple[Drafted, TextDrafts]]()
        for text in texts:
            if text.drafts is None:
                continue
            text.drafts.set()
            text.itself.draft = NO_DRAFT
            if (most := text.most_drafts(left)) > 0:
                if text.matcher is not None:
                    text.itself.draft = np.array(text.matcher.forced()[:most], np.uint32)
                left -= len(text.itself.draft)
                waiting.append((text, text.drafts))
        for number, proposer in enumerate(self._proposers):
            waiting = [each for each in waiting if not len(each[0].itself.draft)]
            if left > 0 and waiting:
                left -= self._ask(number, proposer, waiting, left, len(texts))

    def _ask(
        self, number: int, proposer: Proposer, texts: Sequence[tuple[Drafted, TextDrafts]], left: int, beside: int
    ) -> int:
        """Give texts draft tokens of one source; how many."""
        by_text, asked = {}, []
        for text, drafts in texts:
            if (count := drafts.paces[number].wanted(text.most_drafts(left))) > 0:
                by_text[text.itself] = text, drafts
                asked.append(Ask(text.itself, count, drafts))
        if not asked:
            return 0
        if proposer.costs:
            each = max(1, left // len(asked))
            asked = [ask._replace(most=min(ask.most, each)) for ask in asked[:left]]
        try:
            asked = proposer.prepare(asked)
            began = self._clock()
            found = proposer.propose(asked) if asked else []
        except Exception as error:  # of a network, or of memory
            logger.warning("draft: %s has failed, and is not asked again: %s", proposer.name, short(error))
            self._proposers[number] = _Nothing()
            proposer.settle()
            return 0
        seconds = self._clock() - began if proposer.costs else 0.0
        self.seconds += seconds
        given = 0
        for ask, tokens in zip(asked, found, strict=True):
            text, drafts = by_text[ask.text]
            kept = tokens[: left - given]
            if len(kept) and text.matcher is not None:
                kept = kept[: text.matcher.holds(kept.tolist())]
            cost = self._costs.passes(beside, len(kept), seconds / len(asked)) if proposer.costs else 0.0
            if len(kept):
                ask.text.draft = kept
                drafts.set(number, cost)
            elif len(tokens) and proposer.costs:
                drafts.paces[number].learn(len(tokens), 0, cost)
            given += len(kept)
        return given

    def ran(self, rows: int, seconds: float) -> None:
        """Note a pass of decodes and draft tokens alone, and its time without that of `give`."""
        self._costs.observe(rows, seconds)

    def settle(self) -> None:
        """Forget what an exception has left half done."""
        for each in self._proposers:
            each.settle()

    def memory(self) -> dict[str, int]:
        """Bytes of the sources, as `BatchEngine.memory` names them."""
        return total(*[each.memory() for each in self._proposers])

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        for each in self._proposers:
            each.check()


class _Nothing:
    """A source that is given up."""

    name, costs = "nothing", False

    def prepare(self, asked: Sequence[Ask]) -> list[Ask]:
        return []

    def propose(self, asked: Sequence[Ask]) -> list[Tokens]:
        return []

    def end(self, key: object) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    def memory(self) -> dict[str, int]:
        return {}

    def check(self) -> None:
        """Do nothing."""
