"""`Store`: a tier that all workers of a fleet share, with a limit, a latency, and one transfer at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from bench.fleet.costs import Costs

__all__ = ["Store"]

_SHARE = 0.5  # of the seconds of computing that a read may take, as of the tiers of this library


class Store:
    """Pages by name, the least recently used of which go first.

    Args:
        num_pages: that it has room for; 0: there is no store.
        nodes: servers, over which pages are spread evenly; each has a link.

    Attributes:
        read, written: tokens.
    """

    def __init__(self, costs: Costs, num_pages: int, page_size: int, nodes: int) -> None:
        self._costs, self._limit, self._size, self._nodes = costs, num_pages, page_size, nodes
        self._pages: OrderedDict[int, float] = OrderedDict()  # name -> when it was there
        self._free = 0.0  # when its links have sent and received all
        self.read = self.written = 0

    def has(self, names: Sequence[int], now: float, start: int = 0) -> int:
        """How many of the pages of a text it has, from the first on or from `start` on."""
        count = start
        while count < len(names) and self._pages.get(names[count], now + 1.0) <= now:
            count += 1
        return count

    def _transfer(self, now: float, tokens: int) -> float:
        """Seconds until `tokens` tokens have been transferred."""
        own = self._costs.transfer(tokens)
        self._free = max(now, self._free) + own / self._nodes
        return max(self._free - now, own) + self._costs.latency

    def fetch(self, names: Sequence[int], start: int, tokens: int, computing: float, now: float) -> tuple[int, float]:
        """Read the pages from `start` on that it has, if that is worth it: how many, and the seconds.

        Args:
            tokens: that a hit on all pages that it has would spare.
            computing: seconds of computing these.
        """
        count = self.has(names, now, start) - start
        wait = max(0.0, self._free - now) + self._costs.transfer(tokens) + self._costs.latency
        if count <= 0 or wait > _SHARE * computing:
            return 0, 0.0
        for name in names[start : start + count]:
            self._pages.move_to_end(name)
        self.read += count * self._size
        return count, self._transfer(now, count * self._size)

    def write(self, names: Sequence[int], now: float) -> None:
        """Write the pages that it lacks."""
        missing = [name for name in names if name not in self._pages] if self._limit else []
        if not missing:
            return
        self.written += len(missing) * self._size
        there = now + self._transfer(now, len(missing) * self._size)
        for name in missing:
            self._pages[name] = there
        while len(self._pages) > self._limit:
            self._pages.popitem(last=False)
