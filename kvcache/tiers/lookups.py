"""Lookups: a thread that asks the tiers for the values of a prompt, while the prompt runs.

    probe     the keys of all groups that the prompt lacks, one call of each tier
    decide    fetch where latency + bytes / rate of the tier is below half of the seconds that computing takes
    fetch     in windows, each checked and delivered while the next is on its way; stop at the first gap

A window has what takes a tenth of a second or four round trips, 8 MB at most, and a value at least. Before each window
the groups that have been computed meanwhile are passed over, and it is decided again.
"""

from __future__ import annotations

import logging
from _thread import TIMEOUT_MAX, allocate_lock
from collections.abc import Hashable, Sequence
from itertools import takewhile
from queue import SimpleQueue
from threading import RLock, Thread
from time import monotonic

import numpy as np
import numpy.typing as npt

from kvcache.tiers.links import Link, Measured
from kvcache.tiers.process_thread import ProcessThread
from kvcache.tiers.protocol import Buffer
from kvcache.tiers.values import ValueFormat, Wrapping

__all__ = ["Lookup", "Reader", "pays"]

logger = logging.getLogger("kvcache")

WINDOW = 8 << 20  # bytes of values in one call of a tier
_SECONDS, _ROUND_TRIPS = 0.1, 4  # of one call, the longer of both
_SHARE = 0.5  # of the seconds of computing that a fetch may take
_LEAST_SHARE = 0.05  # of the seconds of a fetch that count as those of its bytes
_MOST_WAITING = 16  # lookups
_PATIENCE = 1.0  # seconds of one call after which further lookups do not wait for it

Tokens = npt.NDArray[np.uint32]


