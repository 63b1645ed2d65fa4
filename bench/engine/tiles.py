"""`python -m bench tiles`: the level amx beside avx512, on a CPU that has it; five minutes.

Whether both give the same bits; what the instructions cost in cycles; products, prompts of a network of a billion
weights in Q4_0 (if llama-cpp-python writes the file, else in q4 as the engine packs them), and chunks of attention.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

import kvcache
from bench.engine.weight_rivals import write_files
from bench.engine.weights import COLD_BYTES, PROMPT, SHAPE, Ours, Products
from bench.support.blas import set_threads
from bench.support.checkpoints import SIZES, Size
from bench.support.common import Candidate, Case, at_most, faster
from bench.support.rates import Columns
from bench.support.scattered import Scattered, Shape, queries_of
from bench.support.tables import Tables, measured
from kvcache.kernels import kernels

__all__ = ["add_arguments", "main"]

Float32 = npt.NDArray[np.float32]

LEVELS = ("amx", "avx512")
FORMATS = ("q8_0", "q4_0", "q4_k", "q6_k")
ROWS = (1, 16, 32, 512)
COLUMNS = Columns(LEVELS, rivals=("avx512",), unit="GFLOP/s")
FEW, IN_BF16, ASKED = "a row", "amx, bf16", "450 tokens/s"
# What short products are to gain over avx512 by default: with the core for us alone, and beside a busy thread.
WINDOWS = (
    ("q8_0", "int8", 512, "1.6, 1.4"), ("q8_0", "int8", 32, "1.5, 1.3"), ("q8_0", "int8", 16, "1.35"),
    ("q4_0", "int8", 512, "1.6, 1.4"), ("q4_0", "int8", 32, "1.5, 1.3"), ("q4_0", "int8", 16, "1.35"),
    ("q4_k", "int8", 512, "1.4"), ("q6_k", "int8", 512, "1.4"),
    ("q8_0", "bf16", 512, "2.5"), ("q4_0", "bf16", 512, "2.5"), ("q4_k", "bf16", 512, "2.5"),
    ("q6_k", "bf16", 512, "2.5"), ("q4_0", "bf16", 32, ""), ("q4_0", "bf16", 1, ""),
    ("f16", "bf16", 512, "4"), ("f32", "bf16", 512, "4"),
    ("bf16", "bf16", 512, "4.6"),  # 3.1 with one block of rows and four panels
)


def at_level(level: str, run: Callable[[], object]) -> object:
    """Run it at a level."""
    with kvcache.use_simd(level):
        return run()


def at_both(run: Callable[[], object], facts: dict[str, float]) -> Iterator[Candidate]:
    """The same at either level."""
    for level in LEVELS:
        yield Candidate(level, partial(at_level, level, run), facts=facts)


def same_bits(shape: tuple[int, int], context: int) -> bool:
    """Print for products and attention whether both levels have the same bits; returns whether all have."""
    rng, equal = np.random.default_rng(4), True

    def compare(what: str, run: Callable[[], Float32]) -> None:
        nonlocal equal
        mine, theirs = (np.copy(at_level(level, run)) for level in LEVELS)
        different = int((mine.view(np.uint32) != theirs.view(np.uint32)).sum())
        equal &= not different
        print(f"{what}: {'the same bits' if not different else f'{different} of {mine.size} DIFFER'}", flush=True)

    for format in FORMATS:
        matrix = Products(format, shape, 0).matrices[0]
        for how in ("int8", "exact"):
            x = rng.standard_normal((100, shape[1]), np.float32)
            compare(f"{format} weights, {how}, 100 rows", partial(matrix.multiply, x, activations=how))
    for dtype in [name for name, format in kernels.FORMATS.items() if format.quantised]:
        scattered = Scattered(Shape(context), dtype, cold=False)
        queries = queries_of(Shape(context), 100)
        out = np.empty_like(queries)

        def attend(scattered: Scattered = scattered, queries: Float32 = queries, out: Float32 = out) -> Float32:
            scattered.attend(queries, out, query_lens=np.array([100]))
            return out

        compare(f"attention of 100 queries in {dtype}", attend)
    return equal


def compiled(folder: str, *flags: str) -> Path | None:
    """tiles.c as a program or a library; None, with a line that says so, if no compiler knows the instructions."""
    source, made = Path(__file__).parents[1] / "support" / "tiles.c", Path(folder, "-".join(("tiles", *flags)))
    command = [*shlex.split(os.environ.get("CC", "cc")), "-O2", "-mamx-tile", "-mamx-int8", "-mavx512f", *flags]
    try:
        subprocess.run([*command, str(source), "-o", str(made)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"\nnot measured: instructions ({type(error).__name__}: expected a compiler that knows them)")
        return None
    return made


def print_costs(folder: str) -> None:
    """Run tiles.c: what the instructions do and cost on this CPU."""
    if (program := compiled(folder)) is not None:
        found = subprocess.run([str(program)], check=False, capture_output=True, text=True)
        print(f"\n{found.stdout}" if found.returncode == 0 else f"\nnot measured: instructions ({found.returncode})")


def print_windows(folder: str, windows: int) -> None:
    """Print how many times as fast as avx512 products of 32 outputs are: windows of some 0.1 ms.

    A window counts if the core was for us alone before it and behind it, or shared with a busy thread both times.
    """
    if (path := compiled(folder, "-shared", "-fPIC")) is None:
        return
    state, rng = ctypes.CDLL(str(path)).state_of_the_core, np.random.default_rng(5)
    head = f"{'alone':>14} (windows){'beside a busy thread':>25}    asked for"
    print(f"\n{'times as fast as avx512, by medians':40}{head}")
    set_threads(1)
    for format, how, rows, wanted in WINDOWS:
        matrix = Products(format, (32, 2048), 0).matrices[0]
        x = rng.standard_normal((rows, 2048), np.float32)
        runs = [partial(matrix.multiply, x, activations=each) for each in (how, "int8")]
        seconds: dict[tuple[str, int], list[float]] = {}
        for window in range(windows):
            level = LEVELS[window % 2]
            with kvcache.use_simd(level):
                before, began = state(), perf_counter()
                runs[window % 2]()
                took = perf_counter() - began
            if window > 10 and state() == before:
                seconds.setdefault((level, before), []).append(took)
        line = f"{format}, {how}, {rows} rows".ljust(40)
        for place in range(2):
            mine, theirs = (seconds.get((level, place), []) for level in LEVELS)
            enough = min(len(mine), len(theirs)) >= 10
            line += f"{f'{np.median(theirs) / np.median(mine):.2f}' if enough else '-':>14} ({len(mine):5})"
        print(f"{line}    {wanted}", flush=True)


def product_cases(format: str, shape: tuple[int, int], cold_bytes: int, threads: int) -> Iterator[Case]:
    """Products of a few numbers of rows, with matrices that no cache holds."""
    set_threads(threads)
    products = Products(format, shape, cold_bytes)
    for n in ROWS:
        x = np.random.default_rng(2).standard_normal((n, shape[1]), np.float32)
        facts = {"work": 2.0 * n * shape[0] * shape[1]}
        how = "bf16" if format == "bf16" else "int8"
        yield Case(f"{n} rows", partial(at_both, partial(products.run, x, how), facts))


def network_cases(path: Path, weights: str, vocabulary: int, threads: int) -> Iterator[Case]:
    """Prompts of 512 tokens and of 32 through a network, the latter beside a single token."""
    set_threads(threads)
    engine = Ours(path, weights, PROMPT)
    tokens = np.random.default_rng(3).integers(3, vocabulary, PROMPT, dtype=np.uint32)
    in_bf16 = Ours(path, weights, PROMPT, "bf16")

    def prompt() -> Iterator[Candidate]:
        facts = {"work": float(PROMPT)}
        yield from at_both(partial(engine.prefill, tokens), facts)
        yield Candidate(IN_BF16, partial(at_level, "amx", partial(in_bf16.prefill, tokens)), facts=facts)
        yield Candidate(ASKED, seconds=lambda: PROMPT / 450, facts=facts)

    own = (faster(1.0, IN_BF16, ASKED),) if threads == 1 else ()
    yield Case(f"{PROMPT} tokens", prompt, (faster(1.5, "amx", "avx512"), *own))

    def few() -> Iterator[Candidate]:
        yield from at_both(partial(engine.prefill, tokens[:32]), {"work": 32.0})
        yield Candidate(FEW, partial(engine.prefill, tokens[:1]), facts={"work": 1.0})

    yield Case("32 tokens", few, (at_most(2.2, "amx", FEW),))


def attention_cases(context: int, threads: int) -> Iterator[Case]:
    """512 queries over a context."""
    set_threads(threads)
    shape, queries = Shape(context), queries_of(Shape(context), PROMPT)
    pairs = sum(context - PROMPT + 1 + i for i in range(PROMPT))
    facts = {"work": 4.0 * pairs * shape.query_heads * shape.head_dim}
    for dtype in ("q8", "q4"):
        scattered = Scattered(shape, dtype, cold=False)
        run = partial(scattered.attend, queries, np.empty_like(queries), query_lens=np.array([PROMPT]))
        claims = (faster(1.4, "amx", "avx512"),)
        yield Case(f"{dtype}, {PROMPT} queries over {context}", partial(at_both, run, facts), claims)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=3, help="rounds per case (default 3)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, kvcache.get_num_threads()], help="threads")
    parser.add_argument("--folder", type=Path, help="keep the GGUF files here (3 GB), and use those that are there")


def network_file(size: Size, folder: Path) -> tuple[Path, str]:
    """The network's file, and the format of weights to ask for."""
    write_files(size, folder, ("q4_0",))
    packed = folder / "q4_0.gguf"
    return (packed, "auto") if packed.exists() else (folder / "f16.gguf", "q4")


