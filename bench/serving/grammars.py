"""`python -m bench grammars`: steps of a batch whose answers follow a grammar, beside steps of the same batch without.

The network is random, of the shape of a billion weights in q4, and so is what it says: half of the requests follow a
JSON schema that no answer completes, half another one. Draft tokens are off, so that each step has one token of each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from bench.support.checkpoints import SIZES, write_gguf
from bench.support.report import show, time_text, write_json
from kvcache import BatchEngine, SamplingParams, get_num_threads
from kvcache.grammar import Grammar, json_schema

__all__ = ["add_arguments", "main"]

_PERSON = {
    "type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}}, "mail": {"type": "string", "format": "email"},
    },
}
_SCHEMAS = [{"type": "array", "items": items, "minItems": 500} for items in (_PERSON, {"type": "number"})]


def step_seconds(engine: BatchEngine, streams: int, new: int, grammars: list[Grammar], seed: int) -> float:
    """Seconds of a step with one token of each stream; the steps of the prompts do not count."""
    rng, begun = np.random.default_rng(seed), sum(engine.stats().first_token.counts)
    for number in range(streams):
        params = SamplingParams(
            temperature=0.9, top_k=40, seed=number, max_tokens=new,
            grammar=grammars[number % len(grammars)] if grammars else None,
        )
        engine.submit(rng.integers(3, engine.config.vocab_size, 32), params)
    while sum(engine.stats().first_token.counts) < begun + streams:
        engine.step()
    began, before = perf_counter(), engine.stats()
    while engine.step():
        pass
    seconds, after = perf_counter() - began, engine.stats()
    return seconds / (after.steps - before.steps)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="requests at once (default 1 8)")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer (default 64)")
    parser.add_argument("--rounds", type=int, default=7, help="the median counts (default 7)")


def main(options: argparse.Namespace) -> int:
    """Print a table; the target is a cost of at most 5 %."""
    size, new, rounds = (SIZES["tiny"], 16, 1) if options.quick else (SIZES["1b"], options.new, options.rounds)
    grammars = [json_schema(schema) for schema in _SCHEMAS]
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.gguf"
        write_gguf(size, path, half=True)
        most = max(options.streams)
        engine = BatchEngine.from_gguf(path, weights="q4", dtype="q8", max_running=most, draft=None)
        for grammar in grammars:
            engine.prepare_grammar(grammar)
        for streams in options.streams:
            turns = [
                [step_seconds(engine, streams, new, kind, turn) for kind in ([], grammars)]
                for turn in range(rounds + 1)
            ]
            pairs = turns[1:]  # the first one makes what is made at the first use
            plain, masked = (median(each) for each in zip(*pairs, strict=True))
            cost = median(b / a - 1 for a, b in pairs)
            rows.append([str(streams), time_text(plain), time_text(masked), f"{cost:+.1%}"])
            found[streams] = pairs
    title = f"{size}, q4, {get_num_threads()} threads, {new} new tokens"
    show(options.markdown, title, ["requests", "a step", "with grammars", "cost"], rows)
    write_json(options.json, found=found)
    return 0
