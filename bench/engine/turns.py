"""`python -m bench turns`: later turns of a long chat over networks with a state or an indexer, and branches.

Each turn of a chat is the text so far, its last answer and new tokens: `PrefixCachedEngine` continues behind the state
that it kept at the end of the answer. Beside it stands what the new tokens alone take, run behind the same text, and
what the first turn took, which an engine without states at the right places takes in every turn: llama.cpp reads a
prompt again that departs from its text, as the templates of Qwen3.5 make it. So its prefill of the whole is its time.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine.mistral_rs import MistralRs
from bench.engine.popular import ENGINES
from bench.engine.shapes import SHAPES, VOCABULARY
from bench.engine.streamed import Streamed
from bench.engine.vllm_cpu import VllmHalf
from bench.engine.weight_rivals import GGUF_FILES, write_files
from bench.serving.measured import Measured
from bench.support.blas import set_threads
from bench.support.common import Result
from bench.support.limits import values_told
from bench.support.rates import Columns
from bench.support.tables import Tables
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams

__all__ = ["add_arguments", "main"]

Tokens = npt.NDArray[np.uint32]

_STREAMED = MistralRs.name, VllmHalf.name
_RIVALS = ("llama.cpp", "ik_llama.cpp", *_STREAMED)
_NETWORKS = ("qwen35", "lfm2", "kimi", "indexed")
ANSWER, NEW = 32, 64  # tokens of an answer, and of what a user or a tool adds to it
BRANCH = 256  # tokens behind the prompt that branches share
FIRST, LATER, ALONE, BRANCHED = "first turn", "later turn", "its new tokens alone", "branch"


class Chats:
    """A chat that grows turn by turn over one engine.

    Args:
        path: a GGUF file.
        tokens: of the first prompt.
        turns: later turns, for which there is room.
    """

    def __init__(self, path: Path, tokens: int, turns: int) -> None:
        self._rng = np.random.default_rng(0)
        room = tokens + turns * (ANSWER + NEW) + BRANCH + ANSWER
        engine = InferenceEngine.from_gguf(path, dtype="q8", num_blocks=2 * (room // 16 + 2))
        self._engine, self._cached = engine, PrefixCachedEngine(engine, max_cache_blocks=2 * (room // 16 + 2))
        self._start = self._fresh(tokens)
        self._text = self._start
        self.ran: dict[str, int] = {}

    def _fresh(self, count: int) -> Tokens:
        return self._rng.integers(3, VOCABULARY, count, dtype=np.uint32)

    def _turn(self, what: str, prompt: Tokens) -> float:
        """Seconds to the first token of an answer, which then runs to its end."""
        before = self._cached.cache_stats().hit_tokens
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, repetition_penalty=1.0)
        start, answer = perf_counter(), []
        stream = self._cached.stream(prompt, params)
        answer.append(next(stream))
        seconds = perf_counter() - start
        answer += stream
        self.ran[what] = len(prompt) - (self._cached.cache_stats().hit_tokens - before)
        self._text = np.concatenate([prompt, np.array(answer, np.uint32)])
        return seconds

    def first(self) -> float:
        """The first turn: all of its prompt runs."""
        return self._turn(FIRST, self._start)

    def later(self) -> float:
        """The next turn: the text so far and new tokens."""
        return self._turn(LATER, np.concatenate([self._text, self._fresh(NEW)]))

    def alone(self) -> float:
        """As many tokens as the last turn ran, behind the text that the engine has."""
        tokens, pos = self._fresh(self.ran[LATER]), len(self._text) - 1
        start = perf_counter()
        self._engine.prefill_from_pos(tokens, pos)
        return perf_counter() - start

    def branch(self) -> float:
        """Another prompt that begins as the first one did."""
        text, seconds = self._text, self._turn(BRANCHED, np.concatenate([self._start, self._fresh(BRANCH)]))
        self._text = text
        return seconds


def measure(path: Path, tokens: int, turns: int, threads: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The times of every kind of turn, and how many tokens ran in it."""
    set_threads(threads)
    chats = Chats(path, tokens, turns)
    times = {FIRST: [chats.first()] * turns}  # once, beside each of the others
    for _ in range(turns):
        times.setdefault(LATER, []).append(chats.later())
        times.setdefault(ALONE, []).append(chats.alone())
    chats.branch()  # the first one finds where prompts part, and keeps a state there
    return times | {BRANCHED: [chats.branch() for _ in range(turns)]}, chats.ran


