"""Cases of `bench kernels`: writes of f32 rows in every format, appends to many sequences, the memory of a call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.support.blas import set_threads
from bench.support.ceilings import huge_array, narrow
from bench.support.common import Candidate, Case, faster, share_of
from bench.support.rates import Columns
from bench.support.report import show
from bench.support.scattered import Shape, fill_rows, layer_count, scatter
from kvcache.kernels.kernels import FORMATS
from kvcache.paged.cache import PagedKvCache

__all__ = ["APPEND", "WRITE", "append_cases", "memory_report", "print_memory", "write_cases"]

NARROW, RATE = "read 4, write 2", "3 GB/s"
WRITE = Columns(tuple(FORMATS), lambda subject: (NARROW,))
APPEND = Columns(("one call", "a call each"), rivals=("a call each",))
CHUNK = 512  # tokens of a call: the default prefill chunk of an engine
FIXED = 1 << 20  # bytes by which the scratch memory of a large call may exceed that of a small one


def write_cases(tokens: int, head_dims: tuple[int, ...]) -> Iterator[Case]:
    """Writes of many tokens of one sequence on one thread: in calls of a prefill chunk, and in one call.

    A call checks all values before it writes any, so one large call reads them from memory twice. The ceiling reads
    the floats and writes half as many bytes.
    """
    bounds = (share_of(0.85, "f16", NARROW), share_of(1.0, "q4", RATE))
    for head_dim in head_dims:
        shape = Shape(tokens, 1, head_dim)
        for step in (min(CHUNK, tokens), tokens):
            yield Case(f"write {shape}, calls of {step}, 1 thr", partial(_write_candidates, shape, step), bounds)


def _write_candidates(shape: Shape, step: int) -> Iterator[Candidate]:
    set_threads(1)
    keys, values = fill_rows(shape.context, shape.kv_heads, shape.head_dim)
    sources = [(keys + np.float32(i), values) for i in range(layer_count(shape.float_bytes))]
    work = float(shape.float_bytes)
    for dtype in FORMATS:
        cache = PagedKvCache(
            shape.context // shape.block_size, shape.block_size, shape.kv_heads, shape.head_dim,
            num_layers=len(sources), dtype=dtype,
        )
        scatter(cache, np.array([1], np.uint64), [shape.context])
        yield Candidate(dtype, _Turns(cache, sources, step).run, facts={"work": work})
    source, target = (huge_array(shape.float_bytes * len(sources) // part) for part in (1, 2))
    run = narrow(source, target)
    yield Candidate(NARROW, run, count=source.nbytes / work, facts={"work": work})
    yield Candidate(RATE, seconds=work / 3e9)


class _Turns:
    """Writes the next input into the next layer, `step` tokens in a call."""

    def __init__(self, cache: PagedKvCache, sources: list[tuple[Any, Any]], step: int) -> None:
        self._cache, self._sources, self._step, self._turn = cache, sources, step, 0
        for _ in sources:
            self.run()

    def run(self) -> None:
        self._turn = (self._turn + 1) % len(self._sources)
        keys, values = self._sources[self._turn]
        for start in range(0, len(keys), self._step):
            stop = start + self._step
            self._cache.write(self._turn, 1, keys[start:stop], values[start:stop], start)


def append_cases(sequences: int, context: int) -> Iterator[Case]:
    """A new token in each of many sequences: the append, and the write of its K and V in one layer."""
    for dtype in ("f32", "f16", "q4"):
        make = partial(_append_candidates, dtype, sequences, context)
        yield Case(f"{sequences} tokens, {dtype}", make, (faster(1, "one call", "a call each"),))


def _append_candidates(dtype: str, sequences: int, context: int) -> Iterator[Candidate]:
    shape = Shape(context)
    work = float(sequences * shape.kv_heads * shape.head_dim * 8)
    rows = [x[:sequences].copy() for x in fill_rows(max(context, sequences), shape.kv_heads, shape.head_dim)]
    ids = np.arange(1, sequences + 1, dtype=np.uint64)
    cache = PagedKvCache(sequences * (context // 16 + 1), 16, shape.kv_heads, shape.head_dim, dtype=dtype)
    scatter(cache, ids, [context] * sequences)

    def shorten() -> None:
        for seq_id in ids.tolist():
            cache.truncate(seq_id, context)

    def together() -> None:
        cache.append_batch(ids)
        cache.write_batch(0, ids, *rows)

    def one_by_one() -> None:
        for i, seq_id in enumerate(ids.tolist()):
            cache.append(seq_id, 1)
            cache.write(0, seq_id, rows[0][i : i + 1], rows[1][i : i + 1])

    yield Candidate("one call", together, before=shorten, facts={"work": work})
    yield Candidate("a call each", one_by_one, before=shorten, facts={"work": work})


# Runs in its own process: the increase of the peak of resident memory by a first large call. The system counts in
# batches of pages, so the result is exact to some 100 KiB.
SCRIPT = """
import json, sys
import numpy as np
import kvcache
from kvcache.paged.cache import PagedKvCache

