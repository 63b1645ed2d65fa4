"""Which worker of a fleet gets a request: in turn, or where the most of its prefix is, as far as block events tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from bench.fleet.costs import Costs

__all__ = ["PrefixRouter", "RoundRobin", "Router"]


class Router(Protocol):
    """Chooses workers by their numbers."""

    def choose(
        self, names: Sequence[int], num_tokens: int, page_size: int, stored: int, now: float
    ) -> tuple[int, float]:
        """The worker of a prompt, of whose pages the shared store has the first `stored`; its expected seconds."""

    def tell(self, now: float, worker: int, stored: Iterable[int], removed: Iterable[int]) -> None:
        """Note an event of a worker, which removed pages before it stored others."""

    def done(self, worker: int, load: float) -> None:
        """Note that a worker has computed a prompt that took `load` of its expected seconds."""


class RoundRobin:
    """One after another."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers, self._next = num_workers, 0

    def choose(
        self, names: Sequence[int], num_tokens: int, page_size: int, stored: int, now: float
    ) -> tuple[int, float]:
        self._next += 1
        return (self._next - 1) % self._num_workers, 0.0

    def tell(self, now: float, worker: int, stored: Iterable[int], removed: Iterable[int]) -> None:
        pass

    def done(self, worker: int, load: float) -> None:
        pass


class PrefixRouter:
    """The worker that is expected to compute a prompt first: what it was given before, and what it lacks of this one.

    It knows of pages what workers told it `delay` seconds ago or earlier, and of loads what it has sent itself.
    """

    def __init__(self, num_workers: int, costs: Costs) -> None:
        self._costs, self._all = costs, (1 << num_workers) - 1
        self._holders: dict[int, int] = {}  # a page -> a bit for each worker that has it
        self._events: deque[tuple[float, int, list[int], list[int]]] = deque()
        self._loads, self._turn = [0.0] * num_workers, 0

    def tell(self, now: float, worker: int, stored: Iterable[int], removed: Iterable[int]) -> None:
        self._events.append((now + self._costs.event_delay, 1 << worker, list(stored), list(removed)))

    def done(self, worker: int, load: float) -> None:
        self._loads[worker] = max(0.0, self._loads[worker] - load)

    def holders(self, now: float) -> dict[int, int]:
        """A bit for each worker that has a page, of the pages that it knows of."""
        self._learn(now)
        return dict(self._holders)

    def _learn(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            _, bit, stored, removed = self._events.popleft()
            for name in removed:
                if not (rest := self._holders.get(name, 0) & ~bit):
                    self._holders.pop(name, None)
                else:
                    self._holders[name] = rest
            for name in stored:
                self._holders[name] = self._holders.get(name, 0) | bit

    def matches(self, names: Sequence[int], now: float) -> dict[int, int]:
        """The pages of a prompt that each worker has, of those that have any."""
        self._learn(now)
        found, having, count = {}, self._all, 0
        for name in [*names, -1]:
            still = having & self._holders.get(name, 0)
            gone = having & ~still if count else 0
            while gone:
                found[(gone & -gone).bit_length() - 1] = count
                gone &= gone - 1
            having, count = still, count + 1
            if not having:
                break
        return found

    def choose(
        self, names: Sequence[int], num_tokens: int, page_size: int, stored: int, now: float
    ) -> tuple[int, float]:
        matches, loads, costs = self.matches(names, now), self._loads, self._costs
        read = costs.transfer(page_size)

        def expected(held: int) -> float:
            have = max(held, stored)
            cached = min(have * page_size, num_tokens - 1)
            return costs.prompt(num_tokens, cached) + (have - held) * read

        count = len(loads)
        self._turn = (self._turn + 1) % count
        turned = loads[self._turn :] + loads[: self._turn]
        least = {0: (turned.index(min(turned)) + self._turn) % count}  # pages -> the least loaded worker that has them
        for worker, held in matches.items():
            if held not in least or loads[worker] < loads[least[held]]:
                least[held] = worker
        load, best = min((loads[worker] + expected(held), -held, worker) for held, worker in least.items())[::2]
        load -= loads[best]
        loads[best] += load
        return best, load
