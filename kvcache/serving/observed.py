"""The counters of a `BatchEngine`: times and namespaces of requests, and evictions, of which its caller is told.

All of it is noted while the engine's lock is held, but for `deliver`, which runs the caller's code. The counters of
namespaces have a lock of their own, so that a report of them waits for no step.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np

from kvcache.core.locks import CallLock
from kvcache.prefix.cached_blocks import Evicted
from kvcache.serving.failures import as_failure
from kvcache.serving.request import Pending
from kvcache.serving.stats import Eviction, Histogram, NamespaceStats
from kvcache.serving.work import Work
from kvcache.texts.pool import Pool
from kvcache.texts.text import NO_TOKEN

__all__ = ["MOST_NAMESPACES", "Observed", "OnEviction"]

logger = logging.getLogger("kvcache")

OnEviction = Callable[[Eviction], object]

MOST_NAMESPACES = 4096  # with counters; of more, those that had no request for longest are forgotten
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)  # seconds
_LOG_EVERY = 10.0  # seconds between lines about evictions


class _Times:
    """A histogram that grows."""

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(_BOUNDS) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(_BOUNDS, seconds)] += count
        self.total += seconds * count

    def snapshot(self) -> Histogram:
        return Histogram(_BOUNDS, tuple(self.counts), self.total)


class Observed:
    """The counters of an engine.

    Args:
        pool: its memory.
        on_eviction: is told of evictions; None: nobody is.
        clock: seconds.
        name_of: the caller's name of a namespace of the prefix cache.

    Attributes:
        queued, first_token, gap: times of requests.
    """

    def __init__(
        self, pool: Pool, on_eviction: OnEviction | None, clock: Callable[[], float],
        name_of: Callable[[Hashable], Hashable],
    ) -> None:
        if on_eviction is not None and not callable(on_eviction):
            raise TypeError(f"on_eviction: expected a function, got {type(on_eviction).__name__}")
        self._pool, self._on_eviction, self._clock, self._name_of = pool, on_eviction, clock, name_of
        self.queued, self.first_token, self.gap = _Times(), _Times(), _Times()
        self._lock = CallLock(level=0)
        self._namespaces: OrderedDict[Hashable, list[int]] = OrderedDict()
        self._evicted = pool.watch_evictions()
        self._untold: deque[Eviction] = deque()
        self._logged_at, self._tokens, self._times = -_LOG_EVERY, 0, 0  # evictions since the last line

    def began(self, work: Work, now: float) -> None:
        """A work runs for the first time."""
        self.queued.add(now - work.arrival)
        if work.shares:
            self._count(work.namespace, (1, work.cached_tokens > 0, work.num_prompt, work.cached_tokens))

    def arrived(self, work: Work, num_tokens: int) -> None:
        """So many further tokens of a prompt need not run, since tiers had them."""
        if work.shares:
            self._count(work.namespace, (0, not work.cached_tokens, 0, num_tokens))
        work.cached_tokens += num_tokens

    def drew(self, work: Work, now: float, count: int) -> None:
        """Record `count` new tokens of a work at time `now`; `times` are those of the tokens before."""
        if work.times:
            self.gap.add(now - work.times[-1])
        else:
            self.first_token.add(now - work.arrival)
        self.gap.add(0.0, count - 1)

    def _count(self, namespace: Hashable, more: Iterable[int]) -> None:
        """Add to `[queries, hits, query tokens, hit tokens, evicted tokens]` of a namespace, the last one to come."""
        with self._lock:
            counts = self._namespaces.setdefault(namespace, [0] * 5)
            for i, each in enumerate(more):
                counts[i] += each
            self._namespaces.move_to_end(namespace)
            if len(self._namespaces) > MOST_NAMESPACES:
                self._namespaces.popitem(last=False)

    @property
    def any_evicted(self) -> bool:
        """Whether there are evictions that `note_evictions` has not counted."""
        return bool(self._evicted)

    def note_evictions(self, takers: Iterable[int], pending: Mapping[int, Pending]) -> None:
        """Count what was evicted for works of these numbers, in order to deliver it later."""
        found = (pending.get(number) for number in takers)
        requests = tuple(dict.fromkeys(each for each in found if each is not None))
        while self._evicted:
            left = _of_texts(self._evicted[0])
            namespace = self._name_of(left.namespace)
            with self._lock:
                if namespace in self._namespaces:
                    self._namespaces[namespace][4] += left.num_tokens
            self._tokens, self._times = self._tokens + left.num_tokens, self._times + 1
            if self._on_eviction is not None:
                self._untold.append(Eviction(namespace, left.tokens, left.num_tokens, requests))
            self._evicted.popleft()

    def deliver(self) -> None:
        """Tell the caller of evictions, without a lock; errors of its function are logged."""
        while self._untold and self._on_eviction is not None:
            try:
                event = self._untold.popleft()
            except IndexError:  # another thread has it
                break
            try:
                self._on_eviction(event)
            except BaseException as error:
                logger.error("on_eviction failed", exc_info=as_failure(error, "on_eviction"))
        if self._times and (now := self._clock()) - self._logged_at >= _LOG_EVERY:
            tokens, times, self._tokens, self._times, self._logged_at = self._tokens, self._times, 0, 0, now
            logger.info("%d cached tokens evicted in %d pieces", tokens, times)

    def namespaces(self) -> dict[Hashable, NamespaceStats]:
        """The counters of each namespace that had a request, or has something cached."""
        cached: dict[Hashable, int] = {}
        for name, tokens in self._pool.namespace_tokens().items():
            own = self._name_of(name)
            cached[own] = cached.get(own, 0) + tokens
        with self._lock:
            counts = {name: tuple(each) for name, each in self._namespaces.items()}
        none = (0,) * 5
        names = dict.fromkeys([*counts, *cached])
        return {name: NamespaceStats(cached.get(name, 0), *counts.get(name, none)) for name in names}


def _of_texts(left: Evicted) -> Evicted:
    """An eviction without what fills the block behind the end of a text."""
    filled = int(np.count_nonzero(left.tokens == NO_TOKEN))
    return left._replace(tokens=left.tokens[: len(left.tokens) - filled], num_tokens=left.num_tokens - filled)
