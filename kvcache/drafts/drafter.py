"""`Drafter`: gives the texts of a pass their draft tokens, each of the first source that has some."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvcache.core.memory import total
from kvcache.drafts.draft_account import DraftAccount
from kvcache.drafts.pass_times import PassTimes
from kvcache.drafts.proposer import NO_DRAFT, Ask, Proposer
from kvcache.drafts.text_drafts import TextDrafts
from kvcache.grammar.matcher import Matcher
from kvcache.support.arguments import short
from kvcache.texts.text import Text, Tokens

__all__ = ["Drafted", "Drafter"]

logger = logging.getLogger("kvcache")


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
    """The sources of draft tokens of an engine. `DraftAccount` bounds the time that each may lose.

    A source that fails is given up; texts go on without it.

    Args:
        proposers: the sources, in the order in which they are asked.
        most: draft tokens of a text per pass.
        clock: seconds. What was measured decides how many draft tokens there are, never which tokens come out.

    Attributes:
        most: see above.
        seconds: that the last `give` took in sources.
    """

    def __init__(self, proposers: Sequence[Proposer], most: int, clock: Callable[[], float]) -> None:
        self._proposers, self.most, self._clock = dict(enumerate(proposers)), most, clock
        self._times, self.seconds = PassTimes(), 0.0
        self._accounts = [DraftAccount(self._times, 1 / len(proposers)) for _ in proposers]

    def begin(self) -> TextDrafts | None:
        """The draft tokens of a new text; None: there is no source."""
        return TextDrafts([account.begin() for account in self._accounts]) if self._accounts else None

    def end(self, text: Drafted) -> None:
        """Forget a text."""
        if text.drafts is not None:
            for proposer in self._proposers.values():
                proposer.end(text.drafts)

    def give(self, texts: Sequence[Drafted], left: int) -> None:
        """Give texts their draft tokens, at most `left` in all: a grammar's, or those of the first source with some."""
        self.seconds, rows, waiting = 0.0, len(texts), list[tuple[Drafted, TextDrafts]]()
        for account in self._accounts:
            account.open()
        for text in texts:
            if text.drafts is None:
                continue
            text.drafts.source = -1
            text.itself.draft = NO_DRAFT
            if (most := text.most_drafts(left)) > 0:
                if text.matcher is not None:
                    text.itself.draft = np.array(text.matcher.forced()[:most], np.uint32)
                left -= len(text.itself.draft)
                rows += len(text.itself.draft)
                waiting.append((text, text.drafts))
        if not any(map(self._times.is_known, range(len(texts), rows + 1))):
            return  # this pass measures it, or others do whose grammars force nothing
        for number, account in enumerate(self._accounts):
            waiting = [each for each in waiting if not len(each[0].itself.draft)]
            if number in self._proposers and left > 0 and waiting and account.may_ask:
                given = self._ask(number, waiting, left, rows)
                left, rows = left - given, rows + given

    def _ask(self, number: int, texts: Sequence[tuple[Drafted, TextDrafts]], left: int, rows: int) -> int:
        """Give texts draft tokens of one source, in a pass of `rows` others; how many."""
        account, proposer, began = self._accounts[number], self._proposers[number], self._clock()
        try:
            texts = [each for each in texts if proposer.knows(each[0].itself)]
            found = self._proposed(number, texts, left, rows) if texts else []
        except Exception as error:  # of a network, or of memory
            del self._proposers[number]  # it has given no draft tokens
            logger.warning("draft: %s has failed, and is not asked again: %s", proposer.name, short(error))
            proposer.settle()
            return 0
        by_key: dict[object, tuple[Drafted, TextDrafts]] = {drafts: (text, drafts) for text, drafts in texts}
        given = 0
        for ask, tokens in found:
            text, drafts = by_key[ask.key]
            kept = tokens[: left - given]
            if len(kept) and text.matcher is not None:
                holds = text.matcher.holds(kept.tolist())
                if holds < len(kept):
                    drafts.paces[number].fail()
                kept = kept[:holds]
            if len(kept):
                ask.text.draft, drafts.source = kept, number
            given += len(kept)
        seconds = self._clock() - began
        account.pay(seconds)
        self.seconds += seconds
        return given

    def _proposed(
        self, number: int, texts: Sequence[tuple[Drafted, TextDrafts]], left: int, rows: int
    ) -> list[tuple[Ask, Tokens]]:
        """Draft tokens of a source for the texts that are worth it, and of which it has read enough."""
        account, proposer, most = self._accounts[number], self._proposers[number], min(left, self.most)
        counts = account.plan([(drafts.paces[number], text.most_drafts(most)) for text, drafts in texts], rows, left)
        asked = [Ask(text.itself, count, drafts) for (text, drafts), count in zip(texts, counts, strict=True) if count]
        asked = [ask for ask in asked if account.may_read(proposer.behind(ask), rows)]
        if not asked:
            return []
        began, behind = self._clock(), sum(map(proposer.behind, asked))
        ready = proposer.prepare(asked)
        if behind:
            account.read(behind - sum(map(proposer.behind, asked)), self._clock() - began)
            began = self._clock()
        found = proposer.propose(ready) if ready else []
        account.proposed(sum(map(len, found)), self._clock() - began)
        return list(zip(ready, found, strict=True))

    def ran(self, rows: int, seconds: float | None) -> None:
        """Note a pass with `rows` of decodes and draft tokens.

        Args:
            seconds: its time without that of `give`; None: prompts ran beside them.
        """
        if not self._accounts:
            return
        drafted = sum(account.num_rows for account in self._accounts)
        base = max(1, rows - drafted)
        if seconds is not None:
            self._times.observe(rows, seconds)
        taken = self._times.seconds(rows) if seconds is None else self._times.clipped(rows, seconds)
        plain = self._times.seconds(base)
        for account in self._accounts:
            account.settle(plain, base, (taken - plain) * account.num_rows / max(1, drafted))

    def settle(self) -> None:
        """Forget what an exception has left half done."""
        for each in self._proposers.values():
            each.settle()

    def memory(self) -> dict[str, int]:
        """Bytes of the sources, as `BatchEngine.memory` names them."""
        return total(*[each.memory() for each in list(self._proposers.values())])

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        for each in self._proposers.values():
            each.check()
