"""Cases of `bench kernels`: decode, one query per sequence over scattered, cold blocks, in every storage format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import product

import numpy as np

import kvcache
from bench.kernels.attention_rivals import LLAMA, NUMPY, TORCH, TORCH_BEST, TORCH_HALF, decode_rivals
from bench.support.blas import set_threads
from bench.support.ceilings import BlockReader, Bytes, byte_products, huge_array
from bench.support.common import Candidate, Case, Claim, at_most, faster, share_of
from bench.support.rates import Columns
from bench.support.scattered import Scattered, Shape, available_bytes, queries_of, relative_error
from kvcache.kernels.kernels import FORMATS

__all__ = ["FLOATS", "QUANTISED", "cases", "level_cases", "level_columns"]

RIVALS = (NUMPY, TORCH, TORCH_BEST, TORCH_HALF, *LLAMA.values())
HOT_TOKENS = 4096  # maximum number of tokens whose K and V may fit the CPU's caches
PLAIN = 0.85  # bound: share of the speed of a plain read
LONG = 16384  # tokens from which the speed of memory decides

_CODES = tuple(name for name in FORMATS if FORMATS[name].quantised)
_PLAIN = tuple(name for name in FORMATS if name not in _CODES)
FLOATS = Columns(_PLAIN, lambda name: (f"read {name}",), RIVALS, "GB/s", "{}, hot".format)
QUANTISED = Columns(
    _CODES, lambda name: (f"read {name}", f"products {name}"), ("f32", *RIVALS[1:]), "GB/s", "{}, hot".format
)
DIGITS = {True: 1.5, False: 2.0}  # dot products for a vector of codes: those of up to 4 bits share digits (kvc_tiles.h)

_buffer: list[Bytes] = []


def buffer(size: int) -> Bytes:
    """The array of at least `size` bytes that all plain reads share."""
    if not _buffer or _buffer[0].nbytes < size:
        _buffer[:] = []
        _buffer.append(huge_array(size))
    return _buffer[0]


@lru_cache(maxsize=1)
def _caches(shape: Shape) -> tuple[Scattered, ...]:
    """A cache per format; the next case of the same shape reuses them."""
    return tuple(Scattered(shape, dtype) for dtype in FORMATS)


_errors: dict[tuple[Shape, str], float] = {}


def claims(shape: Shape) -> tuple[Claim, ...]:
    """The bounds on decode at this context."""
    long = shape.context >= LONG
    floats = () if shape.context < 1024 else tuple(share_of(PLAIN, name, f"read {name}") for name in _PLAIN)
    return (
        *floats,
        faster(2.5 if long else 1, "q8", "f32"),
        faster(5 if long else 1, "q4", "f32"),
        at_most(1, "q3", "q4"),
        at_most(1, "q2", "q4"),
    )


def _candidates(shape: Shape, threads: int, rivals: bool) -> Iterator[Candidate]:
    set_threads(threads)
    caches = _caches(shape)
    memory = buffer(max(c.nbytes * c.layers for c in caches))
    queries = queries_of(shape, shape.batch)
    flop = 4.0 * shape.batch * shape.context * shape.query_heads * shape.head_dim
    for scattered in caches:
        out = np.empty_like(queries)
        attend = partial(scattered.attend, queries, out)
        attend()
        facts = {"work": float(scattered.nbytes), "bytes": float(scattered.nbytes), "flop": flop, "threads": threads}
        facts |= {"error": _error(scattered, queries, out), "context": shape.context}
        yield Candidate(scattered.dtype, attend, facts=facts)
        again = partial(scattered.attend_again, queries, out)
        if shape.context <= HOT_TOKENS:
            yield Candidate(f"{scattered.dtype}, hot", again, before=again)
        reader = BlockReader(memory, scattered.order, scattered.block_bytes, scattered.layers, threads)
        yield Candidate(f"read {scattered.dtype}", reader.run, facts={"work": float(reader.nbytes)})
        if scattered.dtype in _CODES and (products := byte_products(threads)):
            share = products[1] / (flop * DIGITS[FORMATS[scattered.dtype].bits <= 4])
            yield Candidate(f"products {scattered.dtype}", products[0], count=share, facts={"work": facts["work"]})
    if rivals:
        for name, run in decode_rivals(shape, caches[0].layers, threads):
            yield Candidate(name, run)


def _error(scattered: Scattered, queries: np.ndarray, out: np.ndarray) -> float:
    """The error of a shape and format, computed once: every call has the same rows."""
    key = (scattered.shape, scattered.dtype)
    if key not in _errors:
        _errors[key] = relative_error(scattered, queries, out)
    return _errors[key]


def cases(
    contexts: Iterable[int],
    batches: Iterable[int],
    head_dims: Iterable[int],
    block_sizes: Iterable[int],
    threads: Iterable[int],
) -> Iterator[Case]:
    """The grid of all cases that fit memory, and a context of 256 without rivals."""
    grid = product(head_dims, block_sizes, (256, *contexts), batches)
    for head_dim, block_size, context, batch in grid:
        shape = Shape(context, batch, head_dim, block_size)
        for count in threads:
            what = f"{shape}, {count} thr"
            if 5 * shape.float_bytes > available_bytes():
                print(f"left out, too little memory: {what}")
            elif context > 256 or batch == 1:
                yield Case(what, partial(_candidates, shape, count, context > 256), claims(shape))


def level_cases(contexts: Iterable[int], threads: Iterable[int]) -> Iterator[Case]:
    """The memory-bound formats at every SIMD level of this CPU."""
    levels = kvcache.simd_levels()
    bound = (share_of(0.6, "avx2", "avx512"),) if {"avx2", "avx512"} <= set(levels) else ()
    for context, dtype, count in product(contexts, ("f32", "f16", "q8", "q4"), threads):
        what = f"{dtype}, {Shape(context)}, {count} thr"
        held = () if FORMATS[dtype].quantised else bound
        yield Case(what, partial(_level_candidates, Shape(context), dtype, count), held)


def level_columns() -> Columns:
    """A row per level, compared with the plain read."""
    levels = [level for level in kvcache.simd_levels() if level != "scalar"]
    return Columns(tuple(levels), lambda level: ("read",), tuple(levels[-1:]))


def _level_candidates(shape: Shape, dtype: str, threads: int) -> Iterator[Candidate]:
    set_threads(threads)
    scattered = Scattered(shape, dtype)
    queries = queries_of(shape, 1)
    out = np.empty_like(queries)
    for level in level_columns().subjects:

        def run(level: str = level) -> None:
            with kvcache.use_simd(level):
                scattered.attend(queries, out)

        yield Candidate(level, run, facts={"work": float(scattered.nbytes)})
    memory = buffer(scattered.nbytes * scattered.layers)
    reader = BlockReader(memory, scattered.order, scattered.block_bytes, scattered.layers, threads)
    yield Candidate("read", reader.run, facts={"work": float(reader.nbytes)})
