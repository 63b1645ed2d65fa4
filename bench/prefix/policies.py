"""Eviction policies on a tree of pages, and the best that any could do.

A page may leave when nothing cached is built on it, so a policy ranks leaves. The rank of a page is set when it is
used; the lowest leaves. `Optimal` knows the future: of pages of one size, evicting the one whose next use is farthest
is optimal (Belady, 1966), and since every use of a page uses the pages before it, that one is always a leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from bench.prefix.workloads import Trace

__all__ = ["POLICIES", "Outcome", "optimal", "replay"]


@dataclass(frozen=True)
class Outcome:
    """What a replay came to, in pages."""

    hits: int
    lookups: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.lookups, 1)


@dataclass
class Page:
    """A cached page: the page before it, how many are built on it, and what policies look at."""

    before: int
    children: int
    last: int  # request that used it last
    uses: int
    new: int  # pages that came with it: the size of what nobody shares
    rank: float = 0.0


# A policy gives a page its rank: (page, age) -> rank, where age grows with what was evicted.
Rank = Callable[[Page, float, float], float]


def lru(page: Page, floor: float, lifetime: float) -> float:
    """Least recently used."""
    return page.last


def lfu(page: Page, floor: float, lifetime: float) -> float:
    """Least frequently used, then least recently."""
    return page.uses * 1e9 + page.last


def lfu_aged(page: Page, floor: float, lifetime: float) -> float:
    """Frequency over a floor that rises with each eviction (LFU with dynamic aging, Arlitt et al., 2000)."""
    return floor + page.uses


def size_aware(page: Page, floor: float, lifetime: float) -> float:
    """Greedy dual: frequency per page that came along, over the same floor (GDSF, Cherkasova, 1998)."""
    return floor + page.uses / page.new


def scan_resistant(page: Page, floor: float, lifetime: float) -> float:
    """LRU in which a page used again counts as used later, by the time that pages live between use and eviction."""
    return page.last + (lifetime if page.uses > 1 else 0.0)


def frequent_recent(page: Page, floor: float, lifetime: float) -> float:
    """The same in steps: each doubling of the uses, up to sixteen, is worth half such a lifetime."""
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
    """A path that ends inside another's leaves no leaf of its own, and the heap must not outgrow the cache."""
    if len(leaves) > 4 * len(pages) + 64:
        leaves[:] = [(page.rank, name) for name, page in pages.items() if not page.children]
        heapq.heapify(leaves)


def optimal(trace: Trace, capacity: int) -> Outcome:
    """The same with the future known: an upper bound on every policy."""
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
                continue  # never asked for again: it need not be kept
            cached[page] = following
            heapq.heappush(order, (-following, -depth, page))
        while len(cached) > capacity:
            following, _, page = heapq.heappop(order)
            if cached.get(page) == -following:
                del cached[page]
                evictions += 1
    return Outcome(hits, lookups, evictions)
