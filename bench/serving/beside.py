"""A short prompt beside a long one, while nobody streams: its first token, and what short steps cost the long one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.serving.measured import Measured
from bench.support.blas import set_threads
from bench.support.report import markdown, text_table, time_text
from kvcache import BatchEngine
from kvcache.engine import SamplingParams
from kvcache.networks.model import Transformer

__all__ = ["measure_beside"]

SHORT, LONG, PIECE = 10, 16_000, 512
_ONE = SamplingParams(temperature=0.0, max_tokens=1)
# name: target_gap; the second one has steps of 512 tokens beside nobody
ENGINES = {"kvcache": None, "kvcache, target_gap=60": 60.0}


class Prompts:
    """Random prompts of one engine.

    Attributes:
        seconds: of steps that ran since the last `submit` of a long prompt.
    """

    def __init__(self, model: Any, length: int, target_gap: float | None) -> None:
        self._rng, self.seconds = np.random.default_rng(3), list[float]()
        self.engine = BatchEngine(
            model, dtype="q8", num_blocks=length // 16 + 64, draft=None, target_gap=target_gap
        )
        self.long: Any = None

    def prompt(self, length: int) -> Any:
        """A random one."""
        return self._rng.integers(3, 4000, length).astype(np.uint32)

    def step(self) -> None:
        """Run and time a step."""
        began = perf_counter()
        self.engine.step()
        self.seconds.append(perf_counter() - began)

    def alone(self) -> float:
        """Seconds to the first token of a short prompt."""
        request = self.engine.submit(self.prompt(SHORT), _ONE)
        request.result()
        return float(request.metrics.ttft or 0.0)

    def begin(self, length: int) -> None:
        """Queue a long prompt."""
        self.engine.clear_cache()
        self.long, self.seconds = self.engine.submit(self.prompt(length), _ONE), []

    def run_piece(self) -> float:
        """Run `PIECE` tokens of the long prompt; the seconds of that."""
        work, began = self.long.works[0], perf_counter()
        stop = work.computed + PIECE
        while work.computed < stop and not self.long.is_finished:
            self.step()
        return perf_counter() - began

    def beside(self) -> float:
        """Seconds to the first token of a short prompt that comes when a step of the long one has just begun."""
        self.step()  # it waits for all of this one
        request = self.engine.submit(self.prompt(SHORT), _ONE)
        while not request.is_finished:
            self.engine.step()
        return self.seconds[-1] + float(request.metrics.ttft or 0.0)


def _measure(file: Path, length: int, shorts: int, threads: int) -> dict[str, tuple[float, ...]]:
    """For each engine seconds: a first token alone, beside at the median and worst, the longest step, all pieces."""
    set_threads(threads)
    model = Transformer.from_gguf(file)
    model.config = replace(model.config, eos_token_ids=(), max_position_embeddings=length + 64)
    found = {name: Prompts(model, length, gap) for name, gap in ENGINES.items()}
    for each in found.values():
        each.begin(length // 8)
        while not each.long.is_finished:
            each.step()
    alone = {name: median(each.alone() for _ in range(11)) for name, each in found.items()}
    for each in found.values():
        each.begin(length)
    pieces: dict[str, list[float]] = {name: [] for name in found}
    while not any(each.long.is_finished for each in found.values()):  # in turn, so that both have the same neighbours
        for name, each in found.items():
            pieces[name].append(each.run_piece())
    longest = {name: max(each.seconds) for name, each in found.items()}
    firsts: dict[str, list[float]] = {name: [] for name in found}
    for each in found.values():
        each.begin(length)
    for _ in range(shorts):
        for name, each in found.items():
            for _ in range(max(1, length // PIECE // shorts - 2)):
                each.run_piece()
            if not each.long.is_finished:
                firsts[name].append(each.beside())
    for each in found.values():
        each.engine.close(cancel=True)
    return {
        name: (alone[name], median(firsts[name]), max(firsts[name]), longest[name], sum(pieces[name][:-1]))
        for name in found
    }


def measure_beside(
    file: Path, threads: int, measured: Measured, *, as_markdown: bool = False, quick: bool = False
) -> None:
    """Print the first token of a short prompt that comes when a step of a long one begins."""
    length, shorts = (1100, 2) if quick else (LONG, 8)
    call = partial(_measure, file, length, shorts, threads)
    facts = measured.get(f"{SHORT} tokens beside {length}, {file.stem}, {threads} threads", call)
    best, rows = facts["kvcache, target_gap=60"][4], []
    for name, (alone, first, worst, longest, seconds) in facts.items():
        times = (time_text(each) for each in (alone, first, worst, longest))
        rows.append([name, *times, f"{first / alone:.1f}", f"{seconds / best:.3f}"])
    print(f"\n{SHORT} tokens that come when a step of {length:,} begins, {file.stem}\n")
    header = [
        "", "first token alone", "beside", "at most", "longest step", "beside / alone", "time of the long one",
    ]
    print((markdown if as_markdown else text_table)(header, rows), flush=True)
