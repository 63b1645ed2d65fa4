"""`SeenTexts`: the cached texts that works see parts of, which run as works of their own before these.

    a work with parts    begins: it has a sequence, holds the parts that are cached, and lacks the others
    for each of those    a `SeenText` runs, shares blocks and waits as any prompt does, and gives its part at its end
    the work             runs when it lacks none

A work that gives up its sequence gives up its parts too. What runs for it goes on, and stays cached as other texts do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count

from kvcache.engine.documents import Placed, SegmentUse
from kvcache.networks.protocols import Float32
from kvcache.serving.request import Pending, Stepping
from kvcache.serving.work import FinishReason, Work
from kvcache.texts.behind import Part, name_of_space
from kvcache.texts.pool import Pool
from kvcache.texts.seen_parts import TextKey

__all__ = ["PreparedSegments", "SeenText", "SeenTexts"]

Key = tuple[Hashable, TextKey]


class SeenText(Work):
    """A cached text that others see parts of: it runs, and no token is drawn.

    Args:
        part: of the text.
        namespace: as of `Work`.

    Attributes:
        part: see above.
        seen_by: the works that lack it.
    """

    def __init__(self, part: Part, namespace: Hashable) -> None:
        super().__init__(part.tokens, namespace, part.behind)
        self.part, self.seen_by = part, list[Work]()

    def rows_due(self, count: int) -> int:
        return 0

    def take(self, logits: Float32, start: int) -> int:
        return 0

    def ending(self) -> FinishReason | None:
        return "length" if self.computed == self.num_tokens else None

    def mend(self) -> None:
        """Nothing: nothing is drawn."""


class PreparedSegments(Pending):
    """The result of `BatchEngine.prepare`.

    Args:
        steps: that the texts run in.
        texts: those of the segments, and of the head.
        placed: what the segments are.
    """

    def __init__(self, steps: Stepping, texts: Sequence[SeenText], placed: Placed) -> None:
        super().__init__(steps, texts)
        self._texts, self._placed = texts, placed

    def result(self, timeout: float | None = None) -> list[SegmentUse]:
        """Wait until all are cached: the use of each segment, its tokens and those that were cached before.

        Raises:
            TimeoutError: as `Request.result`.
            InvalidOperationError: they were cancelled.
            Exception: what a text failed with.
        """
        self.wait(lambda: self.is_finished, timeout)
        self.expect_end()
        return self._placed.uses({each.part.key: each.cached_tokens for each in self._texts}) or []


class SeenTexts:
    """The cached texts that run for works.

    Args:
        pool: the memory.

    Attributes:
        numbers: those of these texts among works, below 0: they run before the work that they are for.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._running: dict[Key, list[SeenText]] = {}
        self._numbers = count(-1, -1)
        self.numbers: set[int] = set()

    def asked(self, work: Work) -> Iterator[SeenText]:
        """The texts that a work which has begun lacks and nothing runs yet; they are to be queued.

        Notes what it has not lacked, too.
        """
        lacking = set(self._pool.lacking(work))
        own = name_of_space(work.space)
        for number, part in enumerate(work.prefix.parts if work.prefix is not None else ()):
            if number not in lacking:
                work.cached_texts.setdefault(part.key, len(part.tokens))
                continue
            known = self._running.setdefault((part.space(own), part.key), [])
            text = next((each for each in known if each.key < work.key), None)
            if text is None:
                text = SeenText(part, work.namespace)
                text.least, text.arrival = work.reach, work.arrival
                text.key = work.key[0], next(self._numbers)
                known.append(text)
                self.numbers.add(text.key[1])
                yield text
            if work not in text.seen_by:
                text.seen_by.append(work)

    def is_cached(self, text: SeenText) -> bool:
        """Whether all tokens of a text are cached; a use of them."""
        with ExitStack() as held:
            return self._pool.shared.hold_text(text.part, 0, text.space, held) is not None

    def give(self, text: SeenText) -> None:
        """Give the works that lack a text, which has run, their parts of it."""
        if text.seq_id < 0:
            return
        self._pool.keep_whole(text)
        for work in text.seen_by:
            if work.seq_id < 0 or work.prefix is None:
                continue
            own, parts = name_of_space(work.space), work.prefix.parts
            for number in self._pool.lacking(work):
                if parts[number].key == text.part.key and parts[number].space(own) == text.space:
                    self._pool.give(work, number, text)
                    work.cached_texts.setdefault(text.part.key, text.cached_tokens)

    def ended(self, text: SeenText) -> None:
        """Forget a text that has ended."""
        for key, known in list(self._running.items()):
            if text in known:
                known.remove(text)
                if not known:
                    self._running.pop(key)
        self.numbers.discard(text.key[1])

    def left_by(self, work: Work) -> list[SeenText]:
        """The texts that ran for a work alone, which has ended."""
        found = []
        for text in [each for known in self._running.values() for each in known]:
            if work in text.seen_by:
                text.seen_by.remove(work)
                if not text.seen_by:
                    found.append(text)
        return found

    def clear(self) -> None:
        """Forget all."""
        self._running.clear()
        self.numbers.clear()
