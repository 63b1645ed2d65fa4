"""Pictures of tables; needs matplotlib (the extra `[bench]`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.support.common import Result, Table

__all__ = ["name_ends", "plain_numbers", "plot_lines", "plot_table", "pyplot", "save", "written"]


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


def written(value: float) -> str:
    """A number as people write it: 16,384, 0.001, 2.5; without an exponent."""
    text = f"{value:,.8f}" if abs(value) < 1 else f"{value:,.4f}"
    return text.rstrip("0").rstrip(".")


def plain_numbers(axis: Any, unit: str = "", ticks: Sequence[float] = ()) -> None:
    """Write the numbers of an axis as people do, with a unit; `ticks` are all that it has, if there are any."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if len(ticks):
        axis.set_ticks(list(ticks))
        axis.set_ticks([], minor=True)
    elif axis.get_scale() == "log":
        least, most = axis.get_view_interval()
        if most < 100 * least:  # powers of ten alone would be one or two
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value) + unit))
    axis.set_minor_formatter(NullFormatter())


def name_ends(axes: Any, lines: Sequence[Any], size: float = 8, above: float = 0) -> None:
    """Name lines at their right ends, or `above` points higher, each in its colour, none over another."""
    axes.spines[["right", "top"]].set_visible(False)
    axes.figure.canvas.draw()  # which finds the limits
    scale, gap = 72 / axes.figure.dpi, 1.25 * size
    ends = [(axes.transData.transform(line.get_xydata()[-1]) * scale, line) for line in lines]
    ends.sort(key=lambda each: float(each[0][1]))
    placed: list[float] = []
    for (_, y), _ in ends:
        placed.append(max(float(y) + above, placed[-1] + gap) if placed else float(y) + above)
    crowd = [i for i, ((_, y), _) in enumerate(ends) if not above and placed[i] > y]
    if crowd:  # those that were moved go back by half
        back = max(placed[i] - float(ends[i][0][1]) for i in crowd) / 2
        first = min(crowd) - 1
        placed = [y - back if first <= i <= max(crowd) else y for i, y in enumerate(placed)]
    for ((_, y), line), at in zip(ends, placed, strict=True):
        axes.annotate(
            line.get_label(), line.get_xydata()[-1], (8, at - float(y)), textcoords="offset points", va="center",
            fontsize=size, color=line.get_color(), annotation_clip=False,
        )


def plot_table(table: Table, results: list[Result], folder: str) -> Path:
    """Draw a table of sizes as lines and any other table as bars, with times on a logarithmic scale."""
    if table.growth:
        lines = {r.what: {name: median(t) * 1e6 for name, t in r.times.items()} for r in results}
        return plot_lines(lines, folder, table.title, "how many are cached", "one operation", log=True, unit=" us")
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
    plain_numbers(axes.xaxis)
    axes.set_xlabel("microseconds")
    axes.set_title(table.title)
    axes.legend()
    return save(plt, figure, folder, table.title)


def plot_lines(
    lines: dict[str, dict[str, float]], folder: str, title: str, x: str, y: str, *, log: bool = False,
    named: bool = True, about: str = "", unit: str = "",
) -> Path:
    """Draw a line per name over the same points.

    Args:
        log: whether the second axis is logarithmic.
        named: whether lines are named at their ends, if none ends over another; if not, in a legend.
        about: what was measured, for the title; the file is named after `title` alone.
        unit: of the numbers of the second axis.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    drawn = [
        axes.plot(list(points), list(points.values()), marker="o", label=name)[0] for name, points in lines.items()
    ]
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    plain_numbers(axes.yaxis, unit)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(f"{title}: {about}" if about else title, fontsize=11)
    axes.grid(alpha=0.3)
    if named:
        name_ends(axes, drawn)
    else:
        axes.legend(fontsize="small")
    return save(plt, figure, folder, title)
