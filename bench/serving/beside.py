"""A short prompt beside a long one, while nobody streams: its first token, and what short steps cost the long one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from bench.serving.measured import Measured
from bench.support.blas import set_threads
from bench.support.report import show, time_text
from kvcache import BatchEngine
from kvcache.engine import SamplingParams
from kvcache.networks.model import Transformer

__all__ = ["measure_beside"]

SHORT, PIECE, ROUNDS = 10, 512, 8
_ONE = SamplingParams(temperature=0.0, max_tokens=1)
WHOLE = "kvcache, target_gap=60"  # its steps have 512 tokens, whatever time they take
ENGINES = {"kvcache": None, WHOLE: 60.0}


class Prompts:
    """Random prompts of one engine.

    Attributes:
        steps: seconds of each step of the long prompt.
    """

    def __init__(self, model: Any, length: int, target_gap: float | None) -> None:
        self._rng, self.steps = np.random.default_rng(3), list[float]()
        blocks = length // 16 + 64
        self.engine = BatchEngine(model, dtype="q8", num_blocks=blocks, draft=None, target_gap=target_gap)
        self._long: Any = None

    def _submit(self, length: int) -> Any:
        return self.engine.submit(self._rng.integers(3, 4000, length).astype(np.uint32), _ONE)

    @property
    def left(self) -> int:
        """Tokens of the long prompt that have not run."""
        return 0 if self._long.is_finished else self._long.works[0].remaining

    def begin(self, length: int) -> None:
        """Queue a long prompt."""
        self.engine.clear_cache()
        self._long, self.steps = self._submit(length), []

    def run_piece(self) -> float:
        """Run `PIECE` tokens of the long prompt, or what is left; seconds of processors."""
        stop, began = max(0, self.left - PIECE), process_time()
        while self.left > stop:
            start = perf_counter()
            self.engine.step()
            self.steps.append(perf_counter() - start)
        return process_time() - began

    def first_token(self) -> float:
        """Seconds to the first token of a short prompt that comes now."""
        request = self._submit(SHORT)
        while not request.is_finished:
            self.engine.step()
        return float(request.metrics.ttft or 0.0)


def _measure(file: Path, length: int, threads: int) -> dict[str, tuple[float, ...]]:
    """For each engine: first tokens alone and behind a step, their ratio, the step, the longest one, processor time."""
    set_threads(threads)
    model = Transformer.from_gguf(file)
    model.config = replace(model.config, eos_token_ids=(), max_position_embeddings=length + 64)
    idle = Prompts(model, 64, None)
    found = {name: Prompts(model, length, gap) for name, gap in ENGINES.items()}
    idle.first_token()
    for each in found.values():  # what is made at the first use, and the engine's own measurements
        each.begin(length // 8)
        while each.left:
            each.run_piece()
        each.begin(length)
    cost = dict.fromkeys(found, 0.0)
    while all(each.left for each in found.values()):  # in turn, so that both have the same neighbours
        for name, each in found.items():
            cost[name] += each.run_piece()
    steps = {name: each.steps for name, each in found.items()}
    firsts: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for each in found.values():
        each.begin(length)
    while all(each.left > 2 * PIECE for each in found.values()):
        for name, each in found.items():
            for _ in range(max(1, length // PIECE // ROUNDS)):
                each.run_piece()
            if each.left:
                firsts[name].append((idle.first_token(), each.first_token()))
    for each in (idle, *found.values()):
        each.engine.close(cancel=True)
    return {
        name: (
            median(alone for alone, _ in pairs), median(first for _, first in pairs),
            median(first / alone for alone, first in pairs), median(steps[name]), max(steps[name]), cost[name],
        )
        for name, pairs in firsts.items()
    }


def measure_beside(file: Path, length: int, threads: int, measured: Measured, *, as_markdown: bool = False) -> None:
    """Print when a short prompt has its first token that comes while a long one runs: after a step, and some time."""
    call = partial(_measure, file, length, threads)
    facts = measured.get(f"{SHORT} tokens beside {length}, {file.stem}, {threads} threads", call)
    rows = []
    for name, (alone, first, ratio, step, longest, cost) in facts.items():
        times = (time_text(each) for each in (step, longest, alone, first))
        rows.append([name, *times, f"{ratio:.2f}", f"{cost / facts[WHOLE][-1]:.3f}"])
    title = f"{SHORT} tokens beside {length:,}, {file.stem}: a step, then their first token"
    header = [
        "", "step, median", "longest", "first token alone", "behind the step", "ratio", "processor time, long prompt",
    ]
    show(as_markdown, title, header, rows)
