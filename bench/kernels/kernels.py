"""`python -m bench kernels`: attention and writes, with the machine's ceilings, NumPy, PyTorch and llama.cpp."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import kvcache
from bench.kernels import attention_rivals, chunks, decode, latent_forms, overhead, parts, recurrence, writes
from bench.kernels.roofline import plot_kernels
from bench.support.blas import blas_found
from bench.support.ceilings import kind
from bench.support.common import SETTLE, Case, run_case
from bench.support.rates import Columns, print_rates
from bench.support.tables import Tables

__all__ = ["add_arguments", "main"]


@dataclass(frozen=True)
class Item:
    """One table of the run, or two that show different candidates of the same cases.

    Attributes:
        word: the argument of `--only` that selects it.
        titles: for each table its title and its columns.
        make: makes the cases from the options.
        after: further reports: name, function that makes the rows, function that prints them.
        serial: whether everything runs on one thread, so that the thread's clock can be used.
    """

    word: str
    titles: tuple[tuple[str, Callable[[], Columns]], ...]
    make: Callable[[argparse.Namespace], Iterable[Case]]
    after: tuple[tuple[str, Callable[[argparse.Namespace], Any], Callable[..., int]], ...] = field(default=())
    serial: bool = False


def _decode_cases(options: argparse.Namespace) -> Iterator[Case]:
    return decode.cases(options.context, options.batch, options.head_dim, options.block_size, options.threads)


def _write_cases(options: argparse.Namespace) -> Iterator[Case]:
    tokens = 1024 if options.quick else 8192
    yield from writes.write_cases(tokens, tuple(options.head_dim))


def _thread_cases(options: argparse.Namespace) -> Iterator[Case]:
    return chunks.thread_cases(2048 if options.quick else 8192) if max(options.threads) > 1 else iter(())


ITEMS = (
    Item(
        "decode",
        (
            ("1. Decode over scattered cold blocks: f32, f16", lambda: decode.FLOATS),
            ("2. Decode, quantised (rotation of the queries included)", lambda: decode.QUANTISED),
        ),
        _decode_cases,
    ),
    Item(
        "prefill",
        (("3. Prefill and extend: 512 causal queries", lambda: chunks.PREFILL),),
        lambda o: chunks.prefill_cases([c for c in o.context if c in o.prefill], o.head_dim, o.block_size, o.threads),
    ),
    Item("write", (("4a. Write path: GB/s of float32 input", lambda: writes.WRITE),), _write_cases),
    Item(
        "append",
        (("4b. A token for each of many sequences", lambda: writes.APPEND),),
        lambda o: writes.append_cases(32 if o.quick else 256, 64 if o.quick else 512),
        (
            (
                "memory",
                lambda o: writes.memory_report((1024, 4096) if o.quick else (4096, 32768), ("f32", "f16", "q4")),
                writes.print_memory,
            ),
        ),
        serial=True,
    ),
    Item(
        "mixed",
        (("5a. Prefill chunk and decodes in one call", lambda: chunks.MIXED),),
        lambda o: chunks.mixed_cases(63, 1024 if o.quick else 2048, o.threads),
    ),
    Item(
        "shared",
        (("5b. Decodes of texts that begin alike", lambda: chunks.SHARED),),
        lambda o: chunks.shared_cases(8, o.threads),
    ),
    Item("threads", (("5c. The second thread", chunks.thread_columns),), _thread_cases),
    Item(
        "levels",
        (("6. SIMD levels on decode", decode.level_columns),),
        lambda o: decode.level_cases(o.context[-1:] if o.quick else o.prefill, o.threads),
    ),
    Item(
        "recurrence",
        (("8. The recurrence of layers with a state", lambda: recurrence.RECURRENCE),),
        lambda o: recurrence.recurrence_cases((1, 64) if o.quick else (1, 512), o.threads),
    ),
    Item(
        "latent",
        ((latent_forms.latent_title(), lambda: latent_forms.LATENT),),
        lambda o: latent_forms.latent_cases(
            o.prefill[:1], (1, 64) if o.quick else (1, 16, 64, 256, 512, 1024), ("f16", "q4"), o.threads
        ),
    ),
    Item(
        "overhead",
        (("7. Python overhead: 1 sequence, 16 tokens, 1 head", lambda: overhead.OVERHEAD),),
        lambda o: overhead.cases(),
        (("allocations", lambda o: overhead.allocation_report(), overhead.print_allocations),),
        serial=True,
    ),
)


def _numbers(text: str) -> list[int]:
    return [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=9, help="rounds per case (default 9)")
    parser.add_argument("--only", choices=[item.word for item in ITEMS], nargs="+", default=[], help="run some items")
    parser.add_argument("--parts", action="store_true", help="only what parts of a chunk take, by Linux's perf")
    for name, default, quick in (
        ("context", "1k,4k,16k,32k", "1k,4k"), ("batch", "1,8", "1"), ("head-dim", "128,64", "128"),
        ("block-size", "16,32", "16"), ("threads", "1,2", "1,2"),
    ):
        words = f"comma-separated (default {default}; {quick} with --quick)"
        parser.add_argument(f"--{name}", type=_numbers, metavar="N,N", help=words)
        parser.set_defaults(**{f"{name}_default": (default, quick)})


def _complete(options: argparse.Namespace) -> None:
    for name in ("context", "batch", "head-dim", "block-size", "threads"):
        at = name.replace("-", "_")
        if getattr(options, at) is None:
            setattr(options, at, _numbers(getattr(options, f"{name}_default")[options.quick]))
    options.prefill = [4096] if options.quick else [4096, 16384]


def main(options: argparse.Namespace) -> int:
    """Print every table; returns 1 if a bound was missed."""
    _complete(options)
    if options.parts:
        parts.print_parts(options)
        return 0
    rounds = 3 if options.quick else options.rounds
    print(f"{kind()}; {'; '.join(attention_rivals.availability())}")
    if not blas_found():
        print("NumPy's number of threads cannot be set here: its times are with its own default")
    threads = kvcache.get_num_threads()
    tables, more = Tables(options), dict[str, Any]()
    for item in ITEMS:
        if options.only and item.word not in options.only:
            continue
        results = [
            run_case(case, rounds, threaded=not (item.serial or case.what.endswith(", 1 thr")), settle=SETTLE)
            for case in item.make(options)
        ]
        (title, columns), *others = item.titles
        tables.rates(title, columns(), results)
        for title, columns in others:
            tables.missed += print_rates(title, columns(), results, as_markdown=options.markdown)
        for name, report, show in item.after:
            more[name] = report(options)
            tables.missed += show(more[name], as_markdown=options.markdown)
    kvcache.set_num_threads(threads)
    tables.end(plot_kernels, threads=True, **more)
    return tables.verdict()
