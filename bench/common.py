"""How everything here is measured: candidates side by side, round by round, and the bounds they are held to.

A `Case` names a few candidates that do the same work, or one candidate at several sizes. Each round times every
candidate once, in turning order, so that a slow spell of the machine hits all of them; a ratio is taken within
a round, and what is reported is the median over the rounds with its minimum and maximum.

What runs on one thread is timed by the processor time of that thread: on a shared machine the wall clock charges a
candidate of 3 ms for the time slices of others, and one of 300 us mostly not, which bends every ratio.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Candidate", "Case", "Claim", "Result", "Table", "at_most", "faster", "run_case", "size_name"]

MIN_SAMPLE = 200e-6  # seconds: what is shorter is repeated until the clock's own cost is below a thousandth


@dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    Attributes:
        name: the column.
        run: does it, `count` times over; its return value is ignored.
        count: operations in one call of `run`.
        before: called before each `run`, not timed; a candidate with one is not repeated within a sample.
    """

    name: str
    run: Callable[[], object]
    count: int = 1
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Claim:
    """A bound on the time of `one` over the time of `other`; `turned` reads it the other way round."""

    one: str
    other: str
    bound: float
    turned: bool = False

    def ratios(self, times: dict[str, list[float]]) -> list[float]:
        pairs = zip(times[self.one], times[self.other], strict=True)
        return [b / a if self.turned else a / b for a, b in pairs]

    def met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.turned else ratio <= self.bound

    def __str__(self) -> str:
        if self.turned:
            return f"{self.one}: at least {self.bound:g}x faster than {self.other}"
        return f"{self.one}: at most {self.bound:g}x {self.other}"


def at_most(bound: float, one: str, other: str) -> Claim:
    """`one` takes at most `bound` times as long as `other`."""
    return Claim(one, other, bound)


def faster(bound: float, one: str, other: str) -> Claim:
    """`one` is at least `bound` times as fast as `other`."""
    return Claim(one, other, bound, turned=True)


def size_name(size: int) -> str:
    """The column of a size: 1k, 10k, 1M."""
    return f"{size // 1000}k" if size < 1_000_000 else f"{size // 1_000_000}M"


@dataclass(frozen=True)
class Case:
    """A row of a table: `make` builds the data and returns the candidates; claims on absent ones are skipped."""

    what: str
    make: Callable[[], Iterable[Candidate]]
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Table:
    """Cases with the same columns. `growth` says that the columns are sizes, `threaded` that the work is."""

    title: str
    cases: tuple[Case, ...]
    growth: bool = False
    threaded: bool = False  # timed by the wall clock
    notes: tuple[str, ...] = ()


@dataclass
class Result:
    """Seconds per operation of every candidate, a value per round."""

    what: str
    times: dict[str, list[float]]
    claims: tuple[Claim, ...] = field(default=())

    def verdicts(self) -> list[tuple[Claim, float, float, float, bool]]:
        """`(claim, median ratio, lowest, highest, met)` for each claim whose two sides were measured."""
        rows = []
        for claim in self.claims:
            if claim.one in self.times and claim.other in self.times:
                ratios = claim.ratios(self.times)
                middle = median(ratios)
                rows.append((claim, middle, min(ratios), max(ratios), claim.met(middle)))
        return rows


def run_case(case: Case, rounds: int, *, threaded: bool = False) -> Result:
    """Build the case, time its candidates over `rounds` rounds, let go of its data."""
    clock = time.perf_counter if threaded else time.thread_time
    candidates = list(case.make())
    repeats = [_repeats(c, clock) for c in candidates]
    times: dict[str, list[float]] = {c.name: [] for c in candidates}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for i in range(len(candidates)):
                k = (i + turn) % len(candidates)
                times[candidates[k].name].append(_sample(candidates[k], repeats[k], clock))
    finally:
        gc.enable()
    return Result(case.what, times, case.claims)


def _sample(candidate: Candidate, repeats: int, clock: Callable[[], float]) -> float:
    if candidate.before is not None:
        candidate.before()
    run = candidate.run
    start = clock()
    for _ in range(repeats):
        run()
    return max(clock() - start, 1e-9) / (repeats * candidate.count)


def _repeats(candidate: Candidate, clock: Callable[[], float]) -> int:
    """Calls in one sample. The trial run also warms what should be warm."""
    if candidate.before is not None:
        _sample(candidate, 1, clock)
        return 1
    once = min(_sample(candidate, 1, clock) for _ in range(3)) * candidate.count
    return max(1, min(100_000, round(MIN_SAMPLE / max(once, 1e-9))))
