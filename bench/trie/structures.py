"""`python -m bench structures`: the cost of the bookkeeping, and its growth with the number of cached pages."""

from __future__ import annotations

import argparse

from bench.paged import tables
from bench.prefix import lookups
from bench.support.common import run_case
from bench.support.report import print_table
from bench.support.tables import Tables, draw_each
from bench.trie import entries, growth, memory, shapes, trie
from bench.trie.rivals import availability

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=15, help="rounds per case (default 15)")
    parser.add_argument("--only", metavar="WORD", default="", help="only tables with this word in their title")


def main(options: argparse.Namespace) -> int:
    """Print every table; returns 1 if a bound was missed."""
    rounds = 3 if options.quick else options.rounds
    sizes = (1_000, 10_000) if options.quick else (1_000, 10_000, 100_000, 1_000_000)
    for line in availability():
        print(line)
    run = Tables(options)
    for noun in (trie, growth, entries, lookups, tables, shapes):
        for table in noun.tables(sizes):
            if options.only.lower() not in table.title.lower():
                continue
            results = [run_case(case, rounds, threaded=table.threaded) for case in table.cases]
            run.missed += print_table(table, results, as_markdown=options.markdown)
            run.done.append((table, results))
    overhead = memory.report(sizes) if options.only.lower() in memory.TITLE.lower() else []
    if not run.done and not overhead:
        raise SystemExit(f"--only: expected a word of a title, got {options.only!r}")
    run.missed += memory.print_report(overhead, as_markdown=options.markdown)
    run.end(draw_each, memory=overhead)
    return run.verdict()
