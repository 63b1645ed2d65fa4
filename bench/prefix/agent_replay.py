"""A trace of agents through a tree of cached pages, in virtual time, by rules of eviction, and with hints.

A page costs the seconds of computing it, which grow with the tokens before it, since these are attended to. Where a
tier has copies it costs the seconds of reading it. Only leaves can be evicted: the one of the lowest key first.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.prefix.agent_traces import AgentRequest
from kvcache.core.block_pool import BlockPool
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.index.slots import Slots
from kvcache.trie.trie import TokenTrie

__all__ = ["HINTS", "Costs", "Replay", "Replayed", "future_of", "rules", "through_index"]

# What is replayed with hints: whether a tier has copies, the rule, and the options of `Replay`.
HINTS = {
    "LRU": (False, "LRU", {}),
    "LRU, release": (False, "LRU", {"release": True}),
    "LRU, release, pin": (False, "LRU", {"release": True, "pin": True}),
    "the future known, by seconds": (False, "the future known, by seconds", {}),
    "LRU over a tier": (True, "LRU", {}),
    "LRU over a tier, release": (True, "LRU", {"release": True}),
    "LRU over a tier, release, demote, prefetch": (True, "LRU", {"release": True, "ahead": True}),
    "the future known, over a tier": (True, "the future known, by tokens", {}),
}


@dataclass(frozen=True)
class Costs:
    """Seconds of a page.

    Attributes:
        compute: of the first page of a text.
        depth: pages after which it takes twice as long.
        read: from a tier.
    """

    compute: float = 0.12
    depth: float = 94.0
    read: float = 0.0077

    def seconds(self, depth: int) -> float:
        """Computing the page behind `depth` others."""
        return self.compute * (1 + depth / self.depth)


@dataclass
class Replayed:
    """The counts of a replay.

    Attributes:
        hits, known: pages of prompts that were cached, and those that had been computed before.
        again: seconds in which such pages were computed again, or read from a tier, before a request could go on.
    """

    hits: int = 0
    known: int = 0
    again: float = 0.0


@dataclass
class _Page:
    name: int
    before: int
    depth: int
    last: float = 0.0
    uses: int = 0
    floor: float = 0.0  # the highest key that was evicted when it was used
    children: int = 0
    until: float = -math.inf  # it is pinned until then
    low: bool = False  # it was demoted


Key = Callable[[_Page, float], float]


def future_of(trace: Sequence[AgentRequest]) -> dict[int, list[float]]:
    """When each page is asked for."""
    times: dict[int, list[float]] = {}
    for request in trace:
        for page in request.pages[: request.num_prompt]:
            times.setdefault(page, []).append(request.time)
    return times


def rules(costs: Costs, future: dict[int, list[float]]) -> dict[str, Key]:
    """Keys of leaves, the lowest is evicted first; those of the last two know the future."""

    def following(page: _Page, now: float) -> float:
        times = future.get(page.name, ())
        at = bisect_right(times, now)
        return times[at] - now if at < len(times) else math.inf

    def cost(page: _Page) -> float:
        return costs.seconds(page.depth)

    return {
        "LRU": lambda page, now: page.last,
        "seconds, aged (greedy dual)": lambda page, now: page.floor + cost(page),
        "uses x seconds, aged (GDSF)": lambda page, now: page.floor + page.uses * cost(page),
        "seconds / idle time": lambda page, now: cost(page) / (now - page.last + 1e-9),
        "the future known, by tokens": lambda page, now: -following(page, now),
        "the future known, by seconds": lambda page, now: -following(page, now) / cost(page),
    }


@dataclass
class Replay:
    """A cache of `capacity` pages.

    Args:
        capacity: pages.
        key: the rule.
        costs: of pages.
        tier: whether a tier has a copy of all that was computed.
        release: whether texts that have ended are released.
        pin: whether texts are pinned while their tool runs, in a half of the pages.
        ahead: whether they are demoted while it runs, and read from the tier before they come back.
    """

    capacity: int
    key: Key
    costs: Costs
    tier: bool = False
    release: bool = False
    pin: bool = False
    ahead: bool = False
    pages: dict[int, _Page] = field(default_factory=dict)
    leaves: set[int] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)
    outcome: Replayed = field(default_factory=Replayed)
    floor: float = 0.0
    end: int = -1  # the last cached page of a text that is being cached

    def run(self, trace: Sequence[AgentRequest]) -> Replayed:
        """Replay a trace."""
        due: list[tuple[float, int, AgentRequest]] = []
        for number, request in enumerate(trace):
            while due and due[0][0] <= request.time:
                time, _, back = heapq.heappop(due)
                self._add(back.pages, time, back.time + (back.back or 0.0) + 60.0)
            self._ask(request)
            if request.head is not None and self.release:
                self._release(request)
            elif request.back is not None and self.pin:
                self._pin(request.pages, request.time, request.time + 10.0 + 2 * request.back)
            elif request.back is not None and self.ahead:
                for page in self._own(request.pages):
                    page.low = True
                heapq.heappush(due, (request.time + request.back, number, request))
        return self.outcome

    def _ask(self, request: AgentRequest) -> None:
        path, found = request.pages[: self.capacity], self._found(request.pages)
        self.outcome.hits += min(found, request.num_prompt)
        for depth, page in enumerate(request.pages[: request.num_prompt]):
            if page in self.computed:
                self.outcome.known += 1
                if depth >= found:
                    self.outcome.again += self.costs.read if self.tier else self.costs.seconds(depth)
        self.computed.update(request.pages)
        self._add(path, request.time)

    def _found(self, path: Sequence[int]) -> int:
        found = 0
        while found < len(path) and path[found] in self.pages:
            found += 1
        return found

    def _add(self, path: Sequence[int], now: float, until: float = -math.inf) -> None:
        """Cache a text, and use it."""
        found, path = self._found(path), path[: self.capacity]
        self.end = before = path[found - 1] if found else -1
        self.leaves.discard(before)
        self._make_room(len(path) - found, now)
        for depth in range(found, len(path)):
            self.pages[path[depth]] = _Page(path[depth], before, depth)
            if before >= 0:
                self.pages[before].children += 1
            before = path[depth]
        for name in path:
            page = self.pages[name]
            page.last, page.uses, page.floor, page.low = now, page.uses + 1, self.floor, False
        self.end = -1
        if path and not self.pages[path[-1]].children:
            self.leaves.add(path[-1])
            if until > now and self._pinned(now) + len(path) <= self.capacity // 2:
                self.pages[path[-1]].until = until

    def _pin(self, path: Sequence[int], now: float, until: float) -> None:
        last = self.pages.get(path[-1])
        if last is not None and not last.children and self._pinned(now) + len(path) <= self.capacity // 2:
            last.until = until

    def _pinned(self, now: float) -> int:
        return sum(self.pages[leaf].depth + 1 for leaf in self.leaves if self.pages[leaf].until > now)

    def _make_room(self, count: int, now: float) -> None:
        needed = len(self.pages) + count - self.capacity
        if needed <= 0:
            return
        order = [(*self._rank(self.pages[leaf], now), leaf) for leaf in self.leaves]
        heapq.heapify(order)
        while needed > 0 and order:
            *rank, leaf = heapq.heappop(order)
            self.floor = max(self.floor, rank[-1])
            if (above := self._drop(leaf)) is not None:
                heapq.heappush(order, (*self._rank(self.pages[above], now), above))
            needed -= 1

    def _rank(self, page: _Page, now: float) -> tuple[float, bool, float]:
        """Pinned ones at the end, the one that ends first before the others; demoted ones first."""
        return page.until if page.until > now else -math.inf, not page.low, self.key(page, now)

    def _drop(self, leaf: int) -> int | None:
        """Evict a leaf; the page above it, if that is a leaf now."""
        page = self.pages.pop(leaf)
        self.leaves.discard(leaf)
        if (above := self.pages.get(page.before)) is None:
            return None
        above.children -= 1
        if above.children or above.name == self.end:
            return None
        self.leaves.add(above.name)
        return above.name

    def _own(self, path: Sequence[int]) -> list[_Page]:
        """The pages of a text that no other one has, from its end on."""
        found: list[_Page] = []
        for name in reversed(path[: self._found(path)]):
            page = self.pages[name]
            if page.children > (1 if found else 0):
                break
            found.append(page)
        return found

    def _release(self, request: AgentRequest) -> None:
        for page in self._own(request.pages):
            if page.depth >= (request.head or 0):
                self._drop(page.name)


def through_index(trace: Sequence[AgentRequest], capacity: int, *, release: bool = False) -> int:
    """Replay a trace through the library's index of cached prefixes: the pages of prompts that it found.

    All tokens of a page are its name.
    """
    size, hits = 2, 0
    slots = Slots([BlockPool(capacity)], size)
    index = PrefixIndex(TokenTrie(size), slots)
    for request in trace:
        tokens = np.repeat(np.array(request.pages[:capacity], np.uint32), size)
        claim = index.claim(tokens, None, True)
        found, pages = claim.num_held, len(tokens) // size
        hits += min(found, request.num_prompt)
        if pages > found:
            while (room := slots.room(pages - found)) < pages - found:
                evicted = index.evict(pages - found - room)
                assert evicted is not None, "the text has more pages than there are"
                evicted.release()
            head = index.head(tokens[: found * size])
            index.insert(tokens, slots.take(pages - found), None, head)
            if head is not None:
                head.release()
        claim.release()
        if release and request.head is not None:
            gone = index.discard(tokens, None, request.head * size)
            if gone is not None:
                gone[2].release()
    return hits
