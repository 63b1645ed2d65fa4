"""The overhead of Python: attention over a tiny cache compared with one NumPy call, and the memory of a call."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.support.blas import set_threads
from bench.support.common import Candidate, Case, at_most
from bench.support.rates import Columns
from bench.support.report import show
from kvcache.paged.cache import PagedKvCache

__all__ = ["OVERHEAD", "allocation_report", "cases", "print_allocations"]

DOT = "numpy.dot"
OVERHEAD = Columns(("attention", "attention, out="), rivals=(DOT,))
TOKENS = 16
OBJECTS = 512  # bytes for ints, tuples, the dict of keywords; a copy of K, V, queries or scores takes more


def tiny(dtype: str, head_dim: int) -> tuple[PagedKvCache, Any, Any]:
    """One sequence of 16 tokens and one head, a query for it, and its id."""
    cache = PagedKvCache(1, TOKENS, 1, head_dim, dtype=dtype)
    cache.allocate(1, TOKENS)
    rng = np.random.default_rng(0)
    cache.write(0, 1, *rng.standard_normal((2, TOKENS, 1, head_dim), np.float32))
    return cache, rng.standard_normal((1, 1, head_dim), np.float32), np.array([1], np.uint64)


def cases() -> Iterator[Case]:
    """The bound is on 16 channels, since `numpy.dot` multiplies vectors of 16; the other cases show the growth."""
    for dtype, head_dim in (("f32", 16), ("f16", 16), ("f32", 128), ("q4", 128)):
        bounds = tuple(at_most(4, name, DOT) for name in OVERHEAD.subjects) if head_dim == 16 else ()
        yield Case(f"{dtype}, head_dim {head_dim}", partial(_candidates, dtype, head_dim), bounds)


def _candidates(dtype: str, head_dim: int) -> Iterator[Candidate]:
    set_threads(1)
    cache, query, ids = tiny(dtype, head_dim)
    out = np.empty_like(query)
    a, b = np.random.default_rng(1).standard_normal((2, 16), np.float32)
    yield Candidate(DOT, partial(np.dot, a, b))
    yield Candidate("attention", partial(cache.attention, 0, query, ids))
    yield Candidate("attention, out=", partial(cache.attention, 0, query, ids, out=out))


def allocation_report() -> list[dict[str, Any]]:
    """The peak of the bytes that a call allocates, and those of its result; tracemalloc counts NumPy's arrays."""
    rows = []
    for dtype in ("f32", "q4"):
        cache, query, ids = tiny(dtype, 128)
        out = np.empty_like(query)
        for name, call, result in (
            ("attention", partial(cache.attention, 0, query, ids), query.nbytes),
            ("attention, out=", partial(cache.attention, 0, query, ids, out=out), 0),
        ):
            rows.append({"call": f"{name}, {dtype}", "result": result, "peak": _peak(call)})
    return rows


def _peak(call: Callable[[], object]) -> int:
    call()
    tracemalloc.start()
    try:
        call()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def print_allocations(rows: list[dict[str, Any]], *, as_markdown: bool = False) -> int:
    """Print the report; returns the number of calls that allocate more than small objects."""
    cells = []
    for row in rows:
        verdict = "met" if row["peak"] - row["result"] <= OBJECTS else "MISSED"
        cells.append([row["call"], str(row["result"]), str(row["peak"] - row["result"]), verdict])
    header = ["bytes of a call", "result", "beyond it", f"at most {OBJECTS}, small objects"]
    show(as_markdown, "Allocations", header, cells)
    return sum(row[-1] == "MISSED" for row in cells)
