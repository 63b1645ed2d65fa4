"""Cases of `bench kernels`: prefill and extend, mixed batches, and the gain of a second thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import numpy as np

from bench.kernels.attention_rivals import LLAMA, TORCH, TORCH_BEST, TORCH_HALF, prefill_rivals
from bench.kernels.decode import buffer
from bench.support.blas import set_threads
from bench.support.ceilings import BlockReader, fma
from bench.support.common import Candidate, Case, Claim, at_most, faster, share_of
from bench.support.rates import Columns
from bench.support.scattered import Scattered, Shape, fill_rows, queries_of, scatter
from kvcache.kernels.kernels import FORMATS
from kvcache.paged.cache import PagedKvCache

__all__ = [
    "MIXED", "PREFILL", "SHARED", "mixed_cases", "prefill_cases", "shared_cases", "thread_cases", "thread_columns",
]

ROWS = 512  # queries of a chunk
PEAK = "FMA peak"
_RIVALS = ("f32", TORCH, TORCH_BEST, TORCH_HALF, *LLAMA.values())
PREFILL = Columns(tuple(FORMATS), lambda subject: (PEAK,), _RIVALS, "GFLOP/s")
MIXED = Columns(("one call", "prefill", "decodes"))
SAME, OWN = "the same blocks", "blocks of their own"
SHARED = Columns((SAME,), rivals=(OWN,))


def flop(shape: Shape, rows: int) -> float:
    """Multiplications and additions of q·Kᵀ and of the weighted sum of V, masked pairs excluded."""
    pairs = sum(shape.context - rows + 1 + i for i in range(rows))
    return 4.0 * pairs * shape.query_heads * shape.head_dim


def peak(threads: int, work: float) -> Candidate:
    """The time of `work` FLOP at the FMA peak of `threads` threads."""
    run, done = fma(threads)
    return Candidate(PEAK, run, count=done / work, facts={"work": work})


def prefill_claims() -> tuple[Claim, ...]:
    """The bounds on 512 queries over 4k and more."""
    quantised = tuple(faster(1.6, name, "f32") for name, format in FORMATS.items() if format.quantised)
    return (share_of(0.7, "f32", PEAK), faster(2, "f32", TORCH), faster(2, "f32", TORCH_BEST), *quantised)


def prefill_cases(
    contexts: Iterable[int], head_dims: Iterable[int], block_sizes: Iterable[int], threads: Iterable[int]
) -> Iterator[Case]:
    """512 causal queries on the last tokens of each context."""
    for head_dim, block_size, context, count in product(head_dims, block_sizes, contexts, threads):
        shape = Shape(context, 1, head_dim, block_size)
        what = f"{ROWS} over {shape}, {count} thr"
        yield Case(what, partial(_prefill_candidates, shape, count), prefill_claims())


def _prefill_candidates(shape: Shape, threads: int) -> Iterator[Candidate]:
    set_threads(threads)
    work = flop(shape, ROWS)
    yield peak(threads, work)
    queries = queries_of(shape, ROWS)
    for dtype in FORMATS:
        scattered = Scattered(shape, dtype, cold=False)
        run = partial(scattered.attend, queries, np.empty_like(queries), query_lens=np.array([ROWS]))
        facts = {"work": work, "flop": work, "bytes": float(scattered.nbytes), "threads": threads}
        yield Candidate(dtype, run, facts=facts | {"context": shape.context})
    for name, run in prefill_rivals(shape, ROWS, threads):
        yield Candidate(name, run)


class MixedBatch:
    """One prefill chunk and many decodes, in one call and in two."""

    def __init__(self, dtype: str, decodes: int, context: int, rows: int) -> None:
        shape = Shape(context)
        contexts = [context] * (decodes + 1)
        blocks = sum(-(-c // shape.block_size) for c in contexts)
        self.cache = PagedKvCache(blocks, shape.block_size, shape.kv_heads, shape.head_dim, dtype=dtype)
        self.ids = np.arange(1, decodes + 2, dtype=np.uint64)
        scatter(self.cache, self.ids, contexts)
        keys, values = fill_rows(context, shape.kv_heads, shape.head_dim)
        for seq_id in self.ids.tolist():
            self.cache.write(0, seq_id, keys, values)
        self.rows = rows
        self.lens = np.array([rows] + [1] * decodes)
        self.queries = queries_of(shape, rows + decodes)
        self.out = np.empty_like(self.queries)

    def both(self) -> None:
        """Everything in one call."""
        self.cache.attention(0, self.queries, self.ids, query_lens=self.lens, out=self.out)

    def prefill(self) -> None:
        """The chunk alone."""
        rows, lens = self.rows, self.lens[:1]
        self.cache.attention(0, self.queries[:rows], self.ids[:1], query_lens=lens, out=self.out[:rows])

    def decode(self) -> None:
        """The decodes alone."""
        self.cache.attention(0, self.queries[self.rows :], self.ids[1:], out=self.out[self.rows :])

    def parts(self) -> None:
        """Both parts, one after the other."""
        self.prefill()
        self.decode()


def mixed_cases(decodes: int, context: int, threads: Iterable[int]) -> Iterator[Case]:
    """One call with everything, compared with the sum of its parts."""
    for dtype, count in product(("f32", "f16", "q4"), threads):
        what = f"{dtype}, {ROWS} rows + {decodes} decodes at {context // 1024}k, {count} thr"
        make = partial(_mixed_candidates, dtype, decodes, context, count)
        yield Case(what, make, (at_most(1.1, "one call", "its parts"),))


def _mixed_candidates(dtype: str, decodes: int, context: int, threads: int) -> Iterator[Candidate]:
    set_threads(threads)
    batch = MixedBatch(dtype, decodes, context, ROWS)
    for name, run in (
        ("one call", batch.both), ("its parts", batch.parts), ("prefill", batch.prefill), ("decodes", batch.decode),
    ):
        yield Candidate(name, run)


def shared_cases(sequences: int, threads: Iterable[int]) -> Iterator[Case]:
    """Decodes of texts with equal first tokens, which lie in the same blocks, or for each text in blocks of its own."""
    for (heads, kv_heads, head_dim), dtype, count in product(
        ((32, 32, 128), (16, 8, 128), (9, 3, 64), (32, 8, 64)), ("f16", "q8", "q4"), threads
    ):
        what = f"{sequences} of 1k + 64, {heads}/{kv_heads} heads of {head_dim}, {dtype}, {count} thr"
        yield Case(
            what, partial(_shared_candidates, Shape(1024, 1, head_dim, 16, heads, kv_heads), sequences, dtype, count)
        )


def _shared_candidates(shape: Shape, sequences: int, dtype: str, threads: int) -> Iterator[Candidate]:
    set_threads(threads)
    keys, values = fill_rows(shape.context + 64, shape.kv_heads, shape.head_dim)
    queries, ids = queries_of(shape, sequences), np.arange(sequences)
    for name in (SAME, OWN):
        blocks = sequences * (shape.context + 64) // shape.block_size
        cache = PagedKvCache(blocks, shape.block_size, shape.kv_heads, shape.head_dim, dtype=dtype)
        for seq_id in range(sequences):
            if name == OWN or seq_id == 0:
                cache.allocate(seq_id, shape.context)
                cache.write(0, seq_id, keys[:-64], values[:-64])
            else:
                cache.fork(0, seq_id)
        for seq_id in range(sequences):
            cache.append(seq_id, 64)
            cache.write(0, seq_id, keys[-64:], values[-64:])
        yield Candidate(name, partial(cache.attention, 0, queries, ids, out=np.empty_like(queries)))


ONE, TWO = "1 thread", "2 threads"


def thread_columns() -> Columns:
    """Two threads compared with one."""
    return Columns((TWO,), rivals=(ONE,))


def thread_cases(context: int) -> Iterator[Case]:
    """The bound is on attention; the FMA peak and the plain read show what the cores and the memory bus allow."""
    for what, make, bound in (
        ("FMA peak", _fma_twice, None),
        ("plain read, cold", partial(_read_twice, context), None),
        *(
            (f"{ROWS} rows over {context // 1024}k, {d}", partial(_attend_twice, d, context, ROWS), 1.8)
            for d in FORMATS
        ),
        *((f"8 decodes at {context // 1024}k, {d}", partial(_attend_twice, d, context, 0), 1.8) for d in FORMATS),
    ):
        yield Case(what, make, () if bound is None else (faster(bound, TWO, ONE),))


def _twice(make: Callable[[int], Callable[[], object]]) -> Iterator[Candidate]:
    for name, threads in ((ONE, 1), (TWO, 2)):
        yield Candidate(name, make(threads))


def _fma_twice() -> Iterator[Candidate]:
    for name, threads in ((ONE, 1), (TWO, 2)):
        run, done = fma(threads)
        yield Candidate(name, run, count=done / 1e9)


def _read_twice(context: int) -> Iterator[Candidate]:
    scattered = Scattered(Shape(context), "f16")
    memory = buffer(scattered.nbytes * scattered.layers)
    sizes = (scattered.order, scattered.block_bytes, scattered.layers)
    return _twice(lambda threads: BlockReader(memory, *sizes, threads).run)


def _attend_twice(dtype: str, context: int, rows: int) -> Iterator[Candidate]:
    shape = Shape(context, 1 if rows else 8)
    scattered = Scattered(shape, dtype, cold=not rows)
    queries = queries_of(shape, rows or shape.batch)
    out = np.empty_like(queries)
    options = {"query_lens": np.array([rows])} if rows else {}

    def make(threads: int) -> Callable[[], object]:
        def run() -> None:
            set_threads(threads)
            scattered.attend(queries, out, **options)

        return run

    return _twice(make)
