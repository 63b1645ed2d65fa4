"""Tables of speed: a row per subject, with its ceiling, its rivals and its bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from bench.support.common import Claim, Result
from bench.support.report import markdown, text_table, time_text

__all__ = ["Columns", "print_rates", "rate_rows", "unit_text"]


@dataclass(frozen=True)
class Columns:
    """The columns of a table.

    Attributes:
        subjects: the candidates that get a row.
        ceilings: subject -> the candidates that are its ceilings; the nearer one, which takes longer, counts.
        rivals: the candidates that it is compared with.
        unit: the unit of the fact `work` per second.
        hot: subject -> the same candidate with all data in the CPU's caches.
        scale: the amount of `work` in one unit.
    """

    subjects: tuple[str, ...]
    ceilings: Callable[[str], tuple[str, ...]] = field(default=lambda subject: ())
    rivals: tuple[str, ...] = ()
    unit: str = "GB/s"
    hot: Callable[[str], str] = field(default=lambda subject: "")
    scale: float = 1e9


def unit_text(value: float) -> str:
    """A number with three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def print_rates(title: str, columns: Columns, results: list[Result], *, as_markdown: bool = False) -> int:
    """Print the table; returns the number of bounds missed."""
    header, rows = rate_rows(columns, results)
    layout = markdown if as_markdown else text_table
    print(f"\n{'### ' if as_markdown else ''}{title}\n\n{layout(header, rows)}", flush=True)
    return sum(row[-1] == "MISSED" for row in rows)


def rate_rows(columns: Columns, results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and cells, without empty columns; a second bound of a subject gets its own line."""
    header = ["case", "", "median", "min .. max", "hot", columns.unit, "ceiling", "of ceiling", "error"]
    header += [f"vs {name}" for name in columns.rivals] + ["bound", "ratio", "in this run"]
    rows = []
    for result in results:
        for subject in columns.subjects:
            if subject in result.times:
                rows += _subject_rows(columns, result, subject)
    used = [i for i in range(len(header)) if i < 3 or any(row[i] for row in rows)]
    return [header[i] for i in used], [[row[i] for i in used] for row in rows]


def _subject_rows(columns: Columns, result: Result, subject: str) -> list[list[str]]:
    times, facts = result.times[subject], result.facts.get(subject, {})
    cells = [result.what, subject, time_text(median(times)), f"{time_text(min(times))} .. {time_text(max(times))}"]
    hot = result.times.get(columns.hot(subject))
    cells.append(time_text(median(hot)) if hot else "")
    cells += _against_ceiling(columns, result, subject)
    cells.append(f"{facts['error']:.1e}" if "error" in facts else "")
    for rival in columns.rivals:
        cells.append(_speed(result, rival, subject) if rival != subject else "")
    verdicts = [v for v in result.verdicts() if v[0].one == subject]
    if not verdicts:
        return [[*cells, "", "", ""]]
    blank = [""] * len(cells)
    return [[*(blank if i else cells), *_verdict(*v)] for i, v in enumerate(verdicts)]


def _against_ceiling(columns: Columns, result: Result, subject: str) -> list[str]:
    """Our rate, the ceiling's rate, and the median of their ratio over the rounds."""
    work = result.facts.get(subject, {}).get("work")
    if not work:
        return ["", "", ""]
    scale = columns.scale
    ours = unit_text(work / median(result.times[subject]) / scale)
    measured = [name for name in columns.ceilings(subject) if name in result.times]
    if not measured:
        return [ours, "", ""]
    fulls = {name: result.facts[name].get("work", work) for name in measured}
    ceiling = max(measured, key=lambda name: median(result.times[name]) / fulls[name])
    full = fulls[ceiling]
    ratios = [(work / a) / (full / b) for a, b in zip(result.times[subject], result.times[ceiling], strict=True)]
    return [ours, unit_text(full / median(result.times[ceiling]) / scale), f"{median(ratios):.0%}"]


def _speed(result: Result, rival: str, subject: str) -> str:
    """The speed of the subject relative to the rival."""
    if rival not in result.times:
        return ""
    pairs = zip(result.times[rival], result.times[subject], strict=True)
    return f"{median(a / b for a, b in pairs):.2f}x"


def _verdict(claim: Claim, middle: float, low: float, high: float, met: bool) -> list[str]:
    if claim.share:
        return [f">= {claim.bound:.0%} of {claim.other}", f"{middle:.0%} ({low:.0%} .. {high:.0%})", _word(met)]
    sign = ">=" if claim.turned else "<="
    what = f"{claim.bound:g}x the speed of" if claim.turned else f"{claim.bound:g}x the time of"
    return [f"{sign} {what} {claim.other}", f"{middle:.2f} ({low:.2f} .. {high:.2f})", _word(met)]


def _word(met: bool) -> str:
    return "met" if met else "MISSED"