call, dtype, tokens, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
kvcache.set_num_threads(2)
cache = PagedKvCache(tokens // 16, 16, 8, 128, dtype=dtype)
cache.allocate(1, tokens)
keys = np.ones((tokens, 8, 128), np.float32)
keys[::2] = 2
for start in range(0, tokens, 64):
    cache.write(0, 1, keys[start:start + 64], keys[start:start + 64], start)
queries = np.ones((rows, 32, 128), np.float32)
cache.attention(0, queries[:1], [1])

def peak(reset):
    if reset:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    with open("/proc/self/status") as f:
        return {l.split(":")[0]: int(l.split()[1]) << 10 for l in f if l.startswith(("VmHWM", "VmRSS"))}

before = peak(True)["VmRSS"]
if call == "write":
    result = [np.empty(0)]
    cache.write(0, 1, keys, keys)
elif call == "read":
    result = cache.read(0, 1)
else:
    result = [cache.attention(0, queries, [1], query_lens=[rows])]
grown = peak(False)["VmHWM"] - before
print(json.dumps([sum(r.nbytes for r in result), grown]))
"""


def memory_report(contexts: tuple[int, int], dtypes: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row per call, format and context; empty if the system does not report a process's peak."""
    rows = []
    for dtype in dtypes:
        for call, queries in (("write", 1), ("read", 1), ("decode", 1), ("prefill", 512)):
            for context in contexts:
                run = [sys.executable, "-c", SCRIPT, call, dtype, str(context), str(queries)]
                done = subprocess.run(run, capture_output=True, text=True, check=False)
                if done.returncode:
                    return []
                result, grown = json.loads(done.stdout)
                sizes = {"result": result, "scratch": max(0, grown - result)}
                rows.append({"call": call, "dtype": dtype, "context": context, **sizes})
    return rows


def print_memory(rows: list[dict[str, Any]], *, as_markdown: bool = False) -> int:
    """Print the report; returns the number of calls that need more scratch memory at the larger context."""
    if not rows:
        print("\nnot measured: memory of a call (no resettable VmHWM in /proc)")
        return 0
    cells = []
    for small, large in zip(rows[::2], rows[1::2], strict=True):
        verdict = "met" if large["scratch"] <= small["scratch"] + FIXED else "MISSED"
        sizes = [f"{row[k] / 1024:.0f} KiB" for row in (small, large) for k in ("result", "scratch")]
        cells.append([f"{small['call']}, {small['dtype']}", *sizes, verdict])
    header = ["peak memory of a call"]
    for row in rows[:2]:
        header += [f"{row['context'] // 1024}k: result", "beyond it"]
    show(as_markdown, "Memory", [*header, "does not grow by 1 MiB"], cells)
    return sum(row[-1] == "MISSED" for row in cells)
