"""The measuring of all benches: candidates side by side, round by round, and their bounds.

A `Case` has several candidates that do the same work, or one candidate at several sizes. Each round times every
candidate once, starting with another one each time, so that a slow phase of the machine affects all of them. Ratios
are taken within a round; the reports show the median over the rounds with its minimum and maximum.

Work on one thread is timed by the processor time of that thread. On a shared machine the wall clock would charge a
candidate of 3 ms for the time slices of others, but mostly not one of 300 us, which would distort every ratio.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

__all__ = [
    "SETTLE", "Candidate", "Case", "Claim", "Result", "Table",
    "alternating", "at_most", "faster", "repeat", "run_case", "share_of", "size_name", "timed",
]

MIN_SAMPLE = 200e-6  # seconds: shorter work is repeated, so that the clock costs less than a thousandth
ALTERNATIONS = 15
SETTLE = 25e-3  # seconds: threads of OpenMP spin 300,000 pauses after their work, 18 ms where one takes 140 cycles
SHORT = 5e-3  # seconds: shorter work gets an untimed call after a pause, which wakes its threads


@dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    Attributes:
        name: the column.
        run: does the work `count` times; its return value is ignored.
        count: operations in one call of `run`; a fraction if a call does part of the work.
        before: called before each `run`, not timed; a candidate with `before` is not repeated within a sample.
        facts: further numbers by name, such as the `work` of an operation in bytes or FLOP.
        seconds: replaces the measurement: a number, for bounds that are given as a time; or a function that does the
            work and returns the seconds per operation, for candidates that time themselves.
    """

    name: str
    run: Callable[[], object] = lambda: None
    count: float = 1
    before: Callable[[], object] | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    seconds: float | Callable[[], float] | None = None


@dataclass(frozen=True)
class Claim:
    """A bound on the time of `one` over the time of `other`; with `turned`, on the inverse.

    `share` marks bounds below 1 that are printed as a share of the speed of `other`, a ceiling.
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
    """`one` reaches at least this share of the speed of `other`."""
    return Claim(one, other, bound, turned=True, share=True)


def alternating(name: str, before: Callable[[], object], run: Callable[[], object], count: float) -> Candidate:
    """A candidate for warm work that must be undone each time: calls `before` and `run` alternately, and times `run`.

    A plain candidate with `before` is timed once in a round, after all others. For work of microseconds this would
    mostly measure the state of the CPU's caches.
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


def repeat(count: int, call: Callable[..., object], *arguments: object) -> None:
    """Make the same call `count` times."""
    for _ in range(count):
        call(*arguments)


def timed(run: Callable[[], object]) -> float:
    """Seconds by the wall clock."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def size_name(size: int) -> str:
    """The name of a size's column: 1k, 10k, 1M."""
    return f"{size // 1000}k" if size < 1_000_000 else f"{size // 1_000_000}M"


@dataclass(frozen=True)
class Case:
    """A row of a table: `make` builds the data and returns the candidates; claims about absent ones are skipped."""

    what: str
    make: Callable[[], Iterable[Candidate]]
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Table:
    """Cases with the same columns. `growth`: the columns are sizes; `threaded`: the work uses several threads."""

    title: str
    cases: tuple[Case, ...]
    growth: bool = False
    threaded: bool = False  # timed by the wall clock
    notes: tuple[str, ...] = ()


@dataclass
class Result:
    """Seconds per operation of every candidate, one value per round, and the candidates' facts."""

    what: str
    times: dict[str, list[float]]
    claims: tuple[Claim, ...] = field(default=())
    facts: dict[str, dict[str, float]] = field(default_factory=dict)

    def verdicts(self) -> list[tuple[Claim, float, float, float, bool]]:
        """`(claim, median ratio, lowest, highest, met)` for each claim with both candidates measured."""
        rows = []
        for claim in self.claims:
            if claim.one in self.times and claim.other in self.times:
                ratios = claim.ratios(self.times)
                middle = median(ratios)
                rows.append((claim, middle, min(ratios), max(ratios), claim.met(middle)))
        return rows


def run_case(case: Case, rounds: int, *, threaded: bool = False, settle: float = 0.0) -> Result:
    """Build the case, time its candidates over `rounds` rounds, and free its data.

    Args:
        threaded: whether candidates use several threads; if so, the wall clock is used, else this thread's time.
        settle: seconds to wait before each sample, since threads of other candidates may still spin.
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
    """The calls in one sample, and the seconds of one call. The trial run also warms the caches."""
    once = _sample(candidate, 1, clock) * candidate.count
    if candidate.before is not None:
        return 1, once
    if once < 100 * SHORT:
        once = min(once, *(_sample(candidate, 1, clock) * candidate.count for _ in range(2)))
    return max(1, min(100_000, round(MIN_SAMPLE / max(once, 1e-9)))), once
