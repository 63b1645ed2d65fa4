"""The products of one pass of a network by themselves, and the least that a step of many requests can take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from bench.support.blas import set_threads
from bench.support.ceilings import BlockReader, byte_products, fma, huge_array
from bench.support.common import timed
from kvcache.engine import InferenceEngine
from kvcache.networks.model import Transformer
from kvcache.networks.weights import Weight

__all__ = ["least_seconds", "seconds_of_products", "work_of_step"]

PASSES = 40
_BLOCK = 1 << 16  # bytes that the reader of a step's bytes reads at a time


def _matrices(model: Transformer) -> list[Weight]:
    """The matrices that every row meets, in the order of a pass."""
    layers = [(layer.qkv, layer.output, layer.mlps[0].gate_up, layer.mlps[0].down) for layer in model.weights.layers]
    return [matrix for layer in layers for matrix in layer] + [model.weights.head]


def seconds_of_products(file: Path, counts: list[int], threads: int) -> list[float]:
    """Seconds of all products of one pass over each of `counts` rows: medians. Empty for a network with experts."""
    set_threads(threads)
    model = Transformer.from_gguf(file)
    if model.config.num_experts:
        return []
    rng, matrices = np.random.default_rng(0), _matrices(model)
    rows = {
        (count, width): rng.standard_normal((count, width), dtype=np.float32)
        for count in counts for width in {matrix.shape[1] for matrix in matrices}
    }
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(PASSES):
        for count in counts:
            start = perf_counter()
            for matrix in matrices:
                matrix.multiply(rows[count, matrix.shape[1]])
            seconds[count].append(perf_counter() - start)
    return [median(seconds[count]) for count in counts]


def least_seconds(file: Path, count: int, sizes: tuple[int, int], threads: int) -> list[float]:
    """The least that a step can take in which each of `count` requests gets a token.

    All weights are read once, and K and V of each request, of those that they share once for all: as fast as a plain
    loop reads as many bytes. A row meets every matrix, and its queries K and V: as fast as products of bytes alone, or
    where a matrix has floats, as multiply-adds.

    Args:
        sizes: tokens that the requests share, and that each has beside them.

    Returns:
        Seconds for the bytes, and for the operations; empty for a network with experts.
    """
    set_threads(threads)
    model = Transformer.from_gguf(file)
    if model.config.num_experts:
        return []
    read, operations = work_of_step(model, count, sizes)
    blocks = -(-read // _BLOCK)
    reader = BlockReader(huge_array(blocks * _BLOCK), np.arange(blocks), _BLOCK, 1, threads)
    packed = all("q" in getattr(matrix, "format", "") for matrix in _matrices(model))
    peak = (byte_products(threads) if packed else None) or fma(threads)
    return [_fastest(reader.run), operations / peak[1] * _fastest(peak[0])]


def work_of_step(model: Transformer, count: int, sizes: tuple[int, int]) -> tuple[int, int]:
    """The bytes that such a step reads, with K and V in q8, and its operations, of which a multiply-add is two."""
    config, matrices, (shared, own) = model.config, _matrices(model), sizes
    cache = InferenceEngine(model, dtype="q8", num_blocks=1).cache
    kept = cache.block_memory_bytes // cache.block_size * (shared + count * own)
    products = sum(2 * rows * columns for rows, columns in (matrix.shape for matrix in matrices))
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * (shared + own)
    return sum(matrix.nbytes for matrix in matrices) + kept, count * (products + attention)


def _fastest(run: Callable[[], object]) -> float:
    return min(timed(run) for _ in range(PASSES))
