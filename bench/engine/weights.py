"""`python -m bench weights`: products with weights in every format, networks of them, and rivals.

The products read matrices that no cache holds, as the layers of a network do, compared with a plain read of as many
bytes and with the arithmetic peak of the same run. The network has the shape of Llama-3.2-1B and random weights;
rivals read the same GGUF files with their default precision, transformers the f16 file in bf16. `--only popular`
measures networks that people run, in the types of weights that they run.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine.engine_rivals import availability
from bench.engine.matrices import Products
from bench.engine.popular import COLUMNS, ENGINES, Plan, measure_popular, results_of, rows_of, verdicts_of
from bench.engine.rows import rows_table
from bench.engine.shapes import POPULAR, SHAPES, Shape
from bench.engine.weight_rivals import COMMON_FILES, GGUF_FILES, RIVALS, measure_each, write_files
from bench.serving.measured import Measured
from bench.support.blas import set_threads
from bench.support.ceilings import BlockReader, byte_products, fma, huge_array
from bench.support.checkpoints import SIZES, Size
from bench.support.common import Candidate, Case, Claim, Result, share_of
from bench.support.over_threads import counts
from bench.support.rates import Columns
from bench.support.tables import Tables, draw_each, measured
from kvcache.engine import InferenceEngine
from kvcache.kernels.matrix import MATRIX_FORMATS

__all__ = ["add_arguments", "main", "network_tables"]

SHAPE = (8192, 2048)  # outputs, inputs: about the mean of the network's matrices
COLD_BYTES = 160 << 20  # matrices in turn take so much at least
ROWS_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k")  # of the times by rows, unless others are named
FEW, MANY = (1, 2, 4, 8, 16), 512
READ, FMA, DOTS = "plain read", "FMA peak", "int8 peak"
PROMPT, CONTEXT, STEPS, ROOM = 512, 1024, 16, 32  # the last: tokens that fit behind a context


def product_cases(format: str, shape: tuple[int, int], cold_bytes: int, threads: int) -> Iterator[Case]:
    """One row beside a plain read of the same bytes; more rows, and many, beside the arithmetic peak."""
    set_threads(threads)
    products = Products(format, shape, cold_bytes)
    packed = MATRIX_FORMATS[format].packed
    peak = byte_products(threads) if packed else fma(threads)
    name = DOTS if packed else FMA
    reader = BlockReader(
        huge_array(cold_bytes), np.arange(products.nbytes // 4096), 4096, max(1, cold_bytes // products.nbytes), threads
    )
    read = Candidate(READ, reader.run, facts={"work": float(reader.nbytes)})

    def make(n: int) -> Iterator[Candidate]:
        x = np.random.default_rng(2).standard_normal((n, shape[1]), np.float32)
        operations = 2.0 * n * shape[0] * shape[1]
        yield Candidate(format, partial(products.run, x), facts={"work": float(products.nbytes), "flop": operations})
        if n < MANY:
            yield read
        if peak is not None:
            # The time that the machine's peak needs for `operations`.
            yield Candidate(name, peak[0], peak[1] / operations, facts={"flop": operations})

    for n in (*FEW, MANY):
        claims: tuple[Claim, ...] = ()
        if n == 1:
            claims = (share_of(0.8 if packed else 0.85, format, READ),)
        elif n == MANY:
            claims = (share_of(0.7 if packed else 0.85, format, name),)
        yield Case(f"{n} row{'s' * (n > 1)}", partial(make, n), claims)


class Ours:
    """The engine over a GGUF file or, with `weights`, over the same numbers in another format."""

    def __init__(
        self, path: Path, weights: str, context: int, activations: str = "int8", dtype: str = "q8"
    ) -> None:
        self._context, blocks = context, (context + ROOM) // 16 + 2
        self.engine = InferenceEngine.from_gguf(
            path, weights=weights, activations=activations, dtype=dtype, num_blocks=blocks
        )

    def prefill(self, tokens: npt.NDArray[np.uint32]) -> None:
        """Run a prompt with an empty cache, up to the logits of its last token."""
        self.engine.reset()
        self.engine.prefill_from_pos(tokens, 0)

    def rewind(self) -> None:
        """Nothing: `decode` names its positions, which cuts the text."""

    def decode(self, steps: int) -> None:
        """Run greedy decode steps behind the context."""
        token = 3
        for i in range(steps):
            token = int(self.engine.decode_step(token, self._context + i).argmax())


def builders(
    folder: Path, threads: int, rivals: bool, context: int, names: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """`(name, function that makes the engine)` for each engine and file."""
    if "f16" in names:
        for weights in ("f32", "q8", "q4"):
            yield f"kvcache {weights}", partial(Ours, folder / "f16.gguf", weights, context)
        yield "kvcache bf16 x bf16", partial(Ours, folder / "f16.gguf", "bf16", context, "bf16")
    files = [name for name in names if (folder / f"{name}.gguf").exists()]
    for name in files:
        yield f"kvcache {name}.gguf", partial(Ours, folder / f"{name}.gguf", "auto", context)
    for rival, reads in RIVALS.items() if rivals else ():
        for name in (one for one in files if one in reads):
            yield f"{rival.name} {name}", partial(rival, folder / f"{name}.gguf", threads)


def candidates(engine: Any, name: str, vocabulary: int, context: int) -> Iterator[tuple[str, Candidate]]:
    """Prefill of `PROMPT` tokens, and decode steps behind `context`."""
    rng = np.random.default_rng(3)

    def fresh(count: int) -> npt.NDArray[np.uint32]:
        return rng.integers(3, vocabulary, count, dtype=np.uint32)

    work, step = {"work": float(PROMPT)}, {"work": 1.0}
    if hasattr(engine, "first_token"):  # by a clock of its own, over a new prompt each time, which no cache contains
        yield "prefill", Candidate(name, seconds=lambda: engine.first_token(fresh(PROMPT)), facts=work)
        yield "decode", Candidate(name, seconds=lambda: engine.step(fresh(context), STEPS), facts=step)
        return
    prompt = fresh(context)
    yield "prefill", Candidate(name, partial(engine.prefill, prompt[:PROMPT]), facts=work)
    engine.prefill(prompt)
    yield "decode", Candidate(name, partial(engine.decode, STEPS), STEPS, engine.rewind, step)


def measure_network(
    vocabulary: int, folder: Path, threads: int, rounds: int, rivals: bool, context: int,
    named: Sequence[str] = ("",), files: Sequence[str] = COMMON_FILES,
) -> dict[str, Result]:
    """Decode and prefill of each engine and file.

    Args:
        files: names of `GGUF_FILES`.
        named: what the names of the engines contain, one of these texts each.
    """
    results = {what: Result(what, {}) for what in ("decode", "prefill")}
    built = builders(folder, threads, rivals, context, files)
    wanted = ((name, build) for name, build in built if any(text in name for text in named))
    measure_each(wanted, partial(candidates, vocabulary=vocabulary, context=context), results, threads, rounds)
    return results


def _folder_of(name: str, folder: Path) -> Path:
    """The folder for the files of a network."""
    return folder / re.sub(r"[^a-z0-9]+", "-", name.lower())


def network_tables(
    tables: Tables,
    size: Size | Shape,
    threads: Sequence[int],
    rounds: int,
    folder: Path | None,
    rivals: bool,
    named: Sequence[str],
    files: Sequence[str] = COMMON_FILES,
) -> None:
    """Print decode and prefill of a network in every format of weights, against rivals that read its files.

    Args:
        folder: keeps the files; None: they are temporary.
        named, files: as of `measure_network`.
    """
    print("; ".join(availability(RIVALS)))
    name, context, vocabulary = (
        (size.what, size.context, size.vocabulary) if isinstance(size, Shape) else (str(size), CONTEXT, size.vocabulary)
    )
    with tempfile.TemporaryDirectory() as temporary:
        kept = _folder_of(name, folder or Path(temporary))
        write_files(size, kept, files)
        for count in threads:
            results = measure_network(vocabulary, kept, count, rounds, rivals, context, named, files)
            for what, result in results.items():
                columns = Columns(tuple(result.times), unit="tokens/s", scale=1.0)
                of = f"at {context} tokens" if what == "decode" else f"of {PROMPT} tokens"
                title = f"9b. {what.capitalize()} {of}, {name}, {count} thr"
                tables.rates(title, columns, [result])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=7, help="rounds per case (default 7)")
    parser.add_argument("--threads", type=counts, default=[1, 2], metavar="N,N", help="threads (default 1,2)")
    parser.add_argument("--only", choices=("products", "rows", "network", "popular"), help="one of the parts")
    formats = list(MATRIX_FORMATS)
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats, help="formats of the products")
    parser.add_argument("--network", choices=("1b", *SHAPES), default="1b", help="another network than Llama's 1B")
    parser.add_argument("--no-rivals", action="store_true", help="only our own engine")
    parser.add_argument("--engines", nargs="+", default=[""], metavar="TEXT", help="rows whose names have such a text")
    parser.add_argument(
        "--files", nargs="+", choices=tuple(GGUF_FILES), default=COMMON_FILES, metavar="TYPE",
        help=f"types of GGUF files, of {', '.join(GGUF_FILES)} (default {' '.join(COMMON_FILES)})",
    )
    parser.add_argument("--folder", type=Path, help="keep the GGUF files here (4.7 GB), and use those that are there")
    popular = parser.add_argument_group("popular", "networks that people run; only with --only popular")
    popular.add_argument("--shape", nargs="+", choices=tuple(POPULAR), default=list(POPULAR), help="some of them")
    popular.add_argument("--layers", type=int, help="of all of them, fewer than they have; the table says so")
    popular.add_argument("--rivals", nargs="+", choices=tuple(ENGINES), default=list(ENGINES), help="some engines")
    popular.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS, help="some columns")
    popular.add_argument("--context", type=int, default=Plan().far, help="tokens of a long text (default 16384)")
    popular.add_argument("--patience", type=float, default=Plan().patience, metavar="SECONDS",
                         help="that a long text may take where it is computed (default 120)")
    popular.add_argument("--limit", type=float, default=600.0, metavar="SECONDS",
                         help="that one engine may take with one network (default 600)")
    popular.add_argument("--resume", type=Path, metavar="FILE",
                         help="keep what each engine did in this file, and measure what it does not have")


def popular_tables(tables: Tables, options: argparse.Namespace, folder: Path, threads: int) -> None:
    """Print a table for each network that people run."""
    measured = Measured(options.resume)
    plan = Plan(far=options.context, rounds=options.rounds, patience=options.patience)
    if options.quick:
        plan = Plan(32, 32, 64, 48, 1)
    for name in options.shape:
        one = POPULAR[name]
        size = one.shape(one.fewest, 4096) if options.quick else one.shape(options.layers)
        for file in ("q4_k_m",) if options.files is COMMON_FILES else options.files:
            path = _folder_of(size.what, folder) / f"{file}.gguf"
            try:
                write_files(size, path.parent, (file,))
            except ImportError as error:
                raise SystemExit(f"--only popular needs llama.cpp, which packs its files: {error}") from error
            found, reasons = measure_popular(
                options.rivals, path, size.vocabulary, threads, plan, options.limit, measured, options.columns
            )
            title = f"9d. {size.what}, {file}, {threads} thr"
            tables.rows(title, *rows_of(found, plan, reasons), results_of(found, plan), verdicts_of(found, plan))


def main(options: argparse.Namespace) -> int:
    """Print every table; returns 1 if a bound was missed."""
    if options.only == "popular":
        print("; ".join(availability(ENGINES.values())))
    rounds = 2 if options.quick else options.rounds
    shape, cold = ((256, 512), 1 << 20) if options.quick else (SHAPE, COLD_BYTES)
    tables = Tables(options)
    for threads in options.threads:
        for format in options.formats if options.only in (None, "products") else ():
            results = [measured(case, rounds) for case in product_cases(format, shape, cold, threads)]
            packed = MATRIX_FORMATS[format].packed
            columns = Columns((format,), ceilings=lambda _: (READ,), rivals=(READ, DOTS if packed else FMA))
            title = f"9a. Products with {format} weights, {shape[0]} x {shape[1]}, {threads} thr"
            tables.rates(title, columns, results)
        if options.only in (None, "rows"):
            formats = [name for name in ROWS_FORMATS if name in options.formats] or options.formats
            for bytes_, where in ((cold, "memory"), (0, "the cache")):
                sizes = shape if bytes_ else (shape[0] // 16, shape[1])
                rows_table(formats, sizes, bytes_, threads, rounds, where, tables)
    if options.only in (None, "network"):
        size = SHAPES.get(options.network) or SIZES["tiny" if options.quick else "1b"]
        network_tables(
            tables, size, options.threads, rounds, options.folder, not options.no_rivals, options.engines, options.files
        )
    if options.only == "popular":
        with tempfile.TemporaryDirectory() as temporary:
            for threads in options.threads:
                popular_tables(tables, options, options.folder or Path(temporary), threads)
    tables.end(draw_each, threads=True)
    return tables.verdict()
