"""`python -m bench engine`: whole requests on random checkpoints, compared with rivals that run the same network.

`--network gemma3` and `--network experts` measure networks with windows and with experts instead.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.engine.engine_rivals import LlamaCpp, OpenVino, Transformers, availability, installed
from bench.engine.shapes import SHAPES
from bench.engine.shares import PYTHON, ROWS, SHARES, shares_of
from bench.engine.weights import network_tables
from bench.support.blas import set_threads
from bench.support.checkpoints import SIZES, Size, write_checkpoint
from bench.support.common import Candidate, Case, at_most, faster
from bench.support.rates import Columns
from bench.support.report import reason_of, show
from bench.support.tables import Tables, draw_each, measured
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.networks.model import Transformer
from kvcache.paged.cache import PagedKvCache

__all__ = ["add_arguments", "main"]

PROMPT, SHARED, TAIL, STEPS = 2048, 2000, 32, 16
FAR, MORE, FAR_FORMATS = 16384, 512, ("f32", "q8", "q4")
FORMATS = ("f32", "f16", "q8", "q4")
OURS = tuple(f"kvcache {dtype}" for dtype in FORMATS)
OTHERS = (Transformers.name, LlamaCpp.name, OpenVino.name)
SPEED = Columns((*OURS, *OTHERS), rivals=OTHERS, unit="tokens/s", scale=1.0)
FAR_OURS = tuple(f"kvcache {dtype}" for dtype in FAR_FORMATS)
FAR_SPEED = replace(SPEED, subjects=(*FAR_OURS, OpenVino.name), rivals=(FAR_OURS[0], OpenVino.name))
COLD, CACHED = "cold", "prefix cached"
FIRST = Columns((CACHED, COLD, *(f"{name}, {what}" for name in OTHERS for what in (CACHED, COLD))), rivals=(COLD,))
PYTHON_SHARE = 0.10
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=STEPS + 1)


class Bench:
    """A checkpoint of one size, our engine over it in each format, and the named rivals."""

    def __init__(
        self,
        size: Size,
        folder: Path,
        threads: int,
        prompt: int,
        formats: tuple[str, ...] = FORMATS,
        rivals: tuple[str, ...] = OTHERS,
    ) -> None:
        set_threads(threads)
        rng = np.random.default_rng(1)
        self.size, self.threads = size, threads
        self.prompt = rng.integers(3, size.vocabulary, prompt, dtype=np.uint32)
        self._rng = rng
        self.model = Transformer.from_pretrained(write_checkpoint(size, folder / "checkpoint"))
        blocks = size.positions // 16 + 2  # one text, and the fork that rewinds its steps
        self.engines = {dtype: InferenceEngine(self.model, dtype=dtype, num_blocks=blocks) for dtype in formats}
        self.rivals = {}
        for rival in (each for each in installed() if each.name in rivals):
            try:
                self.rivals[rival.name] = rival.random(size, folder / "rival", threads)
            except Exception as error:  # the rival's package does not support this network
                print(f"not measured: {rival.name} ({reason_of(error)})")
        set_threads(threads)

    # -- prefill ------------------------------------------------------------------------------------------------

    def prefill(self) -> Iterator[Candidate]:
        """Prefill of the whole prompt into an empty cache."""
        facts = {"work": float(len(self.prompt))}
        for dtype, engine in self.engines.items():
            yield Candidate(f"kvcache {dtype}", partial(self._prefill, engine), facts=facts)
        for name, rival in self.rivals.items():
            if isinstance(rival, OpenVino):
                yield Candidate(name, seconds=lambda r=rival: r.first_token(self.fresh()), facts=facts)
            else:
                yield Candidate(name, partial(rival.prefill, self.prompt), facts=facts)

    def _prefill(self, engine: InferenceEngine) -> None:
        engine.reset()
        engine.prefill_from_pos(self.prompt, 0)

    def fresh(self) -> np.ndarray:
        """A new random prompt, which no cache contains."""
        return self._rng.integers(3, self.size.vocabulary, len(self.prompt), dtype=np.uint32)

    # -- decode -------------------------------------------------------------------------------------------------

    def decode(self) -> Iterator[Candidate]:
        """Greedy decode steps after the prompt, sampling included."""
        facts = {"work": 1.0}
        for dtype, engine in self.engines.items():
            self._prefill(engine)
            steps = Steps(engine, len(self.prompt))
            yield Candidate(f"kvcache {dtype}", steps.run, STEPS, steps.rewind, facts)
        for name, rival in self.rivals.items():
            if isinstance(rival, OpenVino):
                yield Candidate(name, seconds=lambda r=rival: r.step(self.prompt, STEPS), facts=facts)
            else:
                rival.prefill(self.prompt)
                yield Candidate(name, partial(rival.decode, STEPS), STEPS, rival.rewind, facts)

    def extend(self, count: int) -> Iterator[Candidate]:
        """Prefill of `count` more tokens after the prompt, which is cached."""
        facts = {"work": float(count)}
        for dtype, engine in self.engines.items():
            self._prefill(engine)
            more = partial(engine.prefill_from_pos, self.fresh()[:count], len(self.prompt))
            yield Candidate(f"kvcache {dtype}", more, before=Steps(engine, len(self.prompt)).rewind, facts=facts)
        for name, rival in self.rivals.items():
            assert isinstance(rival, OpenVino), f"expected OpenVINO alone, got {name}"
            rival.first_token(self.prompt)

            def behind(rival: OpenVino = rival) -> float:
                return rival.first_token(np.concatenate([self.prompt, self.fresh()[:count]]))

            yield Candidate(name, seconds=behind, facts=facts)

    def shares(self, dtype: str, rounds: int) -> dict[str, float]:
        """The shares of a step's time, the median of each part."""
        engine = self.engines[dtype]
        self._prefill(engine)
        steps = Steps(engine, len(self.prompt))
        found = []
        for _ in range(rounds + 1):
            steps.rewind()
            found.append(shares_of(engine, steps.run))
        return {what: median(f[what] for f in found[1:]) for what in SHARES}

    # -- first token --------------------------------------------------------------------------------------------

    def first_token(self, shared: int, tail: int) -> Iterator[Candidate]:
        """The first token of a prompt whose head is cached, and of one of which nothing is cached."""
        engine = PrefixCachedEngine(InferenceEngine(self.model), 4 * (shared + tail) // 16 + 64, strict=True)
        head = self.prompt[:shared]
        one = SamplingParams(temperature=0.0, max_tokens=1)

        def ask(tokens: np.ndarray) -> None:
            engine.generate(tokens, one)

        def another() -> np.ndarray:
            return np.concatenate([head, self.fresh()[:tail]])

        turn = Turn(another, partial(engine.generate, head, one))
        yield Candidate(CACHED, lambda: ask(turn.tokens), before=turn.prepare)
        clear = Turn(another, engine.clear_cache)
        yield Candidate(COLD, lambda: ask(clear.tokens), before=clear.prepare)
        for name, rival in self.rivals.items():
            if isinstance(rival, OpenVino):
                rival.first_token(head)
                yield Candidate(f"{name}, {CACHED}", seconds=lambda r=rival: r.first_token(another()))
                yield Candidate(f"{name}, {COLD}", seconds=lambda r=rival: r.first_token(self.fresh()))
            else:
                rewound = Turn(another, partial(rival.hold, head))
                yield Candidate(
                    f"{name}, {CACHED}", lambda r=rival, t=rewound: r.extend(t.tokens[shared:]), before=rewound.prepare
                )
                yield Candidate(f"{name}, {COLD}", lambda r=rival: r.prefill(self.prompt[: shared + tail]))


class Turn:
    """A new prompt for each round, with an untimed preparation."""

    def __init__(self, make: Any, before: Any) -> None:
        self._make, self._before = make, before
        self.tokens = make()

    def prepare(self) -> None:
        """Prepare the next round; not timed."""
        self._before()
        self.tokens = self._make()


class Steps:
    """Decode steps of our engine after its prompt, through the same loop as `generate`."""

    def __init__(self, engine: InferenceEngine, prompt: int) -> None:
        self._engine, self._prompt = engine, prompt
        self._logits = np.zeros(engine.config.vocab_size, np.float32)
        self._logits[3] = 1.0

    def rewind(self) -> None:
        """Cut the sequence back to the prompt."""
        engine = self._engine

        def share(cache: PagedKvCache, seq_id: int) -> int:
            cache.fork(engine.seq_id, seq_id)
            cache.truncate(seq_id, self._prompt)
            return self._prompt

        engine.begin(share)

    def run(self) -> None:
        """Run `STEPS` tokens through the network and sample one more."""
        for _ in self._engine.decode(self._logits, GREEDY):
            pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=9, help="rounds per case (default 9)")
    parser.add_argument("--size", metavar="NAME", help="small, large or tiny (default small and large; --quick tiny)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine (default 2)")
    parser.add_argument("--network", choices=tuple(SHAPES), help="another kind, with every format of weights")
    parser.add_argument("--folder", type=Path, help="with --network: keep its files here, and use those that are there")
    parser.add_argument("--engines", nargs="+", default=[""], metavar="TEXT", help="with --network: rows named so")


