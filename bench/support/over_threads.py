"""Measurements of one work on several numbers of threads: a table of times over threads, and its picture."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from bench.support.common import Result, Table
from bench.support.plot import plot_lines
from bench.support.report import show, time_text

__all__ = ["counts", "plot_over_threads", "print_over_threads"]

ON_THREADS = re.compile(r", (\d+) thr\b")
RATES = {"work": "GB/s", "flop": "GFLOP/s"}


def counts(text: str) -> list[int]:
    """`--threads 1,2,4`: numbers of threads."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of threads from 1, got {text}")
    return found


def _by_threads(done: Iterable[tuple[Table, list[Result]]]) -> dict[tuple[str, str], dict[int, Result]]:
    """`(title, case)` without the number of threads -> the results by that number, if there are several."""
    found: dict[tuple[str, str], dict[int, Result]] = {}
    for table, results in done:
        for result in results:
            number = ON_THREADS.search(table.title) or ON_THREADS.search(result.what)
            if number:
                title, what = (ON_THREADS.sub("", text) for text in (table.title, result.what))
                found.setdefault((title, what), {})[int(number[1])] = result
    return {key: results for key, results in found.items() if len(results) > 1}


def _rate(result: Result, name: str, tokens: bool) -> str:
    """Return the speed of a candidate: tokens per second, or bytes that it reads and operations."""
    facts, seconds = result.facts.get(name, {}), median(result.times[name])
    if "tokens/s" in facts:
        return f"{facts['tokens/s']:.3g} tokens/s"
    if tokens and "work" in facts:
        return f"{facts['work'] / seconds:.3g} tokens/s"
    return " ".join(f"{facts[fact] / seconds / 1e9:.3g} {unit}" for fact, unit in RATES.items() if fact in facts)


def print_over_threads(done: Iterable[tuple[Table, list[Result]]], *, as_markdown: bool) -> None:
    """Print a table for each work on several numbers of threads: times and rates of all candidates and ceilings."""
    for (title, what), results in _by_threads(done).items():
        numbers = sorted(results)
        rows = []
        for name in dict.fromkeys(name for number in numbers for name in results[number].times):
            having = [number for number in numbers if name in results[number].times]
            cells = {
                number: f"{time_text(median(results[number].times[name]))} "
                f"{_rate(results[number], name, 'tokens' in title)}".strip()
                for number in having
            }
            rows.append([name, *(cells.get(number, "") for number in numbers)])
        show(as_markdown, f"Over threads: {title}, {what}", ["", *(f"{number} thr" for number in numbers)], rows)


def plot_over_threads(done: Iterable[tuple[Table, list[Result]]], folder: str) -> list[Path]:
    """Draw the time of each candidate over the number of threads, a picture for each work on several of them."""
    paths = []
    for (title, what), results in _by_threads(done).items():
        lines: dict[str, dict[str, float]] = {}
        for number in sorted(results):
            for name, times in results[number].times.items():
                lines.setdefault(name, {})[str(number)] = median(times) * 1e6
        heading = f"{what} over threads, {title}"
        paths.append(plot_lines(lines, folder, heading, "threads", "microseconds", log=True))
    return paths