class Lookup:
    """The values of one prompt.

    Args:
        name: the namespace.
        tokens: of the prompt.
        first, stop: the groups to look up.
        keys: for each tier, the keys of all groups.
        wrappings: for each tier, of the values.
        format: of the values.
        computing: tokens per second of the network.

    Attributes:
        bodies: what has arrived, by group.
        reached: groups, from the first on, that need not be fetched any more.
        ended: whether nothing more arrives.
        present, absent: for each tier, the groups of which a probe said that it has them, or lacks them.
        wrong: the tier and the group of each value that was not accepted.
        beside: bytes of what `finish` fetches, about.
    """

    beside = 0

    def __init__(
        self, name: Hashable, tokens: Tokens, first: int, stop: int, keys: Sequence[list[bytes]],
        wrappings: Sequence[Wrapping], format: ValueFormat, computing: Measured,
    ) -> None:
        self.name, self.tokens, self.first, self.stop = name, tokens, first, stop
        self.keys, self.wrappings, self.format, self.computing = keys, wrappings, format, computing
        self.bodies: dict[int, memoryview] = {}
        self.reached, self.ended, self.cancelled = first, False, False
        self.present: list[range] = [range(0)] * len(keys)
        self.absent: list[range] = [range(0)] * len(keys)
        self.wrong: list[tuple[int, int]] = []
        self._lock, self._running = RLock(), allocate_lock()
        self._running.acquire()

    def covers(self, name: Hashable, tokens: Tokens) -> bool:
        """Whether it is of this text."""
        return len(tokens) == len(self.tokens) and bool(np.array_equal(tokens, self.tokens)) and name == self.name

    def available(self, token: int) -> int:
        """The end of the groups that have arrived from the one of `token` on; `token` if there is none."""
        size = self.format.group_tokens
        group = token // size
        while group in self.bodies:
            group += 1
        return max(token, group * size)

    def narrowed(self, number: int, link: Link, at: int, end: int) -> int:
        """The end of those groups from `at` to `end`, which tier `number` has, that are of use."""
        return end

    def finish(self, number: int, link: Link, stop: int) -> None:
        """Fetch what else is of use when the groups before `stop` have arrived from tier `number`."""

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, so long at most."""
        if not self.ended and seconds and self._running.acquire(timeout=min(seconds, TIMEOUT_MAX)):
            self._running.release()

    def cancel(self) -> None:
        """Nothing more is needed."""
        with self._lock:
            self.cancelled = True
            self.bodies.clear()

    def deliver(self, group: int, body: memoryview) -> None:
        """Accept the body of a group, unless nothing more is needed."""
        with self._lock:
            if not self.cancelled:
                self.bodies[group] = body

    def end(self) -> None:
        """Nothing more arrives; to be called once."""
        self.ended = True
        self._running.release()

    def tokens_of(self, group: int) -> Tokens:
        """The tokens of a group."""
        size = self.format.group_tokens
        return self.tokens[group * size : (group + 1) * size]


class Reader:
    """The thread that runs lookups, one after another.

    Callers use compiled locks and queues alone: an interrupt leaves none of them locked.

    Args:
        links: in the order in which they are asked.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._queue: SimpleQueue[Lookup | None] = SimpleQueue()
        self._thread = ProcessThread()
        self._closed = False
        self._began: float | None = None  # when the running call of a tier began

    def submit(self, lookup: Lookup) -> bool:
        """Run a lookup; False if too many wait, or a call of a tier takes long."""
        try:
            if self._thread.begin(self._run):
                self._began = None  # a parent's thread may have had a call
        except RuntimeError:
            return False
        began = self._began
        busy = began is not None and monotonic() - began > _PATIENCE
        if self._closed or busy or self._queue.qsize() >= _MOST_WAITING:
            return False
        self._queue.put(lookup)
        return True

    def close(self) -> None:
        """End the lookups and the thread, after its running call."""
        self._closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (lookup := self._queue.get()) is not None:
            try:
                if not lookup.cancelled and not self._closed:
                    self._look_up(lookup)
            except BaseException:
                logger.warning("a lookup in tiers failed", exc_info=True)
            finally:
                self._began = None
                lookup.end()
                del lookup

    def _look_up(self, lookup: Lookup) -> None:
        at = lookup.first
        for number, link in enumerate(self._links):
            at = max(at, lookup.reached)
            if at >= lookup.stop or lookup.cancelled or self._closed:
                return
            if link.pause:
                link.count("passed")
                continue
            try:
                at = self._ask(lookup, number, link, at)
            except BaseException as error:  # such as no memory, or no thread
                link.failed(error)

    def _ask(self, lookup: Lookup, number: int, link: Link, at: int) -> int:
        """Ask one tier for the groups from `at` on; the first that did not arrive."""
        self._began = monotonic()
        there = link.contains(lookup.keys[number][at : lookup.stop])
        self._began = None
        if there is None:
            return at
        end = at + sum(1 for _ in takewhile(bool, there))
        if end < lookup.stop:
            link.count("misses")
            lookup.absent[number] = range(end, lookup.stop)
        lookup.present[number] = range(at, end)
        end = lookup.narrowed(number, link, at, end)
        at = self._fetch(lookup, number, link, at, end)
        if at == end > lookup.first and not lookup.cancelled:
            lookup.finish(number, link, end)
        return at

    def _fetch(self, lookup: Lookup, number: int, link: Link, at: int, end: int) -> int:
        """Fetch the groups from `at` to `end`; the first that did not arrive."""
        value_bytes = lookup.format.value_bytes
        check: _Check | None = None
        while (at := max(at, lookup.reached)) < end and not lookup.cancelled and not self._closed:
            if not pays(lookup, link, end - at, end - lookup.reached if lookup.beside else 0):
                link.count("declined")
                at = lookup.stop  # the next tiers are slower
                break
            count = max(1, int(_window(link)) // value_bytes)
            groups = range(at, min(at + count, end))
            self._began = began = monotonic()
            values = link.get([lookup.keys[number][group] for group in groups], value_bytes)
            self._began = None
            if values is None or (check is not None and not check.passed()):
                break
            check = _Check(lookup, number, link, groups, values)
            check.start()
            at = groups.stop
            seconds = monotonic() - began
            # Without the round trip, which one value does not outweigh.
            seconds = max(seconds - (link.latency.mean or 0.0), seconds * _LEAST_SHARE, 1e-9)
            link.rate.add(len(groups) * value_bytes / seconds)
        return at if check is None or check.passed() else check.stop


class _Check(Thread):
    """Checks a window of values and delivers those that are accepted, while the next window is fetched.

    Attributes:
        stop: the first group that was not accepted.
    """

    def __init__(
        self, lookup: Lookup, number: int, link: Link, groups: range, values: Sequence[Buffer | None]
    ) -> None:
        super().__init__(name=f"kvcache check {link.name}", daemon=True)
        self._lookup, self._number, self._link, self._groups, self._values = lookup, number, link, groups, values
        self.stop = groups.start

    def run(self) -> None:
        lookup, link, wrapping = self._lookup, self._link, self._lookup.wrappings[self._number]
        try:
            for group, value in zip(self._groups, self._values, strict=True):
                key = lookup.keys[self._number][group]
                body = wrapping.open(lookup.format, key, lookup.tokens_of(group), value)
                if body is None:
                    if value is not None:
                        link.wrong()
                        lookup.wrong.append((self._number, group))
                    else:  # it has left since the probe
                        lookup.present[self._number] = range(lookup.present[self._number].start, group)
                        lookup.absent[self._number] = range(group, lookup.stop)
                    return
                link.count("late" if lookup.cancelled else "hits")
                link.count("bytes_read", lookup.format.value_bytes)
                lookup.deliver(group, body)
                self.stop = group + 1
        except BaseException as error:
            link.failed(error)

    def passed(self) -> bool:
        """Wait for its end; whether all values were accepted."""
        self.join()
        return self.stop == self._groups.stop


def _window(link: Link) -> float:
    """Bytes of one call."""
    return min(WINDOW, (link.rate.mean or 0.0) * max(_SECONDS, _ROUND_TRIPS * (link.latency.mean or 0.0)))


def pays(lookup: Lookup, link: Link, groups: int, saved: int = 0) -> bool:
    """Whether a fetch of `groups` groups takes less than half of the time of computing them, as far as is known.

    Args:
        saved: groups that need not be computed then, those too that have arrived and are of no use alone; 0: `groups`.
    """
    speed, rate = lookup.computing.mean, link.rate.mean
    if speed is None or rate is None:
        return True
    size = groups * lookup.format.value_bytes + lookup.beside
    calls = 1 + size / max(_window(link), lookup.format.value_bytes)
    seconds = calls * (link.latency.mean or 0.0) + size / rate
    return seconds < _SHARE * (saved or groups) * lookup.format.group_tokens / speed
