"""Pictures of tables; needs matplotlib (the extra `[bench]`)."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

from bench.support.common import Result, Table

__all__ = ["plot_lines", "plot_table", "pyplot", "save"]


def pyplot() -> Any:
    """Import matplotlib's pyplot with a backend that needs no window."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'kvcache-cpu[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(plt: Any, figure: Any, folder: str, title: str, kind: str = "png") -> Path:
    """Write the figure into the folder under its title; `kind` is "svg" or "png"."""
    path = Path(folder) / (re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] + "." + kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=120)
    plt.close(figure)
    return path


def plot_table(table: Table, results: list[Result], folder: str) -> Path:
    """Draw a table of sizes as lines and any other table as bars, with times on a logarithmic scale."""
    if table.growth:
        lines = {r.what: {name: median(t) * 1e6 for name, t in r.times.items()} for r in results}
        return plot_lines(lines, folder, table.title, "size", "microseconds", log=True)
    plt = pyplot()
    names = list(dict.fromkeys(name for r in results for name in r.times))
    figure, axes = plt.subplots(figsize=(9, 1 + 0.25 * len(results) * len(names)))
    height = 0.8 / len(names)
    for j, name in enumerate(names):
        at = [i + j * height for i, r in enumerate(results) if name in r.times]
        axes.barh(at, [median(r.times[name]) * 1e6 for r in results if name in r.times], height, label=name)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(results))], [r.what for r in results])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("microseconds")
    axes.set_title(table.title)
    axes.legend()
    return save(plt, figure, folder, table.title)


def plot_lines(
    lines: dict[str, dict[str, float]], folder: str, title: str, x: str, y: str, *, log: bool = False
) -> Path:
    """Draw a line per name over the same points."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, points in lines.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return save(plt, figure, folder, title)