def main(options: argparse.Namespace) -> int:
    """Print every table; returns 1 if bits differ or a bound was missed."""
    if not set(LEVELS) <= set(kvcache.simd_levels()):
        print(f"not measured: expected the levels {' and '.join(LEVELS)}, got {', '.join(kvcache.simd_levels())}")
        return 0
    quick, rounds = options.quick, 1 if options.quick else options.rounds
    shape, cold, context = ((256, 512), 1 << 20, 1024) if quick else (SHAPE, COLD_BYTES, 4096)
    equal, tables = same_bits((304, 2080), 1000), Tables(options)
    with tempfile.TemporaryDirectory() as folder:
        print_costs(folder)
        print_windows(folder, 200 if quick else 3000)

    def run(title: str, cases: Iterator[Case], columns: Columns) -> None:
        tables.rates(title, columns, [measured(case, rounds) for case in cases])

    with tempfile.TemporaryDirectory() as temporary:
        size = SIZES["tiny" if quick else "1b"]
        path, weights = network_file(size, options.folder or Path(temporary))
        for threads in dict.fromkeys(options.threads):
            for format in (*FORMATS[:2], "bf16"):  # with x in bf16 too, where bits differ
                title = f"Products with {format} weights, {shape[0]} x {shape[1]}, {threads} thr"
                run(title, product_cases(format, shape, cold, threads), COLUMNS)
            cases = network_cases(path, weights, size.vocabulary, threads)
            columns = Columns((*LEVELS, IN_BF16, FEW), rivals=("avx512", FEW), unit="tokens/s", scale=1.0)
            run(f"{path.stem} of {size}, {threads} thr", cases, columns)
            run(f"Attention, {threads} thr", attention_cases(context, threads), COLUMNS)
    tables.end()
    print(f"\nbits: {'the same' if equal else 'DIFFERENT'}; {tables.missed} bounds missed")
    return int(tables.missed > 0 or not equal)
