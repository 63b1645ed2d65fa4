"""Eviction policies on a tree of pages, and an optimal one that knows the future.

Only leaves can be evicted, so a policy ranks leaves: the lowest rank is evicted first. The rank of a page is set when
it is used. `optimal` evicts the page whose next use is farthest away, which is optimal for pages of one size (Belady,
1966). Every use of a page also uses the pages before it, so this page is always a leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from bench.prefix.workloads import Trace

__all__ = ["POLICIES", "Outcome", "optimal", "replay"]


@dataclass(frozen=True)
class Outcome:
    """The counts of a replay, in pages."""

    hits: int
    lookups: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.lookups, 1)


@dataclass
class Page:
    """A cached page: the page before it, its number of children, and the data of the policies."""

    before: int
    children: int
    last: int  # the last request that used it
    uses: int
    new: int  # new pages of the request that added it: the part of its prompt that was not cached
    rank: float = 0.0


# A policy: (page, floor, lifetime) -> rank. `floor` is the highest rank evicted so far, `lifetime` the mean time from
# the last use of a page to its eviction, in requests.
Rank = Callable[[Page, float, float], float]


def lru(page: Page, floor: float, lifetime: float) -> float:
    """Least recently used."""
    return page.last


def lfu(page: Page, floor: float, lifetime: float) -> float:
    """Least frequently used; ties by recency."""
    return page.uses * 1e9 + page.last


def lfu_aged(page: Page, floor: float, lifetime: float) -> float:
    """Frequency over a floor that rises with each eviction (LFU with dynamic aging, Arlitt et al., 2000)."""
    return floor + page.uses


def size_aware(page: Page, floor: float, lifetime: float) -> float:
    """Greedy dual: frequency divided by the number of new pages, over the same floor (GDSF, Cherkasova, 1998)."""
    return floor + page.uses / page.new


def scan_resistant(page: Page, floor: float, lifetime: float) -> float:
    """LRU in which a page that was used more than once counts as used `lifetime` later."""
    return page.last + (lifetime if page.uses > 1 else 0.0)


def frequent_recent(page: Page, floor: float, lifetime: float) -> float:
    """LRU in which each doubling of the uses, up to sixteen, counts as a use half a `lifetime` later."""
    return page.last + 0.5 * lifetime * min(page.uses.bit_length() - 1, 4)


POLICIES: dict[str, Rank] = {
    "LRU": lru,
    "LFU": lfu,
    "LFU aged": lfu_aged,
    "size-aware": size_aware,
    "scan-resistant": scan_resistant,
    "frequent+recent": frequent_recent,
}


def replay(trace: Trace, capacity: int, rank: Rank) -> Outcome:
    """The trace through a cache of `capacity` pages."""
    pages: dict[int, Page] = {}
    leaves: list[tuple[float, int]] = []
    hits = lookups = evictions = 0
    floor, lifetime = 0.0, 0.0
    for now, request in enumerate(trace.requests):
        path = request.pages[:capacity]
        found = 0
        while found < len(path) and path[found] in pages:
            found += 1
        hits += min(found, request.num_prompt)
        lookups += request.num_prompt
        on_path = set(path)
        held = []
        while len(pages) + len(path) - found > capacity:
            value, leaf = heapq.heappop(leaves)
            page = pages.get(leaf)
            if page is None or page.children or page.rank != value:
                continue
            if leaf in on_path:
                held.append((value, leaf))
                continue
            floor = max(floor, value)
            lifetime += 0.01 * (now - page.last - lifetime)
            del pages[leaf]
            evictions += 1
            if page.before in pages:
                above = pages[page.before]
                above.children -= 1
                if not above.children:
                    heapq.heappush(leaves, (above.rank, page.before))
        for item in held:
            heapq.heappush(leaves, item)
        before = -1
        for i, name in enumerate(path):
            page = pages.get(name)
            if page is None:
                page = pages[name] = Page(before, 0, now, 0, len(path) - found)
                if before in pages:
                    pages[before].children += 1
            page.last = now
            if i < request.num_prompt or page.uses == 0:
                page.uses += 1
            page.rank = rank(page, floor, lifetime)
            before = name
        if path and not pages[path[-1]].children:
            heapq.heappush(leaves, (pages[path[-1]].rank, path[-1]))
        _push_bare(leaves, pages, path)
    return Outcome(hits, lookups, evictions)


def _push_bare(leaves: list[tuple[float, int]], pages: dict[int, Page], path: list[int]) -> None:
    """Rebuild the heap when it is much larger than the cache: it keeps stale entries."""
    if len(leaves) > 4 * len(pages) + 64:
        leaves[:] = [(page.rank, name) for name, page in pages.items() if not page.children]
        heapq.heapify(leaves)


def optimal(trace: Trace, capacity: int) -> Outcome:
    """Replay with the future known: an upper bound for every policy."""
    never = len(trace.requests)
    uses: dict[int, list[int]] = {}
    for i in range(never - 1, -1, -1):
        for page in trace.requests[i].pages[: trace.requests[i].num_prompt]:
            uses.setdefault(page, []).append(i)
    cached: dict[int, int] = {}  # page -> its next use
    order: list[tuple[int, int, int]] = []
    hits = lookups = evictions = 0
    for now, request in enumerate(trace.requests):
        found = 0
        while found < request.num_prompt and request.pages[found] in cached:
            found += 1
        hits += found
        lookups += request.num_prompt
        for depth, page in enumerate(request.pages):
            future = uses.get(page, [])
            while future and future[-1] <= now:
                future.pop()
            following = future[-1] if future else never
            if following == never and page not in cached:
                continue  # never requested again
            cached[page] = following
            heapq.heappush(order, (-following, -depth, page))
        while len(cached) > capacity:
            following, _, page = heapq.heappop(order)
            if cached.get(page) == -following:
                del cached[page]
                evictions += 1
    return Outcome(hits, lookups, evictions)
