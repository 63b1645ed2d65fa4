"""The output of a run: the machine, tables of times, bounds and verdicts, as text, Markdown and JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import kvcache
from bench.support.common import Result, Table

__all__ = [
    "environment", "markdown", "print_table", "reason_of", "save_json", "show", "text_table", "time_text", "write_json",
]


def environment() -> dict[str, str]:
    """The machine and the versions to which the figures apply."""
    return {
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "simd": kvcache.simd_level(),
        "threads": str(kvcache.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("kvcache", "numpy")),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        if "model name" in fields:
            return f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "in place"


def _commit() -> str:
    here = Path(__file__).parent
    try:
        run = ["git", "-C", str(here), "describe", "--always", "--dirty"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def reason_of(error: BaseException) -> str:
    """The kind of an error and the first line that it says, if it says any: why a rival is not measured."""
    said = next(filter(None, map(str.strip, str(error).splitlines())), "")
    return f"{type(error).__name__}: {said}"[:120] if said else type(error).__name__


def time_text(seconds: float) -> str:
    """A time with three digits and its unit."""
    for scale, unit in ((1e-6, "ns"), (1e-3, "us"), (1.0, "ms")):
        if seconds < scale:
            return f"{seconds / scale * 1e3:.3g} {unit}"
    return f"{seconds:.3g} s"


_FIRST, _OTHERS = 28, 12  # characters of a column whose rows are not known yet


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """Plain text columns: the first is left-aligned, the others right-aligned."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, rest = row[0].ljust(widths[0]), [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """The same as a Markdown table."""
    marks = [":--"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, marks, *rows])


def _times(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    columns = list(dict.fromkeys(name for r in results for name in r.times))
    rows = []
    for result in results:
        cells = [time_text(median(result.times[c])) if c in result.times else "-" for c in columns]
        rows.append([result.what, *cells])
    return ["median time", *columns], rows


def _bounds(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for result in results:
        for claim, middle, low, high, met in result.verdicts():
            verdict = "met" if met else "MISSED"
            rows.append([f"{result.what}; {claim}", f"{middle:.2f}", f"{low:.2f} .. {high:.2f}", verdict])
    return ["bound", "ratio", "min .. max", "verdict"], rows


def print_table(table: Table, results: list[Result], *, as_markdown: bool = False) -> int:
    """Print times and bounds; returns the number of bounds missed."""
    layout = markdown if as_markdown else text_table
    print(f"\n{'### ' if as_markdown else ''}{table.title}\n")
    print(layout(*_times(results)))
    header, rows = _bounds(results)
    if rows:
        print("\n" + layout(header, rows))
    for note in table.notes:
        print(f"\n{note}")
    return sum(row[-1] == "MISSED" for row in rows)


def show(
    as_markdown: bool, title: str, header: list[str], rows: Iterable[list[str]], *notes: str | Callable[[], str]
) -> None:
    """Print a table of text with its title and notes.

    Args:
        as_markdown: whether it is Markdown.
        title, header: before the rows.
        rows: a list; or an iterator, of which each is printed as it comes.
        notes: behind them; functions are called when the rows are there.
    """
    print(f"\n{'### ' if as_markdown else ''}{title}\n", flush=True)
    if isinstance(rows, list):
        print((markdown if as_markdown else text_table)(header, rows))
    else:
        _show_each(as_markdown, header, rows)
    for note in notes:
        print(f"\n{note if isinstance(note, str) else note()}")
    print(flush=True)


def _show_each(as_markdown: bool, header: list[str], rows: Iterable[list[str]]) -> None:
    """Print rows as they come, in columns of a width that most cells have."""
    if as_markdown:
        print(markdown(header, []), flush=True)
    else:
        header = [header[0].ljust(_FIRST), *(cell.rjust(_OTHERS) for cell in header[1:])]
        print(text_table(header, []), flush=True)
    for row in rows:
        padded = [row[0].ljust(len(header[0])), *(c.rjust(len(h)) for c, h in zip(row[1:], header[1:], strict=True))]
        print("| " + " | ".join(row) + " |" if as_markdown else "  ".join(padded).rstrip(), flush=True)


def write_json(path: str | None, **data: Any) -> None:
    """Write what `--json` asks for, if it does: figures by name, with the environment."""
    if path:
        Path(path).write_text(json.dumps({"environment": environment(), **data}, indent=1) + "\n")


def save_json(path: str, tables: list[tuple[Table, list[Result]]], **more: Any) -> None:
    """Write all measurements, in seconds, and the verdicts."""
    tables_of: list[dict[str, Any]] = []
    for table, results in tables:
        cases = []
        for r in results:
            claims = [
                {"claim": str(claim), "ratio": middle, "min": low, "max": high, "met": met}
                for claim, middle, low, high, met in r.verdicts()
            ]
            cases.append({"what": r.what, "seconds": r.times, "facts": r.facts, "claims": claims})
        tables_of.append({"title": table.title, "growth": table.growth, "cases": cases})
    write_json(path, **more, tables=tables_of)
