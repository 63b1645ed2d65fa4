"""`python -m bench calls`: the calls of Python functions in a step and in a request of each engine, NumPy's included.

The demo model, which has six layers. Counts are the least of several runs: a step that fills a block makes more calls.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import numpy as np

from bench.support.report import show
from kvcache import BatchEngine
from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer

__all__ = ["add_arguments", "main"]

FORMATS = ("f16", "q4")
PROMPT = np.arange(100, 400, dtype=np.uint32)
RUNS = 5
ONE = SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=1.0)
MANY = SamplingParams(temperature=0.0, max_tokens=32, repetition_penalty=1.0)


def calls_of(run: Callable[[], Any]) -> Counter[str]:
    """The calls of Python functions in one run, without `run` itself, by name; those of C are not counted."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    found[run.__name__] -= 1
    return found


def step_of(batch: BatchEngine) -> Callable[[], Any]:
    """A function that makes a step."""
    return lambda: batch.step()


def submit_of(batch: BatchEngine) -> Callable[[], Any]:
    """A function that submits a request."""
    return lambda: batch.submit(PROMPT, temperature=0.0, max_tokens=32)


def subjects(dtype: str) -> dict[str, Callable[[], Any]]:
    """Functions to count, by what they do."""
    model = Transformer.from_pretrained(DIRECTORY)
    engine = InferenceEngine(model, dtype=dtype)
    engine.prefill_from_pos(PROMPT, 0)
    cached = PrefixCachedEngine(InferenceEngine(model, dtype=dtype), max_cache_blocks=256)
    positions = count(len(PROMPT))
    found: dict[str, Callable[[], Any]] = {
        "a decode step of one text": lambda: engine.decode_step(5, next(positions)),
        "`generate` of one token over a cached prefix": lambda: cached.generate(PROMPT, ONE),
    }
    found["`submit` of a `BatchEngine`, with keywords"] = submit_of(BatchEngine(model, dtype=dtype, num_blocks=512))
    for requests in (1, 8):
        batch = BatchEngine(model, dtype=dtype, num_blocks=512)
        for i in range(requests):
            batch.submit(np.roll(PROMPT, i), MANY)
        for _ in range(4):
            batch.step()
        found[f"a step of `BatchEngine`, {requests} request{'s' * (requests > 1)}"] = step_of(batch)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--most", type=int, default=0, metavar="N", help="print the N most called functions too")


def main(options: argparse.Namespace) -> int:
    """Print the table."""
    counts: dict[str, list[str]] = {}
    for dtype in FORMATS:
        for what, run in subjects(dtype).items():
            run()
            run()
            found = min((calls_of(run) for _ in range(RUNS)), key=Counter.total)
            counts.setdefault(what, []).append(str(found.total()))
            for name, number in found.most_common(options.most):
                print(f"{what}, {dtype}: {number} {name}")
    show(options.markdown, "Calls", ["calls of Python", *FORMATS], [[what, *row] for what, row in counts.items()])
    return 0