def rival(name: str, path: Path, tokens: int, turns: int, threads: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the seconds in which a rival reads the whole text, or those of its first turn and of its later ones.

    mistral.rs and vLLM keep texts as prefixes of others, so their later turns are measured as ours are.
    """
    rng, room = np.random.default_rng(1), tokens + (turns + 1) * NEW + ANSWER
    text = rng.integers(3, VOCABULARY, tokens, dtype=np.uint32)
    set_threads(threads)
    engine: Any = ENGINES[name](path, threads, room)
    set_threads(threads)
    start = perf_counter()
    if not isinstance(engine, Streamed):
        engine.start(text)
        yield f"{name}, whole", [perf_counter() - start] * turns
        return
    yield f"{name}, first turn", [engine.first_token(text)] * turns
    later = []
    for _ in range(turns):
        text = np.concatenate([text, rng.integers(3, VOCABULARY, NEW, dtype=np.uint32)])
        later.append(engine.first_token(text))
    yield f"{name}, later turn", later


def rival_within(limit: float, name: str, *arguments: Any) -> dict[str, list[float]]:
    """The times of a rival in a process of its own, as far as it comes: see `values_told`."""
    return dict(values_told(name, {}, limit, rival, name, *arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--network", choices=_NETWORKS, nargs="+", default=[*_NETWORKS])
    parser.add_argument("--file", choices=tuple(GGUF_FILES), default="q4_0", help="type of the weights (default q4_0)")
    parser.add_argument("--tokens", type=int, default=16384, help="of the first prompt (default 16384)")
    parser.add_argument("--turns", type=int, default=5, help="later turns, and branches (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine (default 2)")
    parser.add_argument("--rivals", nargs="+", choices=_RIVALS, default=list(_RIVALS), help="some of the others")
    parser.add_argument("--no-rivals", action="store_true", help="only our own engine")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS",
                        help="that a rival may take with one network (default 600)")
    parser.add_argument("--resume", type=Path, metavar="FILE",
                        help="keep what each engine did in this file, and measure what it does not have")
    parser.add_argument("--folder", type=Path, help="keep the GGUF files here, and use those that are there")


def main(options: argparse.Namespace) -> int:
    """Print a table for each network."""
    tokens, turns = (256, 2) if options.quick else (options.tokens, options.turns)
    tables, measured = Tables(options), Measured(options.resume)
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.network:
            kept = (options.folder or Path(temporary)) / name
            write_files(SHAPES[name], kept, (options.file,))
            path = kept / f"{options.file}.gguf"
            if not path.exists():
                print(f"{name}: f16 in place of {options.file}, which llama.cpp makes: it is not installed, or refused")
                path = kept / "f16.gguf"
            arguments = tokens, turns, options.threads
            own = f"{name}, {options.file}, kvcache, {arguments}"
            times, ran = measured.get(own, partial(measure, path, *arguments))
            result = Result(f"{path.stem}, {tokens} tokens", dict(times))
            gc.collect()
            for each in () if options.no_rivals else options.rivals:
                result.times |= measured.get(
                    f"{name}, {options.file}, {each}, {arguments}",
                    partial(rival_within, options.limit, each, path, *arguments), count=1 + (each in _STREAMED),
                )
            title = f"Turns behind {tokens} tokens, {SHAPES[name].what}, {options.threads} thr"
            columns = Columns(tuple(result.times), rivals=(ALONE,), unit="")
            tables.rates(title, columns, [result])
            print("tokens that ran: " + ", ".join(f"{what} {count}" for what, count in ran.items()))
    tables.end()
    return 0
