"""`Prefetches`: texts that are read from tiers before their requests come; and what else hints ask of the cache.

A text is read as the prompt of a request is, but nothing runs: what has arrived when its lookup ends is cached, and
pinned for the time of the hint. Few are read at a time, since one thread reads for the requests too.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from itertools import count
from typing import NamedTuple

import numpy as np

from kvcache.errors import QueueFullError
from kvcache.serving.pins import Pins, owner_of
from kvcache.texts.arrivals import Arrivals
from kvcache.texts.hints import HINTS, Hint, demote
from kvcache.texts.pool import Pool
from kvcache.texts.text import Text

__all__ = ["Prefetches"]

logger = logging.getLogger("kvcache")

_MOST, _OF_ONE = 1024, 128  # texts that are due later, and those of one owner
_MOST_TOKENS = 1 << 24  # of them, of which one owner has a quarter
_AT_A_TIME = 2
_EARLY = 1.0  # seconds before a text comes back, beyond twice those of reading it
_POLL = 0.01  # seconds between two looks at a lookup


class _Prefetch(NamedTuple):
    """A text that is to be read.

    Attributes:
        begins: when.
        number: of the hint.
        text: ends with a token that is in no other text.
        until: when its pin ends.
    """

    begins: float
    number: int
    text: Text
    until: float


class Prefetches:
    """The texts of hints that are read, or will be; every call needs the lock of its steps, but for the reports.

    Args:
        pool: caches them.
        arrivals: what tiers deliver; None: there are no tiers, and what is cached is pinned alone.
        pins: holds them.

    Attributes:
        counts: hints so far, by their names.
        read_tokens: tokens that were read for hints.
    """

    def __init__(self, pool: Pool, arrivals: Arrivals | None, pins: Pins) -> None:
        self._pool, self._arrivals, self._pins = pool, arrivals, pins
        self._due: list[_Prefetch] = []  # a heap
        self._reading: list[_Prefetch] = []
        self._numbers = count()
        self.counts = dict.fromkeys(HINTS, 0)
        self.read_tokens = 0

    @property
    def texts(self) -> list[Text]:
        """The texts that are read now."""
        return [each.text for each in self._reading]

    def expect_room(self, hint: Hint) -> None:
        """QueueFullError: too many texts are due later, in all or of the owner of this one; needs no lock."""
        if hint.action != "prefetch":
            return
        texts, tokens = Counter[Hashable](), Counter[Hashable]()
        for text in [*(each.text for each in list(self._due)), *hint.texts]:
            texts[owner_of(text.namespace)] += 1
            tokens[owner_of(text.namespace)] += text.num_tokens
        mine = owner_of(hint.texts[0].namespace)
        if texts[mine] > _OF_ONE or 4 * tokens[mine] > _MOST_TOKENS:
            raise QueueFullError(_OF_ONE, "hints")
        if texts.total() > _MOST or tokens.total() > _MOST_TOKENS:
            raise QueueFullError(_MOST, "hints")

    def take(self, hint: Hint, now: float) -> None:
        """Do what a hint says. Raises nothing: where memory is short it changes nothing."""
        self.counts[hint.action] += 1
        try:
            for text in hint.texts:
                _TAKEN[hint.action](self, text, hint, now)
        except Exception:
            logger.warning("a hint has no effect", exc_info=True)

    def _pin(self, text: Text, hint: Hint, now: float) -> None:
        stop = min(self._pool.shared.longest(text), text.num_tokens) // self._pool.block_size * self._pool.block_size
        if stop:
            self._pins.add(text, stop, hint.ttl, now)

    def _demote(self, text: Text, hint: Hint, now: float) -> None:
        demote(self._pool, self._arrivals, text, hint.after)

    def _release(self, text: Text, hint: Hint, now: float) -> None:
        if (found := self._pool.shared.leave(text, hint.after, at_once=False)) is not None:
            self._pins.release(text.space, *found)
            self._pool.shared.leave(text, hint.after, at_once=True)

    def _prefetch(self, text: Text, hint: Hint, now: float) -> None:
        size, due = self._pool.block_size, now + hint.resume_in
        if not (stop := text.num_tokens // size * size):
            return
        tokens = np.append(text.tokens[:stop], np.uint32(0))  # whose K and V nobody needs: the last token always runs
        other = Text(tokens, text.namespace, text.prefix)
        other.space, other.regime = text.space, text.regime
        seconds = 0.0 if self._arrivals is None else 2 * self._arrivals.seconds_of(stop)
        heapq.heappush(self._due, _Prefetch(due - seconds - _EARLY, next(self._numbers), other, due + hint.ttl))
        self.advance(now)

    def advance(self, now: float) -> None:
        """Begin to read what is due, and cache what was read."""
        while self._due and self._due[0].begins <= now and len(self._reading) < _AT_A_TIME:
            each = heapq.heappop(self._due)
            self._reading.append(each)
            if self._arrivals is not None:
                with suppress(MemoryError):  # of the system: what is cached is pinned then
                    self._arrivals.ask(each.text)
        for each in list(self._reading):
            if self._arrivals is None or self._arrivals.has_ended(each.text):
                self._reading.remove(each)
                try:
                    self._cache(each, now)
                except Exception:
                    logger.warning("what was read for a hint is not cached", exc_info=True)

    def _cache(self, each: _Prefetch, now: float) -> None:
        """Cache what has arrived of a text, and pin it."""
        arrivals, text = self._arrivals, each.text
        before = self._pool.shared.longest(text)
        try:
            with ExitStack() as held:
                arrived = None if arrivals is None else arrivals.arrived
                stop, _ = self._pool.shared.hold(text, text.num_tokens, held, arrived, again=True)
                self.read_tokens += max(0, stop - before)
                stop -= stop % self._pool.block_size
                if stop:
                    self._pins.add(text, stop, each.until - now, now)
        finally:
            if arrivals is not None:
                arrivals.end(text)

    def seconds(self, now: float) -> float:
        """How long nothing is to be done; needs no lock."""
        if self._reading:
            return _POLL
        first = self._due[:1]  # others may take it at any time
        return max(0.0, first[0].begins - now) if first else math.inf

    def clear(self) -> None:
        """Read nothing more."""
        self._due.clear()
        for each in self._reading:
            if self._arrivals is not None:
                self._arrivals.end(each.text)
        self._reading.clear()

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        assert len(self._reading) <= _AT_A_TIME, "more texts are read than may be"
        assert all(self._due[i].begins >= self._due[(i - 1) // 2].begins for i in range(1, len(self._due))), (
            "texts of hints are not in the order in which they are due"
        )


_Taken = Callable[[Prefetches, Text, Hint, float], None]
_TAKEN: dict[str, _Taken] = {
    "demote": Prefetches._demote, "pin": Prefetches._pin, "prefetch": Prefetches._prefetch,
    "release": Prefetches._release, "share": Prefetches._pin,
}
