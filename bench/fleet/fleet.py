"""`python -m bench fleet`: a fleet of servers on paper: hit rate, first token and bytes moved, by routing and store.

Workers have this library's index of prefixes and measured costs; a trace in Mooncake's format, or a synthetic one, is
replayed over 2 to 256 of them at the same load of each. `--check` compares the model with two real servers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from bench.fleet.costs import Costs
from bench.fleet.replay import WAYS, Fleet, Outcome, replay
from bench.fleet.two_workers import compare
from bench.prefix.workloads import Mix, Trace, from_mooncake, synthetic
from bench.support.plot import pyplot, save
from bench.support.report import show, write_json
from kvcache.support.arguments import as_bytes

__all__ = ["add_arguments", "main"]

Table = Callable[..., None]  # prints a table
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256)
WORKERS_PER_NODE = 64  # of the store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--file", metavar="JSONL", help="a trace in Mooncake's format instead of a synthetic one")
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), metavar="N", help="sizes of the fleet")
    parser.add_argument("--worker-memory", default="8GiB", metavar="BYTES", help="K and V of a worker (%(default)s)")
    parser.add_argument("--store-memory", default="1TiB", metavar="BYTES", help="of the whole store (%(default)s)")
    parser.add_argument("--load", type=float, default=0.6, help="of each worker if nothing was cached (%(default)s)")
    parser.add_argument("--measure", metavar="MODEL", help="measure the costs of this checkpoint here, and use them")
    parser.add_argument("--check", action="store_true", help="compare the model with two real servers, and no more")


def _trace(options: argparse.Namespace) -> Trace:
    if options.file:
        return from_mooncake(options.file)
    return synthetic(Mix(num_requests=300 if options.quick else Mix.num_requests))


def check(*, quick: bool, table: Table) -> int:
    """Print the hit rates of the model and of two servers; returns how many ways differ.

    A server waits a twentieth of a second for a directory: of those with a store, one request of twenty may find less.
    """
    rows, wrong = [], 0
    for way, (_, stored) in WAYS.items():
        model, real, total = compare(way, 24 if quick else 120, 800 if stored else 100)
        late = sum(a > b for a, b in zip(model, real, strict=True))
        differ = sum(a != b for a, b in zip(model, real, strict=True))
        wrong += differ > late or late > (len(model) // 20 if stored else 0)
        rows.append([way, f"{sum(model) / total:.2%}", f"{sum(real) / total:.2%}", f"{differ} of {len(model)}"])
    table("The model beside two servers", ["two servers", "model", "cached_tokens", "requests that differ"], rows)
    return wrong


def first_tokens(outcome: Outcome) -> tuple[float, float]:
    """The median and the 99th percentile of the seconds to first tokens."""
    return float(np.median(outcome.first)), float(np.quantile(outcome.first, 0.99))


def _print(outcomes: dict[int, dict[str, Outcome]], table: Table) -> None:
    def hits(each: Outcome) -> str:
        stored = sum(each.stored) / each.prompt_tokens
        return f"{each.hit_rate:.1%}" + (f" ({stored:.1%})" if stored else "")

    def firsts(each: Outcome) -> str:
        return " / ".join(f"{seconds:.3g}" for seconds in first_tokens(each))

    def moved(each: Outcome) -> str:
        return f"{each.read / 1e9:.0f} / {each.written / 1e9:.0f}" if each.written else "-"

    for title, cell in (
        ("prompt tokens that did not run (from the store)", hits),
        ("seconds to the first token, median / 99 %", firsts),
        ("GB read from the store / written to it", moved),
    ):
        rows = [[str(count), *(cell(each) for each in by_way.values())] for count, by_way in outcomes.items()]
        table(title, ["workers", *WAYS], rows)


def draw(outcomes: dict[int, dict[str, Outcome]], folder: str) -> Path:
    """Hit rate, mean first token and bytes of the store per token of prompts, over the number of workers."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(13, 4))
    counts = list(outcomes)
    drawn = (
        ("prompt tokens that did not run, %", lambda each: 100 * each.hit_rate),
        ("mean seconds to the first token", lambda each: float(np.mean(each.first))),
        ("bytes from and to the store per prompt token", lambda each: (each.read + each.written) / each.prompt_tokens),
    )
    for axes, (title, value) in zip(panels, drawn, strict=True):
        for way in WAYS:
            axes.plot(counts, [value(outcomes[count][way]) for count in counts], marker="o", label=way)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("workers")
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
    panels[1].set_yscale("log")
    panels[0].legend(fontsize="small")
    return save(plt, figure, folder, "fleet over workers", "svg")


def main(options: argparse.Namespace) -> int:
    """Print hit rates, first tokens and bytes by the number of workers; with `--check`, the comparison alone."""
    table = partial(show, options.markdown)
    if options.check:
        return check(quick=options.quick, table=table)
    costs = Costs() if options.measure is None else Costs.measured(options.measure)
    trace, counts = _trace(options), options.workers[:2] if options.quick else options.workers
    page = costs.token_bytes * trace.page_size
    own, shared = as_bytes(options.worker_memory, "worker_memory"), as_bytes(options.store_memory, "store_memory")
    print(f"\ntrace: {trace.name}; {len(trace.requests)} requests, load {options.load}")
    print(", ".join(f"{name} {value:.4g}" for name, value in asdict(costs).items()))
    outcomes: dict[int, dict[str, Outcome]] = {}
    for count in counts:
        nodes = -(-count // WORKERS_PER_NODE)
        fleet = Fleet(count, own // page, shared // page, nodes, options.load)
        outcomes[count] = {way: replay(trace, fleet, way, costs) for way in WAYS}
    _print(outcomes, table)
    if options.plot:
        print("picture:", draw(outcomes, options.plot))
    found = {str(count): {way: asdict(each) for way, each in ways.items()} for count, ways in outcomes.items()}
    write_json(options.json, costs=asdict(costs), trace=trace.name, outcomes=found)
    return 0
