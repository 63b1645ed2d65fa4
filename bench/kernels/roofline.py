"""The pictures of `python -m bench kernels`: the roofline, and decode time over context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from bench.kernels.attention_rivals import NUMPY, TORCH, TORCH_BEST, TORCH_HALF
from bench.kernels.chunks import PEAK
from bench.support.common import Result, Table
from bench.support.plot import name_ends, plain_numbers, pyplot, save
from bench.support.scattered import Shape
from kvcache.kernels.kernels import FORMATS

__all__ = ["plot_kernels"]

GREYS = {NUMPY: "black", TORCH: "dimgray", TORCH_BEST: "gray", TORCH_HALF: "darkgray"}
SHAPE = "32 query heads, 8 KV heads, head_dim 128"


def plot_kernels(tables: Iterable[tuple[Table, list[Result]]], folder: str) -> Iterator[Path]:
    """Draw a roofline and a picture of decode for each number of threads, from the results at dim 128 and block 16."""
    results = [r for _, rs in tables for r in rs]
    counts = sorted({int(f["threads"]) for r in results for f in r.facts.values() if "threads" in f})
    for threads in counts:
        mine = [r for r in results if r.what.endswith(f", {threads} thr")]
        plain = Shape(0)
        tail = f"x 1, dim {plain.head_dim}, block {plain.block_size}, {threads} thr"
        decode = [r for r in mine if r.what.endswith(tail) and "read f32" in r.times and "f32" in r.times]
        prefill = [r for r in mine if r.what.endswith(tail) and PEAK in r.times and "f32" in r.times]
        if decode:
            yield _over_context(decode, threads, folder)
        if decode and prefill:
            yield _roofline(decode[-1], prefill[-1], threads, folder)


def _over_context(results: list[Result], threads: int, folder: str) -> Path:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5.5))
    lines, contexts = [], set()
    for name in (*FORMATS, NUMPY, TORCH, TORCH_BEST, TORCH_HALF):
        points = [(r.facts["f32"]["context"], r.times[name]) for r in results if name in r.times]
        if not points:
            continue
        style = {"marker": "o"} if name in FORMATS else {"marker": "x", "linestyle": "--", "color": GREYS[name]}
        x, y = [p[0] for p in points], [median(p[1]) * 1e3 for p in points]
        contexts.update(x)
        lines += axes.plot(x, y, label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain_numbers(axes.xaxis, "", sorted(contexts))
    plain_numbers(axes.yaxis)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("milliseconds, median")
    title = f"Decode over context, {threads} thread{'s' * (threads > 1)}"
    axes.set_title(f"{title}: attention of one layer of\n{SHAPE}", fontsize=10)
    axes.grid(alpha=0.3)
    name_ends(axes, lines)
    return save(plt, figure, folder, title, "png")


def _roofline(decode: Result, prefill: Result, threads: int, folder: str) -> Path:
    """GFLOP/s over FLOP per byte of K and V; the roof is given by the plain read and the FMA peak of this run."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    read = max(_rate(decode, name, "work") for name in decode.times if name.startswith("read "))
    peak = _rate(prefill, PEAK, "work")
    x = [0.5, peak / read, 2**14]
    axes.plot(x, [min(peak, read * i) for i in x], color="black")
    axes.annotate(f"{read:.0f} GB/s read", (0.6, 0.6 * read), (9, -3), textcoords="offset points", fontsize=8)
    axes.annotate(f"{peak:.0f} GFLOP/s of FMA", (2**6, peak), (0, -12), textcoords="offset points", fontsize=8)
    for result, marker, what in ((decode, "o", "one query"), (prefill, "s", "512 queries")):
        facts = [result.facts[name] for name in FORMATS]
        points = [(f["flop"] / f["bytes"], _rate(result, n, "flop")) for n, f in zip(FORMATS, facts, strict=True)]
        context = int(result.facts["f32"]["context"])
        axes.plot(*zip(*points, strict=True), marker + ":", label=f"{what} behind {context:,} tokens")
        for name, point in zip(FORMATS, points, strict=True):
            axes.annotate(name, point, (7, -4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain_numbers(axes.xaxis, "", [2**i for i in range(0, 15, 2)])
    plain_numbers(axes.yaxis, "", [each for each in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if each < 4 * peak])
    axes.set_ylim(read / 3)
    axes.set_xlabel("FLOP per byte of K and V")
    axes.set_ylabel("GFLOP/s (of float arithmetic, whatever the kernel does)")
    title = f"Roofline, {threads} thread{'s' * (threads > 1)}"
    axes.set_title(f"{title}: attention of {SHAPE}", fontsize=10)
    axes.legend(fontsize="small", loc="lower right")
    axes.grid(alpha=0.3)
    return save(plt, figure, folder, title, "png")


def _rate(result: Result, name: str, fact: str) -> float:
    return result.facts[name][fact] / median(result.times[name]) / 1e9
