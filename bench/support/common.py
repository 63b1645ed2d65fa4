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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

__all__ = [
    "Candidate", "Case", "Claim", "Result", "Table",
    "alternating", "at_most", "faster", "run_case", "share_of", "size_name",
]  # fmt: skip

MIN_SAMPLE = 200e-6  # seconds: what is shorter is repeated until the clock's own cost is below a thousandth
ALTERNATIONS = 15
SHORT = 5e-3  # seconds: what is shorter gets an untimed call after a pause, so that its threads are awake


@dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    Attributes:
        name: the column.
        run: does it, `count` times over; its return value is ignored.
        count: operations in one call of `run`; a fraction where a call does part of the work.
        before: called before each `run`, not timed; a candidate with one is not repeated within a sample.
        facts: what else is known of it, by name, such as the `work` of an operation in bytes or FLOP.
        seconds: takes the place of a measurement, for bounds that are given as a time; or does the work and
            returns what it took per operation, for those that tell it themselves.
    """

    name: str
    run: Callable[[], object] = lambda: None
    count: float = 1
    before: Callable[[], object] | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    seconds: float | Callable[[], float] | None = None


@dataclass(frozen=True)
class Claim:
    """A bound on the time of `one` over the time of `other`; `turned` reads it the other way round.

    `share` is for bounds below 1 that are read as a part of the speed of `other`, a ceiling.
    """

    one: str
    other: str
    bound: float
    turned: bool = False
    share: bool = False

    def ratios(self, times: dict[str, list[float]]) -> list[float]:
        pairs = zip(times[self.one], times[self.other], strict=True)
        return [b / a if self.turned else a / b for a, b in pairs]

    def met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.turned else ratio <= self.bound

    def __str__(self) -> str:
        if self.share:
            return f"{self.one}: at least {self.bound:.0%} of the speed of {self.other}"
        if self.turned:
            return f"{self.one}: at least {self.bound:g}x faster than {self.other}"
        return f"{self.one}: at most {self.bound:g}x {self.other}"


def at_most(bound: float, one: str, other: str) -> Claim:
    """`one` takes at most `bound` times as long as `other`."""
    return Claim(one, other, bound)


def faster(bound: float, one: str, other: str) -> Claim:
    """`one` is at least `bound` times as fast as `other`."""
    return Claim(one, other, bound, turned=True)


def share_of(bound: float, one: str, other: str) -> Claim:
    """`one` reaches at least this part of the speed of `other`."""
    return Claim(one, other, bound, turned=True, share=True)


def alternating(name: str, before: Callable[[], object], run: Callable[[], object], count: float) -> Candidate:
    """Work that has to be undone each time, warm: `before` and `run` in turn, `run` alone on the clock of its thread.

    A candidate with `before` alone is timed once in a round, right after all others; what takes microseconds is
    then mostly the caches that they left.
    """

    def seconds() -> float:
        times = []
        for _ in range(ALTERNATIONS):
            before()
            start = time.thread_time()
            run()
            times.append(time.thread_time() - start)
        return max(median(times), 1e-9) / count

    return Candidate(name, count=count, seconds=seconds)


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
    """Seconds per operation of every candidate, a value per round, and the candidates' facts."""

    what: str
    times: dict[str, list[float]]
    claims: tuple[Claim, ...] = field(default=())
    facts: dict[str, dict[str, float]] = field(default_factory=dict)

    def verdicts(self) -> list[tuple[Claim, float, float, float, bool]]:
        """`(claim, median ratio, lowest, highest, met)` for each claim whose two sides were measured."""
        rows = []
        for claim in self.claims:
            if claim.one in self.times and claim.other in self.times:
                ratios = claim.ratios(self.times)
                middle = median(ratios)
                rows.append((claim, middle, min(ratios), max(ratios), claim.met(middle)))
        return rows


def run_case(case: Case, rounds: int, *, threaded: bool = False, settle: float = 0.0) -> Result:
    """Build the case, time its candidates over `rounds` rounds, let go of its data.

    Args:
        threaded: whether candidates have threads of their own: then the clock is the wall's, else this thread's.
        settle: seconds to wait before each sample: other candidates' threads may still be spinning on the cores
            that the next one needs.
    """
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
                if settle:
                    _settle(candidates[k], repeats[k][1], settle)
                times[candidates[k].name].append(_sample(candidates[k], repeats[k][0], clock))
    finally:
        gc.enable()
    return Result(case.what, times, case.claims, {c.name: dict(c.facts) for c in candidates})


def _settle(candidate: Candidate, once: float, seconds: float) -> None:
    time.sleep(seconds)
    if candidate.before is None and once < SHORT:
        candidate.run()


def _sample(candidate: Candidate, repeats: int, clock: Callable[[], float]) -> float:
    if candidate.seconds is not None:
        return candidate.seconds() if callable(candidate.seconds) else candidate.seconds
    if candidate.before is not None:
        candidate.before()
    run = candidate.run
    start = clock()
    for _ in range(repeats):
        run()
    return max(clock() - start, 1e-9) / (repeats * candidate.count)


def _repeats(candidate: Candidate, clock: Callable[[], float]) -> tuple[int, float]:
    """Calls in one sample, and the seconds of one. The trial run also warms what should be warm."""
    once = _sample(candidate, 1, clock) * candidate.count
    if candidate.before is not None:
        return 1, once
    if once < 100 * SHORT:
        once = min(once, *(_sample(candidate, 1, clock) * candidate.count for _ in range(2)))
    return max(1, min(100_000, round(MIN_SAMPLE / max(once, 1e-9)))), once
