"""Formats on synthetic attention whose keys have outlier channels, as those of real 7B models do.

A small model has no such channels. Here one channel in 32 of the keys is 20 times as large as the others (KIVI, arXiv
2402.02750, section 3.1, shows them in Llama 2 7B). Queries are 20 times smaller in these channels, as training makes
them, so that every channel contributes equally to a score.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.quality.formats import FORMATS
from kvcache import PagedKvCache

__all__ = ["HEADER", "measure", "rows"]

HEADS, GROUP, DIM, FACTOR, EVERY = 2, 4, 128, 20, 32
HEADER = ["K/V format", "bits/value", "plain: output error", "KL", "outliers: output error", "KL"]


def measure(tokens: int, names: list[str]) -> dict[str, Any]:
    """Relative L2 error of the output and KL of the weights, by format, without and with outlier channels."""
    found: dict[str, Any] = {name: {} for name in names}
    for kind, factor in (("plain", 1), ("outliers", FACTOR)):
        rng = np.random.default_rng(0)
        wide = np.where(np.arange(DIM) % EVERY == 3, factor, 1)
        keys, values = rng.standard_normal((2, tokens, HEADS, DIM))
        queries = 2 * rng.standard_normal((32, HEADS * GROUP, DIM)) / wide
        keys = (keys * wide).astype(np.float32)
        exact, truth = _attend(queries, keys, values)
        for name in names:
            cache = PagedKvCache(-(-tokens // 16), 16, HEADS, DIM, **FORMATS[name])
            cache.allocate(0, tokens)
            cache.write(0, 0, keys, values.astype(np.float32))
            out = np.concatenate([cache.attention(0, query[None].astype(np.float32), [0]) for query in queries])
            _, weights = _attend(queries, *cache.read(0, 0))
            error = np.linalg.norm(out - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
            kl = (truth * np.log(truth / weights)).sum(axis=-1)
            bits = 4 * cache.block_memory_bytes / 16 / HEADS / DIM
            found[name] |= {"bits": bits, kind: {"error": float(np.median(error)), "kl": float(kl.mean())}}
    return found


def _attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `(queries, heads, dim)` and weights `(queries, heads, tokens)` in float64."""
    keys, values = (np.repeat(x.astype(np.float64), GROUP, axis=1) for x in (keys, values))
    scores = np.einsum("qhd,thd->qht", queries, keys, optimize=True) / np.sqrt(DIM)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("qht,thd->qhd", weights, values, optimize=True), weights


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    table = []
    for name, f in figures.items():
        cells = [(f"{100 * f[kind]['error']:.3g} %", f"{f[kind]['kl']:.2g}") for kind in ("plain", "outliers")]
        table.append([name, f"{f['bits']:.2f}", *cells[0], *cells[1]])
    return table
