"""The pictures of `bench quality`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from bench.quality.endless import BIN, bins
from bench.support.plot import name_ends, plain_numbers, pyplot, save

__all__ = ["draw_budgets", "draw_formats", "draw_front", "draw_mass", "draw_stream", "draw_tasks", "kind_of"]

DEMO = "the demo model, 5 million parameters"


# Parts of a format's name that select the kind of point.
KINDS = {"no residual": ("^", "without the residual"), "not rotated": ("v", "not rotated"), "/": ("x", "K and V apart")}


def draw_formats(formats: dict[str, dict[str, dict[str, float]]], folder: str) -> Path:
    """Perplexity over bits per value, a panel per context: a line through the formats, their variants as points."""
    plt = pyplot()
    figure, panels = plt.subplots(1, len(formats), figsize=(5.5 * len(formats), 4.5), sharey=True, squeeze=False)
    for axes, (context, figures) in zip(panels[0], formats.items(), strict=True):
        points: dict[str, list[str]] = {}
        for name in figures:
            points.setdefault(next((kind for kind in KINDS if kind in name), ""), []).append(name)
        for kind, names in points.items():
            x, y = ([figures[name][key] * scale for name in names] for key, scale in (("bits", 1), ("rise", 100)))
            marker, label = KINDS.get(kind, ("o", "as the engine has it"))
            axes.plot(x, y, marker=marker, linestyle="none" if kind else "-", label=label, zorder=2 if kind else 1)
            for name, *at in zip(names, x, y, strict=True):
                if kind in ("", "/"):
                    place, side = ((6, -3), "left") if kind else ((-5, -8), "right")
                    axes.annotate(name, at, place, textcoords="offset points", fontsize=7, ha=side)
        axes.set_xscale("log", base=2)
        axes.set_xlim(2.1, 38)
        axes.set_xticks([2.5, 3.5, 4.5, 6.5, 8.5, 16, 32], ["2.5", "3.5", "4.5", "6.5", "8.5", "16", "32"])
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_ylim(-0.005, 30)
        plain_numbers(axes.yaxis, " %")
        axes.set_title(f"{DEMO}, context {int(context):,}", fontsize=10)
        axes.set_xlabel("bits per value, scale and minimum included")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("perplexity over the f32 cache")
    panels[0][-1].legend(fontsize=8)
    return save(plt, figure, folder, "quality formats")


# Kinds of runs of `--model`: what their names end or begin with, and how they are drawn.
_FRONT = {
    "llama.cpp": ("s:", "llama.cpp"), "KIVI": ("v:", "KIVI's recipe"), "quanto": ("X:", "QuantizedCache, quanto"),
    "hqq": ("P:", "QuantizedCache, hqq"),
    ", no residual": ("", ""), ", residual of": ("", ""),
    ", biased": ("", ""), ", window": ("", ""),
    "auto": ("D:", "a budget of bits"), ", calibrated": ("o:", "with a calibration"),
    "": ("^:", "without a calibration"),
}


def kind_of(name: str, own: Collection[str] = ()) -> str:
    """The label of the line that a run belongs to; empty: it is in the table alone.

    Args:
        own: runs of formats and policies of the command line; a policy has a line over its budgets.
    """
    if name in own:
        return name.rpartition(", ")[0] if name.endswith(" kept") else name
    return "" if "f32" in name or "/" in name else _FRONT[next(kind for kind in _FRONT if kind in name)][1]


def draw_front(
    figures: dict[str, dict[str, float]], folder: str, about: str = "", own: Collection[str] = ()
) -> Path:
    """Perplexity and KL divergence over bits per value of a checkpoint: a line for each kind of run.

    Args:
        about: model and text, for the title.
        own: runs of formats and policies of the command line.
    """
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5))
    kinds: dict[str, list[str]] = {}
    for name in figures:
        if kind := kind_of(name, own):
            kinds.setdefault(kind, []).append(name)
    styles = dict.fromkeys(kinds, "*-") | {label: style for style, label in _FRONT.values()}
    for axes, key, scale in zip(panels, ("rise", "kl"), (100, 1), strict=True):
        for kind, names in kinds.items():
            names = sorted(names, key=lambda name: figures[name]["bits"])
            least = 1e-3 if key == "rise" else 1e-6
            x, y = [figures[name]["bits"] for name in names], [max(scale * figures[name][key], least) for name in names]
            axes.plot(x, y, styles[kind], label=kind)
            for name, *at in zip(names, x, y, strict=True):
                short = name.removeprefix("llama.cpp ").removeprefix("auto:").removesuffix(", calibrated")
                short = short.rpartition(", ")[2] if "KIVI" in kind or "Quantized" in kind or name in own else short
                below = name.startswith("auto")  # beside the formats of one width
                axes.annotate(short, at, (-12, -9) if below else (5, 3), textcoords="offset points", fontsize=7)
        axes.set_yscale("log")
        plain_numbers(axes.yaxis, " %" if key == "rise" else "")
        axes.set_xlabel("bits per value, with scales and the tokens in f16")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("perplexity over f32 (0.001 % stands for less)")
    panels[1].set_ylabel("KL divergence of the next token")
    panels[1].legend(fontsize=8)
    figure.suptitle(about, fontsize=11)
    figure.tight_layout()
    return save(plt, figure, folder, "quality of a real model")


def draw_budgets(figures: list[dict[str, Any]], folder: str) -> Path:
    """Perplexity of the continuation and names copied over the budget, a line per policy."""
    plt = pyplot()
    figure, both = plt.subplots(1, 2, figsize=(13, 4.8), gridspec_kw={"wspace": 0.42})
    everything = [f for f in figures if f["policy"] == "all"]
    for axes, key, label in zip(
        both, ("perplexity", "copied"), ("perplexity of the continuation", "tokens of names copied"), strict=True
    ):
        lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for f in figures:
            if f["policy"] != "all":
                lines.setdefault((f["policy"], f["dtype"]), []).append(f)
        colors, named = dict[str, Any](), list[Any]()
        for (policy, dtype), points in lines.items():
            points = points + [f for f in everything if f["dtype"] == dtype]
            line = axes.plot(
                [f["percent"] for f in points][::-1], [f[key] for f in points][::-1], color=colors.get(policy),
                marker=".", linestyle="-" if dtype == "f32" else ":", label=policy,
            )[0]
            if dtype == "f32":
                colors.setdefault(policy, line.get_color())
                named.append(line)
        axes.set_xscale("log")
        axes.invert_xaxis()  # lines part where little is kept: their names stand there
        plain_numbers(axes.xaxis, " %", [each for each in sorted({f["percent"] for f in figures}) if each != 70])
        axes.set_xlabel("budget per layer (dotted: the same in q4)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if key == "perplexity":
            axes.set_yscale("log")
            name_ends(axes, named)  # in the other panel they end together
            plain_numbers(axes.yaxis, "", [15, 20, 25, 30, 40])
        else:
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
            axes.spines[["right", "top"]].set_visible(False)
    figure.suptitle(DEMO, fontsize=11)
    return save(plt, figure, folder, "quality budgets")


def draw_stream(runs: list[dict[str, Any]], fresh: np.ndarray, folder: str) -> Path:
    """Perplexity along the stream relative to fresh windows of the same text, and the time per token."""
    plt = pyplot()
    figure, (axes, clock) = plt.subplots(2, 1, figsize=(9, 6.5), height_ratios=[3, 1], sharex=True)
    ends, longest = dict[bool, list[Any]](), max(len(run["scores"]) for run in runs)
    for run in runs:
        own = bins(run["scores"])
        ratio = np.exp(own - bins(fresh[: len(run["scores"])]))
        ends.setdefault(len(run["scores"]) == longest, []).extend(
            axes.plot((np.arange(len(ratio)) + 0.5) * BIN, ratio, marker=".", label=run["name"])
        )
        pieces = len(run["seconds"]) // 32 * 32
        middle = np.median(run["seconds"][:pieces].reshape(-1, 32), axis=1)
        at = np.arange(len(middle)) * len(run["scores"]) / max(len(middle), 1)
        clock.plot(at, 1e3 * middle / (len(run["scores"]) / (len(run["seconds"]) + 1)))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis, "", [1, 1.1, 1.5, 2, 3, 4])
    axes.set_ylabel("perplexity over that of fresh windows")
    axes.set_title(DEMO, fontsize=11, pad=18)
    axes.grid(alpha=0.3)
    name_ends(axes, ends[True])
    name_ends(axes, ends.get(False, []), above=14)  # the longest lines go on below these names
    clock.spines[["right", "top"]].set_visible(False)
    plain_numbers(clock.xaxis)
    clock.set_ylim(bottom=0)
    clock.set_ylabel("CPU ms per token")
    clock.set_xlabel("token of the stream (the model was trained to 2,048)")
    clock.grid(alpha=0.3)
    return save(plt, figure, folder, "quality stream")


def draw_mass(found: dict[str, Any], folder: str) -> Path:
    """The attention of the last queries layer by layer, and the tokens that each policy has kept."""
    plt = pyplot()
    mass, kept, queries = found["mass"], found["kept"], found["queries"]
    layers, tokens = mass.shape
    figure, panels = plt.subplots(len(kept) + 1, 1, figsize=(11, 1.1 * (len(kept) + 2)), sharex=True)
    columns = 512
    edges = np.linspace(0, tokens, columns + 1).astype(int)
    coarse = np.add.reduceat(mass, edges[:-1], axis=1)
    extent = (0, tokens, layers - 0.5, -0.5)
    panels[0].imshow(np.log10(coarse + 1e-6), aspect="auto", cmap="magma", extent=extent, interpolation="nearest")
    panels[0].set_title(f"attention of the last {queries} tokens (logarithmic), by layer and token", fontsize=9)
    for axes, (name, positions) in zip(panels[1:], kept.items(), strict=True):
        alive = np.zeros((layers, tokens))
        for layer, at in enumerate(positions):
            alive[layer, at] = 1
        alive = np.add.reduceat(alive, edges[:-1], axis=1) / np.diff(edges)
        axes.imshow(alive, aspect="auto", cmap="Greys", extent=extent, interpolation="nearest", vmin=0, vmax=1)
        share = f"{100 * found['share'][name]:.0f} % of that attention"
        axes.set_title(f"{name}: {found['percent']} % of the tokens, {share}", fontsize=9)
    for axes in panels:
        axes.set_yticks([0, layers - 1])
        axes.axvline(tokens - queries, color="tab:blue", linewidth=0.8)
    panels[-1].set_xlabel("token of the prompt")
    figure.suptitle(DEMO, fontsize=11)
    figure.tight_layout()
    return save(plt, figure, folder, "quality attention", "png")


def draw_tasks(figures: list[dict[str, Any]], folder: str, about: str) -> Path:
    """The mean log-probability of answers over the share of tokens that stay: a panel per task, a line per policy."""
    plt = pyplot()
    tasks = list(figures[0]["tasks"])
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(1 + 4.6 * len(tasks), 4.5), squeeze=False, gridspec_kw={"wspace": 0.75}
    )
    whole = next((f for f in figures if f["share"] == 1), None)
    for axes, task in zip(panels[0], tasks, strict=True):
        lines = []
        for policy in dict.fromkeys(f["policy"] for f in figures if f is not whole):
            points = sorted((f["share"], f["tasks"][task]["nats"]) for f in figures if f["policy"] == policy)
            x, y = [100 * share for share, _ in points][::-1], [nats for _, nats in points][::-1]
            lines += axes.plot(x, y, marker="o", label=policy)
        if whole is not None:
            axes.axhline(whole["tasks"][task]["nats"], color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.invert_xaxis()
        plain_numbers(axes.xaxis, " %", sorted({100 * f["share"] for f in figures if f is not whole}))
        axes.set_title(task, fontsize=10)
        axes.set_xlabel("tokens that stay (black: all)")
        axes.grid(alpha=0.3)
        name_ends(axes, lines, 7)
    panels[0][0].set_ylabel("mean log-probability of the answer's tokens")
    figure.suptitle(about, fontsize=11)
    return save(plt, figure, folder, "quality tasks")