def main(options: argparse.Namespace) -> int:
    """Print every table; returns 1 if a bound was missed."""
    names = [options.size] if options.size else ["tiny"] if options.quick else ["small", "large"]
    rounds = 3 if options.quick else options.rounds
    if options.network:
        shape, threads = SHAPES[options.network], [options.threads]
        network_tables(Tables(options), shape, threads, rounds, options.folder, True, options.engines)
        return 0
    print("; ".join(availability()))
    tables, shares = Tables(options), {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(SIZES[name], Path(folder), options.threads, 512 if options.quick else PROMPT)
            for title, columns, case in cases(bench, options.quick):
                tables.rates(title, columns, [measured(case, rounds)])
            shares[name] = {dtype: bench.shares(dtype, rounds) for dtype in FORMATS}
            tables.missed += print_shares(f"8. Parts of a decode step, {bench.size}", shares[name], options.markdown)
            del bench
            gc.collect()
            for title, columns, case in far_cases(SIZES[name], Path(folder, "far"), options):
                tables.rates(title, columns, [measured(case, rounds)])
    tables.end(draw_each, shares=shares)
    return tables.verdict()


def cases(bench: Bench, quick: bool) -> Iterator[tuple[str, Columns, Case]]:
    """The three tables of one size."""
    what = f"{bench.size}, {bench.threads} thr"
    case = Case(f"{len(bench.prompt)} tokens", bench.prefill, (faster(2, "kvcache f32", Transformers.name),))
    yield f"8a. Prefill, {what}", SPEED, case
    bounds = (faster(3, "kvcache f32", Transformers.name), faster(1, "kvcache f32", OpenVino.name))
    case = Case(f"at {len(bench.prompt)} tokens", bench.decode, bounds)
    yield f"8b. Decode, {what}", SPEED, case
    shared, tail = (480, 32) if quick else (SHARED, TAIL)
    bounds = (at_most(0.05, CACHED, COLD), at_most(1, CACHED, f"{OpenVino.name}, {CACHED}"))
    case = Case(f"{shared} of {shared + tail} cached", partial(bench.first_token, shared, tail), bounds)
    yield f"8c. First token, {what}", FIRST, case


def far_cases(size: Size, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, Columns, Case]]:
    """Decode and prefill far into a text, compared with OpenVINO only: the other rivals need over a minute for it."""
    prompt, more = (1024, 64) if options.quick else (FAR, MORE)
    size = replace(size, positions=prompt + more + 2 * STEPS)
    bench = Bench(size, folder, options.threads, prompt, FAR_FORMATS, (OpenVino.name,))
    what = f"{size}, {options.threads} thr"
    case = Case(f"at {prompt} tokens", bench.decode, (faster(2, "kvcache q4", OpenVino.name),))
    yield f"8d. Decode far into a text, {what}", FAR_SPEED, case
    bounds = (faster(1, "kvcache f32", OpenVino.name), faster(1, "kvcache q4", OpenVino.name))
    case = Case(f"{more} tokens behind {prompt}", partial(bench.extend, more), bounds)
    yield f"8e. Prefill far into a text, {what}", FAR_SPEED, case


def print_shares(title: str, shares: dict[str, dict[str, float]], as_markdown: bool) -> int:
    """Print the table; returns the number of formats over the bound. NumPy on one row is mostly call overhead."""
    cells = []
    for dtype, parts in shares.items():
        rest = parts[PYTHON] + parts[ROWS]
        verdict = f"{'met' if rest < PYTHON_SHARE else 'MISSED'}"
        cells.append([f"kvcache {dtype}", *(f"{parts[what]:.1%}" for what in SHARES), f"{rest:.1%}", verdict])
    header = ["part of a step", *SHARES, f"{ROWS} and {PYTHON}", f"under {PYTHON_SHARE:.0%}"]
    show(as_markdown, title, header, cells)
    return sum(row[-1] == "MISSED" for row in cells)
