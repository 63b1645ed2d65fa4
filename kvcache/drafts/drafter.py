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
    """The sources of draft tokens of an engine. What each may take beside what it saves, `DraftAccount` promises.

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
            if number in self._proposers and left > 0 and waiting and account.may_ask(rows):
                given = self._ask(number, waiting, left, rows)
                left, rows = left - given, rows + given

    def _ask(self, number: int, texts: Sequence[tuple[Drafted, TextDrafts]], left: int, rows: int) -> int:
        """Give texts draft tokens of one source, beside so many rows; how many."""
        account, began, given, is_reading = self._accounts[number], self._clock(), 0, False
        proposer, most = self._proposers[number], min(left, self.most)
        try:
            texts = [each for each in texts if proposer.knows(each[0].itself)]
        except Exception as error:  # of memory
            return self._give_up(number, error)
        paces = [(drafts.paces[number], text.most_drafts(most)) for text, drafts in texts]
        counts = account.plan(paces, rows, left) if texts else []
        by_key: dict[object, tuple[Drafted, TextDrafts]] = {drafts: (text, drafts) for text, drafts in texts}
        asked = [Ask(text.itself, count, drafts) for (text, drafts), count in zip(texts, counts, strict=True) if count]
        ready, found = list[Ask](), list[Tokens]()
        try:
            asked = [ask for ask in asked if account.may_read(proposer.behind(ask))]
            if asked:
                ready, is_reading = self._prepare(proposer, account, asked)
            if ready:
                found = self._propose(proposer, account, ready)
        except Exception as error:  # of a network, or of memory
            return self._give_up(number, error)
        for ask, tokens in zip(ready, found, strict=True):
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
        account.pay(seconds, is_asked=bool(asked) or not texts, is_reading=is_reading)
        self.seconds += seconds
        return given

    def _give_up(self, number: int, error: Exception) -> int:
        """Ask a source no more: it has given no draft tokens."""
        proposer = self._proposers.pop(number)
        logger.warning("draft: %s has failed, and is not asked again: %s", proposer.name, short(error))
        proposer.settle()
        return 0

    def _prepare(self, proposer: Proposer, account: DraftAccount, asked: Sequence[Ask]) -> tuple[list[Ask], bool]:
        """Let a source read; the texts that it may propose for, and whether there are none since it still reads."""
        began = self._clock()
        before = sum(map(proposer.behind, asked))
        ready = proposer.prepare(asked)
        read = before - sum(map(proposer.behind, asked)) if before else 0
        account.read(read, self._clock() - began)
        return ready, read > 0 and not ready

    def _propose(self, proposer: Proposer, account: DraftAccount, asked: Sequence[Ask]) -> list[Tokens]:
        began = self._clock()
        found = proposer.propose(asked)
        account.proposed(sum(map(len, found)), self._clock() - began)
        return found

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
