"""Tokens per second and the time to the first token over load, one line per engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.support.common import Result
from bench.support.plot import name_ends, plain_numbers, pyplot, save

__all__ = ["plot_loads"]


def plot_loads(loads: Sequence[float], results: Sequence[Result], folder: str, title: str) -> Path:
    """Two panels, as SVG: `results` has the facts of each engine at each of `loads`, shares of what ours serves."""
    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"  # letters are text: a tenth of the bytes
    figure, (rate, first) = plt.subplots(1, 2, figsize=(12, 4.5), gridspec_kw={"wspace": 0.45})
    lines: list[Any] = []
    for name in dict.fromkeys(name for result in results for name in result.facts):
        at = [(100 * load, result.facts[name]) for load, result in zip(loads, results, strict=True)
              if name in result.facts]
        x = [load for load, _ in at]
        wide = 2.5 if name == "kvcache, BatchEngine" else 1.2
        lines += rate.plot(x, [facts["tokens/s"] for _, facts in at], marker="o", linewidth=wide, label=name)
        (line,) = first.plot(x, [facts["TTFT"] for _, facts in at], marker="o", linewidth=wide)
        first.plot(x, [facts["TTFT p99"] for _, facts in at], linestyle=":", linewidth=1, color=line.get_color())
    for axes, what in ((rate, "tokens per second"), (first, "seconds to the first token; dotted: p99")):
        axes.set_xlabel("load, % of what BatchEngine serves")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
    rate.set_ylim(bottom=0)
    first.set_yscale("log")
    plain_numbers(first.yaxis)
    figure.suptitle(title)
    name_ends(rate, lines)
    return save(plt, figure, folder, title, "svg")
