"""`Tables`: the tables of a run as they come, and at its end JSON, pictures, and whether every bound was met."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.support.common import SETTLE, Case, Result, Table, run_case
from bench.support.over_threads import plot_over_threads, print_over_threads
from bench.support.plot import plot_table
from bench.support.rates import Columns, print_rates
from bench.support.report import save_json, show

__all__ = ["Done", "Tables", "draw_each", "measured"]

Done = list[tuple[Table, list[Result]]]


def measured(case: Case, rounds: int) -> Result:
    """Time work on several threads, each sample after threads of others have stopped to spin."""
    return run_case(case, rounds, threaded=True, settle=SETTLE)


def draw_each(done: Done, folder: str) -> list[Path]:
    """Draw a picture of each table."""
    return [plot_table(table, results, folder) for table, results in done]


class Tables:
    """The measurements of a run.

    Args:
        options: those that all benches have.

    Attributes:
        done: what was measured.
        missed: the number of bounds that were missed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.done: Done = []
        self.missed = 0

    def rates(self, title: str, columns: Columns, results: list[Result]) -> None:
        """Print a table of speeds, and keep its measurements."""
        self.missed += print_rates(title, columns, results, as_markdown=self._options.markdown)
        self.done.append((Table(title, ()), results))

    def rows(self, title: str, header: list[str], rows: list[list[str]], results: list[Result], *notes: str) -> None:
        """Print a table of text with notes, and keep its measurements."""
        show(self._options.markdown, title, header, rows, *notes)
        self.done.append((Table(title, ()), results))

    def end(
        self, draw: Callable[[Done, str], Iterable[Path]] | None = None, *, threads: bool = False, **more: Any
    ) -> None:
        """Write what `--json` and `--plot` ask for.

        Args:
            draw: draws pictures of the tables in a folder.
            threads: whether works on several numbers of threads get tables and pictures of their own.
            more: further figures for JSON, by name.
        """
        if self._options.json:
            save_json(self._options.json, self.done, **more)
        if threads:
            print_over_threads(self.done, as_markdown=self._options.markdown)
        if folder := self._options.plot:
            drawn = [*draw(self.done, folder)] if draw else []
            for path in drawn + (plot_over_threads(self.done, folder) if threads else []):
                print(path)

    def verdict(self) -> int:
        """Print whether every bound was met; the exit status."""
        print(f"\n{self.missed} bounds missed" if self.missed else "\nevery bound met")
        return int(self.missed > 0)
