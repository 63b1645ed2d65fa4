"""`verified`: prompt after prompt in every way, as long as there is time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from kvcache.certificates.answer_digests import Record, first_difference
from kvcache.certificates.certificate import Certificate, Row, identity_of, machine_of
from kvcache.certificates.computed_ways import Outcome, Way, cold, ways_of
from kvcache.certificates.levels import Level
from kvcache.certificates.seeded_prompts import Case, case_of
from kvcache.certificates.subject import Subject

__all__ = ["Bounds", "named", "verified"]

MOST_PROMPTS = 1000
_COLD = "cold"


class Bounds(NamedTuple):
    """How much is computed.

    Attributes:
        seconds: after which nothing new begins; the first cold text is computed in any case.
        prompts: at most.
        clock: of the seconds.
    """

    seconds: float
    prompts: int = MOST_PROMPTS
    clock: Callable[[], float] = monotonic


class _Tally:
    """The comparisons of one way."""

    def __init__(self, name: str) -> None:
        self.name, self.prompts, self.tokens, self.different = name, 0, 0, 0
        self.first: str | None = None
        self._note, self._missing = "", dict[str, int]()

    def add(self, number: int, want: Record, got: Outcome) -> None:
        """Compare a prompt, if it was computed in this way."""
        if got.record is None:
            self._missing[got.note] = self._missing.get(got.note, 0) + 1
            return
        self._note = got.note
        self.prompts += 1
        self.tokens += want.prompt + len(want.tokens)
        if (found := first_difference(want, got.record)) is not None:
            self.different += 1
            self.first = self.first or f"prompt {number}, {found}"

    def row(self, records: int) -> Row:
        """The row of the table, if at most `records` prompts could be compared."""
        missing = dict(self._missing)
        if late := records - self.prompts - sum(missing.values()):
            missing["no time"] = late
        notes = [self._note, *(f"{count} not: {why}" for why, count in missing.items())]
        return Row(self.name, self.prompts, self.tokens, self.different, self.first, "; ".join(filter(None, notes)))


def named(ways: Sequence[str], levels: Sequence[str], subject: Subject, most_threads: int) -> list[Way]:
    """The ways of a subject that some names begin; all, where there are no names.

    ValueError: a name that begins none.
    """
    found = ways_of(subject, most_threads)
    for name in ways:
        known = [_COLD, *(way.name for way in found), *(f"level {level}" for level in levels)]
        if not any(each.startswith(name) for each in known):
            raise ValueError(f"way: expected the beginning of one of {', '.join(known)}, got {name}")
    return [way for way in found if not ways or way.name.startswith(tuple(ways))]


def verified(
    make_subject: Callable[[], Subject], bounds: Bounds, version: str, most_threads: int, ways: Sequence[str] = (),
    levels: Sequence[Level] = (), against: Certificate | None = None,
) -> Certificate:
    """Compute prompts in every way, and compare each with the cold text.

    Half of the time is for other levels, which processes of their own compute when the network of this one is dropped.

    Args:
        make_subject: loads the network.
        bounds: of time and prompts.
        version: of the library.
        most_threads: that the CPU has.
        ways: beginnings of names of ways; none: all.
        levels: that other processes compute.
        against: a certificate that will be compared with this one.

    Raises:
        ValueError: see `named` and `Certificate.expect`.
        KvCacheError: another process failed.
    """
    began = bounds.clock()
    subject = make_subject()
    identity, machine = identity_of(subject), machine_of(version)
    if against is not None:
        against.expect(identity)
    known = named(ways, [level.name for level in levels], subject, most_threads)
    levels = [level for level in levels if not ways or f"level {level.name}".startswith(tuple(ways))]
    tallies = {way.name: _Tally(way.name) for way in known}
    end = began + bounds.seconds * (0.5 if levels and known else 0.2 if levels else 1.0)
    records = list[Record]()
    while len(records) < bounds.prompts and (not records or bounds.clock() < end):
        case = case_of(subject.model, len(records))
        want = cold(subject, case)
        records.append(want)
        _compare(subject, case, want, known, tallies, lambda: bounds.clock() < end)
    del subject  # before others need the memory of its weights
    rows = [tally.row(len(records)) for tally in tallies.values()]
    for i, level in enumerate(levels):
        left = (began + bounds.seconds - bounds.clock()) / (len(levels) - i)
        rows.append(_level_row(level, records, left))
    return Certificate(identity, machine, tuple(records), tuple(rows))


def _compare(
    subject: Subject, case: Case, want: Record, ways: Sequence[Way], tallies: dict[str, _Tally],
    has_time: Callable[[], bool],
) -> None:
    for way in ways:
        if not has_time():
            return
        tallies[way.name].add(case.number, want, way.run(subject, case, want))


def _level_row(level: Level, records: Sequence[Record], seconds: float) -> Row:
    tally = _Tally(f"level {level.name}")
    for number, (want, got) in enumerate(zip(records, level.records(len(records), seconds), strict=False)):
        tally.add(number, want, Outcome(got))
    return tally.row(len(records))
