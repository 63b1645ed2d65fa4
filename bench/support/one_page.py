"""`python -m bench all`: every bench in a process of its own, and one page of all their tables.

    FOLDER/page.md           the machine, a table of the runs, then the tables and pictures of each bench
    FOLDER/NAME.json         the figures of a bench
    FOLDER/pictures/         what `--plot` draws

`--beside OTHER`, the folder of another machine or commit, adds tables of the figures that both have, with ratios.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.support.plot import written
from bench.support.report import environment, markdown

__all__ = ["Run", "add_arguments", "beside", "figures", "main", "page_of"]

OTHERS = ("agents-cli", "routing", "soak", "tiles")  # they need programs, other engines, an hour, or a CPU with AMX
_TABLE = "\n### "  # what the title of a table begins with
_FACTS = ("cpu", "cores", "simd", "threads", "commit", "date")


class Run(NamedTuple):
    """A bench that ran: its name, what it printed, its exit status, the seconds it took, and its pictures."""

    name: str
    printed: str
    status: int
    seconds: float
    pictures: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """How it ended, in words: the last line of what it printed where it did not run."""
        if self.status in (0, 1) and _TABLE in self.printed:
            return "all bounds met" if self.status == 0 else "some bounds missed"
        return f"did not run: {(self.printed.strip().splitlines() or ['it printed nothing'])[-1][:200]}"

    @property
    def tables(self) -> str:
        """Markdown behind the line of the machine; empty if it did not run."""
        return "" if self.verdict.startswith("did not run") else self.printed.split("\n", 1)[1].strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--page", metavar="FOLDER", default="page", help="where the page goes; default: %(default)s")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these benches alone")
    parser.add_argument("--minutes", type=float, default=60, help="that one bench may take; default: %(default)s")
    parser.add_argument("--beside", metavar="FOLDER", help="the folder of another machine's page, for ratios")


def main(options: argparse.Namespace) -> int:
    """Run the benches, and write the page after each of them; 1 if one failed or missed a bound."""
    from bench.__main__ import BENCHES

    names = options.only or [name for name in BENCHES if name not in (*OTHERS, "all")]
    if unknown := [name for name in names if name not in BENCHES or name == "all"]:
        raise SystemExit(f"--only: expected some of {', '.join(BENCHES)}, got {', '.join(unknown)}")
    folder, other = Path(options.page), None if options.beside is None else Path(options.beside)
    if other is not None and not any(other.glob("*.json")):
        raise SystemExit(f"--beside: expected a folder of an earlier page, got {other} without JSON files")
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    for name in names:
        runs.append(run_bench(name, folder, options.quick, options.minutes))
        print(f"{name}: {runs[-1].verdict}, {runs[-1].seconds:.0f} s", flush=True)
        (folder / "page.md").write_text(page_of(runs, folder, other), encoding="utf-8")
    print(folder / "page.md")
    return int(any(run.status for run in runs))


def run_bench(name: str, folder: Path, quick: bool, minutes: float) -> Run:
    """Run a bench in a process of its own, with `--markdown`, `--json` and, where matplotlib is there, `--plot`."""
    pictures = folder / "pictures" / name
    command = [sys.executable, "-m", "bench", name, "--markdown", "--json", str(folder / f"{name}.json")]
    command += ["--quick"] * quick + (["--plot", str(pictures)] if _can_plot() else [])
    (folder / f"{name}.json").unlink(missing_ok=True)
    start = time.perf_counter()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60 * minutes, check=False)
        printed, status = ran.stdout, ran.returncode
        if _TABLE not in printed or status not in (0, 1):
            printed += ran.stderr
    except subprocess.TimeoutExpired:
        printed, status = f"it took more than {minutes:g} minutes", 124
    found = sorted(each.relative_to(folder).as_posix() for each in pictures.glob("*")) if pictures.is_dir() else []
    return Run(name, printed, status, time.perf_counter() - start, tuple(found))


def _can_plot() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def page_of(runs: Sequence[Run], folder: Path, other: Path | None = None) -> str:
    """The page of some runs, Markdown, whose JSON files are in `folder`; `other` has those of another machine."""
    facts = environment()
    parts = [
        "# Figures of one machine", f"`python -m bench all`: {', '.join(f'{key} {facts[key]}' for key in _FACTS)}.",
        markdown(["bench", "verdict", "seconds"], [[run.name, run.verdict, f"{run.seconds:.0f}"] for run in runs]),
    ]
    for run in runs:
        if run.tables:
            pictures = [f"![{Path(each).stem.replace('-', ' ')}]({each})" for each in run.pictures]
            parts += [f"## {run.name}", run.tables, *pictures]
        found = None if other is None else other / f"{run.name}.json"
        if found is not None and found.is_file() and (folder / f"{run.name}.json").is_file():
            here, there = (json.loads(each.read_text()) for each in (folder / f"{run.name}.json", found))
            parts += [f"### {run.name}, beside {_machine(there)}", beside(here, there)]
    return "\n\n".join(parts) + "\n"


def _machine(measured: dict[str, Any]) -> str:
    facts = measured.get("environment", {})
    return ", ".join(f"{key} {facts[key]}" for key in _FACTS if key in facts) or "an unknown machine"


def beside(here: dict[str, Any], there: dict[str, Any]) -> str:
    """A Markdown table of the figures that two JSON files of a bench share, and their ratios."""
    ours, theirs = (dict(figures({k: v for k, v in each.items() if k != "environment"})) for each in (here, there))
    rows = [
        [name, written(ours[name]), written(theirs[name]), f"{ours[name] / theirs[name]:.2f}" if theirs[name] else "-"]
        for name in ours
        if name in theirs
    ]
    return markdown(["figure", "here", "there", "here / there"], rows)


def figures(measured: Any, *names: str) -> Iterator[tuple[str, float]]:
    """Numbers of a JSON value with their names, whose parts a slash joins; of a list of numbers the median.

    An object in a list is named by its "title" or "what", or by its place.
    """
    if isinstance(measured, bool):
        return
    if isinstance(measured, int | float):
        yield " / ".join(names), float(measured)
    elif isinstance(measured, dict):
        for name, value in measured.items():
            yield from figures(value, *names, str(name))
    elif isinstance(measured, list) and measured and all(type(each) in (int, float) for each in measured):
        yield " / ".join(names), float(median(measured))
    elif isinstance(measured, list):
        for place, value in enumerate(measured):
            named = value if isinstance(value, dict) else {}
            yield from figures(value, *names, str(named.get("title", named.get("what", place))))
