"""`python -m bench outgrown`: decode steps of contexts that memory has no room for (`PagedKvCache(spill=)`).

The K and V of the 1B shape (16 layers, 32 query heads, 8 KV heads of 64 channels) are generated: a prefill of such
contexts takes hours. Keys of a page lie around a centre. Queries change slowly, so that a KV head chooses as large a
part of the pages of the token before again as in SmolLM2-135M behind 4,000 tokens: 0.70, of 28 pages. The share is
measured of what was generated, and printed. A step writes one token and attends to what its queries choose, in all
layers; it has no products with weights, so that ratios are lower than those of a whole network.

Columns: *held* and *read* are blocks of a layer that a step attends to and that it reads from the file; *waits* is the
share of lists of pages, one for each KV head and layer, that wait for one; *read_bytes* is what the system says that
the process has read from the device, per step. The file is read past the page cache where its file system allows.
Beside them stands what the device gives: random reads of one block, 16 at once.

Bytes and reads of a token, computed: a page of one KV head is 1,152 bytes in q4, a block of all heads of a layer 9,216
and 12,288 of the file. `top_tokens` of 1,024 choose 112 pages for each head, 14,336 in all: as many reads at most, of
176 MB, if nothing is in memory and no two heads choose the same page. A head at a time would be 59 MB with neighbours
of 4 pages; blocks of all heads bring what the other heads of the layer choose too. A fifth of a context holds what one
token chooses where the context has more than about 128k tokens; below that the heads together choose more than a fifth,
and each step reads most of it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.support.report import show
from kvcache import PagedKvCache, get_num_threads, set_num_threads
from kvcache.paged.reports import SpillStats

__all__ = ["add_arguments", "main"]

Float32 = npt.NDArray[np.float32]

LAYERS, HEADS, GROUP, DIM, PAGE = 16, 8, 4, 64, 16
REPEATED = 0.70  # of a head's pages from one token to the next, in SmolLM2
PIECE = 4096  # tokens that are written at once
GOAL = 0.6  # of the rate with all in memory, with a fifth of it there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768, 131072, 524288], help="tokens")
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.5, 0.2, 0.1], help="of blocks in memory")
    parser.add_argument("--top", type=int, default=1024, help="top_tokens")
    parser.add_argument("--steps", type=int, default=24, help="that are timed, behind as many that warm up")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--threads", type=int, default=get_num_threads())
    parser.add_argument("--folder", type=Path, help="for the file; by default one of the system's")


class Drawn(NamedTuple):
    """The keys that are generated of one context, the same in all layers, whose queries differ.

    Attributes:
        centres: of the keys of each page, `(pages, heads, dim)`.
        noise: of keys and values of a piece, `(2, PIECE, heads, dim)`.
        rho: the correlation of queries from one token to the next.
        repeated: the share of a head's pages that it chooses again, measured.
    """

    centres: Float32
    noise: Float32
    rho: float
    repeated: float


def _chosen(query: Float32, means: Float32, count: int) -> set[int]:
    scores = means @ query
    return set(np.argpartition(-scores, count)[:count].tolist())


def _repeated(rng: np.random.Generator, means: Float32, rho: float, count: int) -> float:
    """The share of pages that one head chooses again from one token to the next."""
    query = rng.standard_normal(DIM).astype(np.float32)
    before, shares = _chosen(query, means, count), []
    for _ in range(12):
        query = _next(rng, query, rho)
        now = _chosen(query, means, count)
        shares.append(len(now & before) / count)
        before = now
    return float(np.mean(shares))


def _next(rng: np.random.Generator, query: Float32, rho: float) -> Float32:
    fresh = rng.standard_normal(query.shape).astype(np.float32)
    return np.float32(rho) * query + np.float32(np.sqrt(1 - rho * rho)) * fresh


def draw(context: int, top: int) -> Drawn:
    """Keys of a context, and the correlation with which its choices repeat."""
    rng, pages = np.random.default_rng(0), context // PAGE
    centres = rng.standard_normal((pages, HEADS, DIM), dtype=np.float32)
    noise = rng.standard_normal((2, PIECE, HEADS, DIM), dtype=np.float32) * np.float32(0.5)
    count, low, high = -(-7 * top // (4 * PAGE)), 0.0, 1.0
    for _ in range(12):
        rho = (low + high) / 2
        found = _repeated(np.random.default_rng(1), centres[:, 0], rho, count)
        low, high = (rho, high) if found < REPEATED else (low, rho)
    return Drawn(centres, noise, rho, _repeated(np.random.default_rng(2), centres[:, 0], rho, count))


def fill(cache: PagedKvCache, drawn: Drawn, context: int, layers: int) -> None:
    """Write the context, and make its summaries."""
    cache.allocate(0, 0)
    cache.reserve_summaries()
    for first in range(0, context, PIECE):
        cache.append(0, min(PIECE, context - first))
        count = min(PIECE, context - first)
        own = drawn.centres[first // PAGE : (first + count) // PAGE].repeat(PAGE, 0)
        keys, values = drawn.noise[0, :count] + own, drawn.noise[1, :count]
        for layer in range(layers):
            cache.write(layer, 0, keys, values)


def read_bytes() -> int:
    """Bytes that this process has read from devices; 0 if the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class Steps(NamedTuple):
    """Times and counters of the steps over one cache.

    Attributes:
        times: seconds of each.
        before, after: the counters around them; None: all is in memory.
        read: bytes that the system says were read.
    """

    times: list[float]
    before: SpillStats | None
    after: SpillStats | None
    read: int


