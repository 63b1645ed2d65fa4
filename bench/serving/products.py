"""The products of one pass of a network by themselves: what more rows at once gain in them."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from bench.support.blas import set_threads
from kvcache.networks.model import Transformer
from kvcache.networks.weights import Weight

__all__ = ["seconds_of_products"]

PASSES = 40


def _matrices(model: Transformer) -> list[Weight]:
    """The matrices that every row meets, in the order of a pass."""
    layers = [(layer.qkv, layer.output, layer.mlps[0].gate_up, layer.mlps[0].down) for layer in model.weights.layers]
    return [matrix for layer in layers for matrix in layer] + [model.weights.head]


def seconds_of_products(file: Path, counts: list[int], threads: int) -> list[float]:
    """Seconds of all products of one pass over so many rows each: medians. Empty for a network with experts."""
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
