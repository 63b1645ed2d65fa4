"""`Parts`: a bench of several parts, each of which is a method that prints its tables."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.support.report import show, write_json

__all__ = ["Parts", "verdict"]


class Parts:
    """One run of the bench: its options, its output, and its results.

    Attributes:
        table: prints a table.
        data: what the parts measured, by their names.
        missed: bounds that were missed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.quick = options, options.quick
        self.table = partial(show, options.markdown)
        self.data: dict[str, Any] = {}
        self.missed = 0

    def run(self, parts: Sequence[str], **more: Any) -> None:
        """Run parts, and write JSON with `more` after each, so that an interrupted run keeps its results."""
        for part in parts:
            start = time.perf_counter()
            measure: Callable[[], None] = getattr(self, part)
            measure()
            print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
            write_json(self.options.json, **more, **self.data)
        if self.missed:
            print(f"\n{self.missed} bounds missed")


def verdict(name: str, figure: str, value: float, bound: float) -> dict[str, Any]:
    """A bound on a figure of a format, and what was measured."""
    return {"format": name, "figure": figure, "bound": bound, "value": value, "met": value <= bound}