def run(cache: PagedKvCache, drawn: Drawn, top: int, steps: int, layers: int) -> Steps:
    """Steps behind as many that warm up."""
    rng, times, before, read = np.random.default_rng(3), [], None, 0
    queries = rng.standard_normal((layers, 1, HEADS, 1, DIM)).astype(np.float32)
    spread = 0.2 * rng.standard_normal((layers, 1, HEADS, GROUP, DIM)).astype(np.float32)
    for step in range(2 * steps):
        if step == steps:
            before, read = cache.spill, read_bytes()
        queries = _next(rng, queries, drawn.rho)
        asked = (queries + spread).reshape(layers, 1, HEADS * GROUP, DIM)
        rows = rng.standard_normal((2, 1, HEADS, DIM)).astype(np.float32)
        start = perf_counter()
        cache.append(0, 1)
        for layer in range(layers):
            cache.write(layer, 0, rows[0], rows[1])
            cache.attention(layer, asked[layer], [0], top_tokens=top)
        times.append(perf_counter() - start)
    return Steps(times[steps:], before, cache.spill, read_bytes() - read)


def device_rate(folder: Path, size: int, seconds: float, total: int) -> tuple[float, float]:
    """Random reads of `size` bytes a second, 16 at once, past the page cache if it can be; and bytes."""
    page = 4096
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(total >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        try:
            fd = os.open(file.name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:
            fd = os.open(file.name, os.O_RDONLY)
        until = perf_counter() + seconds

        def reads(seed: int) -> int:
            rng, done = np.random.default_rng(seed), 0
            with mmap.mmap(-1, -(-size // page) * page) as buffer:
                while perf_counter() < until:
                    os.preadv(fd, [buffer], int(rng.integers((total - len(buffer)) // page)) * page)
                    done += 1
            return done

        with ThreadPoolExecutor(16) as pool:
            count = sum(pool.map(reads, range(16)))
        os.close(fd)
    return count / seconds, count * size / seconds


def main(options: argparse.Namespace) -> int:
    """Print one table for each context."""
    set_num_threads(options.threads)
    contexts, layers, seconds = options.contexts, options.layers, 1.0
    if options.quick:
        contexts, layers, seconds = [8192], 2, 0.1
        options.shares, options.steps = [1.0, 0.2], 4
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        reads, rate = device_rate(folder, 12288, seconds, int(seconds * (1 << 28)) >> 20 << 20)
        print(f"device: {reads:,.0f} random reads of 12 KiB a second, 16 at once, {rate / 1e6:,.0f} MB/s")
        for context in contexts:
            _table(context, layers, options, folder)
    return 0


def _table(context: int, layers: int, options: argparse.Namespace, folder: Path) -> None:
    drawn, rows, whole = draw(context, options.top), [], 0.0
    blocks = context // PAGE + 2 * options.steps // PAGE + 2
    for share in options.shares:
        sizes = {"num_layers": layers, "dtype": "q4"}
        plain = PagedKvCache(0, PAGE, HEADS, DIM, **sizes)
        spill = {}
        if share < 1:
            spill = {"spill": folder, "max_memory_bytes": int(share * blocks * plain.block_memory_bytes)}
        cache = PagedKvCache(blocks, PAGE, HEADS, DIM, **sizes, **spill)
        fill(cache, drawn, context, layers)
        found = run(cache, drawn, options.top, options.steps, layers)
        least = min(found.times)
        whole = whole or 1 / least
        rows.append(_row(share, found, whole, options.steps))
        del cache
    title = (
        f"{context:,} tokens, {layers} layers, top_tokens {options.top}: a head chooses {drawn.repeated:.2f} of its "
        "pages again"
    )
    header = ["in memory", "steps/s, best", "median", "of all in memory", "held", "read", "waits", "read MB"]
    show(options.markdown, title, [*header, "read_bytes MB"], rows)


def _row(share: float, found: Steps, whole: float, steps: int) -> list[str]:
    best, middle = 1 / min(found.times), 1 / median(found.times)
    row = [f"{share:.0%}", f"{best:.1f}", f"{middle:.1f}", f"{best / whole:.2f}"]
    if found.before is None or found.after is None:
        return [*row, "", "", "", "", f"{found.read / steps / 1e6:.2f}"]
    before, after = found.before, found.after
    return [
        *row, f"{(after.held - before.held) / steps:,.0f}", f"{(after.reads - before.reads) / steps:,.0f}",
        f"{(after.waits - before.waits) / max(1, after.holds - before.holds):.0%}",
        f"{(after.read_bytes - before.read_bytes) / steps / 1e6:.2f}", f"{found.read / steps / 1e6:.2f}",
    ]
