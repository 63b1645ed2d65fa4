"""Times of products by the number of rows that they multiply: more rows never take less time than fewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np

from bench.engine.matrices import Products
from bench.support.blas import set_threads
from bench.support.common import Candidate, Case, Claim, at_most, run_case
from bench.support.report import time_text
from bench.support.tables import Tables

__all__ = ["rows_table"]

ROWS = range(1, 17)
BOUND = 1.03  # time of some rows over that of one more, for the noise of the clock


def _name(n: int) -> str:
    return f"{n} row{'s' * (n > 1)}"


def _products(format: str, shape: tuple[int, int], cold_bytes: int) -> Iterator[Candidate]:
    products = Products(format, shape, cold_bytes)
    for n in ROWS:
        x = np.random.default_rng(2).standard_normal((n, shape[1]), np.float32)
        facts = {"work": float(products.nbytes), "flop": 2.0 * n * shape[0] * shape[1]}
        yield Candidate(_name(n), partial(products.run, x), facts=facts)


def rows_table(
    formats: Sequence[str], shape: tuple[int, int], cold_bytes: int, threads: int, rounds: int, where: str,
    tables: Tables,
) -> None:
    """Print a row for each number of rows, with the time of each format, and mark times above that of one row more.

    Args:
        shape: outputs and inputs of the matrices.
        cold_bytes: as of `Products`.
        where: the place of the weights, in words.
    """
    set_threads(threads)
    claims: tuple[Claim, ...] = tuple(at_most(BOUND, _name(n), _name(more)) for n, more in pairwise(ROWS))
    results = [
        run_case(Case(format, partial(_products, format, shape, cold_bytes), claims), rounds, threaded=True)
        for format in formats
    ]
    missed = {(result.what, verdict[0].one) for result in results for verdict in result.verdicts() if not verdict[-1]}
    rows = [
        [name, *(time_text(median(r.times[name])) + " !" * ((r.what, name) in missed) for r in results)]
        for name in map(_name, ROWS)
    ]
    title = f"9c. Products by rows, {shape[0]} x {shape[1]} weights from {where}, {threads} thr"
    tables.rows(title, ["", *formats], rows, results, f"!: more than {BOUND:g} times as long as one row more")
