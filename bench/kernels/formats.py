"""`python -m bench formats`: bytes and precision of each storage format, measured on real caches."""

from __future__ import annotations

import argparse

import numpy as np

from bench.support.report import show, write_json
from kvcache import PagedKvCache
from kvcache.kernels.kernels import FORMATS

__all__ = ["add_arguments", "main", "measure"]

HEADS, GROUP, BLOCK = 2, 4, 16
HEADER = ["format", "bytes/token", "below f32", "K error", "K error, outliers", "kernel error", "output error"]
NOTES = (
    "bytes/token: K and V of one KV head, computed from the memory that the cache has allocated.",
    "K error: relative RMS error of `read`, unit Gaussians; with outliers, one channel in 32 is scaled by 20.",
    "kernel error: attention compared with float64 attention over the result of `read`, worst relative L2 of a row.",
    "output error: attention compared with float64 attention over the keys and values as written, median relative L2.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--tokens", type=int, default=4096, help="context (default 4096)")


def exact(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """softmax(q K^T / sqrt(dim)) V in float64 for one query: `(query heads, dim)`."""
    out = []
    for head, query in enumerate(queries[0].astype(np.float64)):
        scores = keys[:, head // GROUP].astype(np.float64) @ query / np.sqrt(len(query))
        weights = np.exp(scores - scores.max())
        out.append(weights @ values[:, head // GROUP].astype(np.float64) / weights.sum())
    return np.array(out)


def row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 distance of each row."""
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def relative_rms(got: np.ndarray, want: np.ndarray) -> float:
    """RMS of the difference over RMS of the expected values."""
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def measure(dtype: str, dim: int, tokens: int, spreads: tuple[float, ...] = (1, 2, 4, 8)) -> dict[str, float]:
    """All figures of one format and head_dim; `spreads` are the standard deviations of the scores."""
    rng = np.random.default_rng(dim)
    cache = PagedKvCache(2 * -(-tokens // BLOCK), BLOCK, HEADS, dim, dtype=dtype)
    keys, values = rng.standard_normal((2, tokens, HEADS, dim)).astype(np.float32)
    outliers = keys * np.where(np.arange(dim) % 32 == 3, 20, 1).astype(np.float32)
    for seq_id, k in ((0, keys), (1, outliers)):
        cache.allocate(seq_id, tokens)
        cache.write(0, seq_id, k, values)
    kept_keys, kept_values = cache.read(0, 0)
    kernel, output = [], []
    for spread in spreads:
        queries = spread * rng.standard_normal((1, HEADS * GROUP, dim)).astype(np.float32)
        got = cache.attention(0, queries, [0])[0]
        kernel.append(row_errors(got, exact(queries, kept_keys, kept_values)))
        output.append(row_errors(got, exact(queries, keys, values)))
    return {
        "bytes": cache.block_memory_bytes / BLOCK / HEADS,
        "ratio": 8 * dim / (cache.block_memory_bytes / BLOCK / HEADS),
        "key_error": relative_rms(kept_keys, keys),
        "outlier_error": relative_rms(cache.read(0, 1)[0], outliers),
        "kernel_error": float(np.max(kernel)),
        "output_error": float(np.median(output)),
    }


def main(options: argparse.Namespace) -> int:
    """Print one table per head_dim."""
    tokens = 512 if options.quick else options.tokens
    figures = {dim: {dtype: measure(dtype, dim, tokens) for dtype in FORMATS} for dim in (64, 128)}
    for dim, formats in figures.items():
        rows = [
            [dtype, f"{f['bytes']:.0f}", f"{f['ratio']:.2f}x", *(f"{100 * f[k]:.3g} %" for k in list(f)[2:])]
            for dtype, f in formats.items()
        ]
        show(options.markdown, f"head_dim {dim}, {tokens} tokens, score spread 1 to 8", HEADER, rows)
    print("\n" + "\n".join(NOTES))
    write_json(options.json, formats=figures)
    return 0
