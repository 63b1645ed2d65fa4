"""Pins: prefixes that stay cached for a time, unless their memory is needed.

A pin holds the blocks of its prefix as a running text does, and whatever else its layers need behind it. A text that
would not run otherwise takes the memory of pins, the one that ends first at first. Its prefix stays cached then, as
others are, until its blocks are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from kvcache.support.arguments import as_count, as_finite, short
from kvcache.texts.pool import Pool
from kvcache.texts.text import Text, Tokens

__all__ = ["Pin", "Pins", "as_kept", "owner_of"]

_MOST = 1024  # pins: those of a namespace are compared with each text of it that begins
_OF_ALL, _OF_ONE = 2, 4  # all pins have a half of the blocks; one owner has a quarter, and half of the pins


def as_kept(keep: Any, num_tokens: int, block_size: int) -> list[tuple[int, float]]:
    """`keep` of `BatchEngine.submit` as numbers of tokens, ascending, and seconds; TypeError, ValueError.

    The numbers are those of full blocks: a block in which one ends counts, where the prompt fills it.
    """
    try:
        pairs = [(stop, seconds) for stop, seconds in keep] if isinstance(keep, Iterable) else [(num_tokens, keep)]
    except (TypeError, ValueError):
        raise TypeError(f"keep: expected seconds, or pairs of tokens and seconds, got {short(keep)}") from None
    kept = []
    for stop, seconds in pairs:
        full = -(-as_count(stop, "keep", 1, num_tokens) // block_size) * block_size
        kept.append((min(full, num_tokens // block_size * block_size), as_finite(seconds, "keep", 0.0)))
    return sorted(pair for pair in kept if pair[0])


class Pin(Text):
    """The prefix of a text, and one token behind it, which is another one in each text.

    Args:
        text: has run its first `stop` tokens.
        seconds: that it stays for, from each use on.
        until: when it ends.

    Attributes:
        stop, seconds, until: see above.
        held: holds its blocks until it is closed.
    """

    def __init__(self, text: Text, stop: int, seconds: float, until: float) -> None:
        super().__init__(np.append(text.tokens[:stop], np.uint32(0)), text.namespace)
        self.space, self.regime = text.space, text.regime
        self.stop, self.seconds, self.until = stop, seconds, until
        self.held = ExitStack()

    def begins(self, text: Text, stop: int) -> bool:
        """Whether the first `stop` tokens of a text begin with this prefix."""
        mine = self.tokens[: self.stop]
        return self.space == text.space and self.stop <= stop and bool(np.array_equal(mine, text.tokens[: self.stop]))


class Pins:
    """The pins of a pool; every call needs the lock of its steps, but for the reports.

    Args:
        pool: keeps the prefixes.

    Attributes:
        all: the pins.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.all: list[Pin] = []

    # -- pins come and go -----------------------------------------------------------------------------------

    def add(self, text: Text, stop: int, seconds: float, now: float) -> None:
        """Pin the first `stop` tokens of a text that has run them, as far as they are cached and the limits allow it.

        A pin of the same text stays longer for it, never shorter.
        """
        until = now + seconds
        if until <= now:
            return
        shorter = [each for each in self.all if each.begins(text, stop) and each.until <= until]
        longer = [each for each in self.all if each.until >= until and _covers(each, text, stop)]
        stop = min(stop, self._room(text.namespace, shorter) * self._pool.block_size)
        if longer or stop < max([1, *(each.stop for each in shorter)]) or not self._may_add(text.namespace, shorter):
            return
        pin = Pin(text, stop, seconds, until)
        with suppress(MemoryError):  # of the system
            if self._hold(pin):
                self.all.append(pin)
                for each in shorter:
                    self._release(each)

    def _may_add(self, namespace: Hashable, without: list[Pin]) -> bool:
        """Whether there may be another pin of the owner of a namespace, when some others have left."""
        others = [each for each in self.all if each not in without]
        mine = sum(owner_of(each.namespace) == owner_of(namespace) for each in others)
        return len(others) < _MOST and mine < _MOST * _OF_ALL // _OF_ONE

    def _room(self, namespace: Hashable, without: list[Pin]) -> int:
        """The blocks that a pin of a namespace may have, when some others have left."""
        others = [each for each in self.all if each not in without]
        mine = sum(self._blocks(each) for each in others if owner_of(each.namespace) == owner_of(namespace))
        total = self._pool.total_blocks
        return max(0, min(total // _OF_ONE - mine, total // _OF_ALL - sum(map(self._blocks, others))))

    def _blocks(self, pin: Pin) -> int:
        return -(-pin.stop // self._pool.block_size)

    def _hold(self, pin: Pin) -> bool:
        """Hold what is cached of a pin; whether that is anything."""
        pin.stop, pin.held = self._pool.shared.pin(pin, pin.stop)
        if not pin.stop:
            pin.held.close()
        return pin.stop > 0

    def _release(self, pin: Pin) -> None:
        self.all.remove(pin)
        pin.held.close()

    def release(self, space: Hashable, tokens: Tokens, after: int) -> None:
        """Release the pins of a text that reach past its first `after` tokens."""
        for pin in list(self.all):
            if pin.space == space and pin.stop > after and np.array_equal(pin.tokens[: pin.stop], tokens[: pin.stop]):
                self._release(pin)

    def renew(self, text: Text, now: float) -> None:
        """Let the pins of a text that begins stay for their time from now on."""
        for pin in self.all:
            if pin.begins(text, text.num_tokens):
                pin.until = max(pin.until, now + pin.seconds)

    def expire(self, now: float) -> bool:
        """Release the pins whose time has come; whether there were any."""
        ended = [pin for pin in self.all if pin.until <= now]
        for pin in ended:
            self._release(pin)
        return bool(ended)

    def give_way(self) -> bool:
        """Release the pin that ends first, since its memory is needed; whether there was one."""
        if not self.all:
            return False
        self._release(min(self.all, key=lambda pin: pin.until))
        return True

    def clear(self) -> None:
        """Release all pins."""
        while self.give_way():
            pass

    # -- after an exception, and reports --------------------------------------------------------------------

    def settle(self) -> None:
        """Hold again what is cached of each pin, when all that was held has been released."""
        for pin in list(self.all):
            pin.held.close()
            held = False
            with suppress(MemoryError):  # of the system
                held = self._hold(pin)
            if not held:
                self.all.remove(pin)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release what pins hold, and hold it again; for checks, which count what texts hold."""
        before = [(pin, pin.stop) for pin in self.all]
        for pin in self.all:
            pin.held.close()
        try:
            yield
        finally:
            self.settle()
        assert [(pin, pin.stop) for pin in self.all] == before, "a pinned prefix was not all there"

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned; those of several pins count for each."""
        return sum(map(self._blocks, list(self.all)))

    def namespaces(self) -> dict[Hashable, int]:
        """Pinned tokens of each namespace."""
        found: Counter[Hashable] = Counter()
        for pin in list(self.all):
            found[pin.namespace] += pin.stop
        return dict(found)


def owner_of(namespace: Hashable) -> Hashable:
    """The owner of a namespace: a tuple's first entry, so that an API key has one share, whatever salts it sends."""
    return namespace[0] if isinstance(namespace, tuple) and namespace else namespace


def _covers(pin: Pin, text: Text, stop: int) -> bool:
    """Whether a pin has the first `stop` tokens of a text."""
    same = pin.space == text.space and pin.stop >= stop
    return same and bool(np.array_equal(pin.tokens[:stop], text.tokens[:stop]))
