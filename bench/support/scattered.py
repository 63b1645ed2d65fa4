"""Paged caches as a server has them after hours: the blocks of every sequence are scattered over the pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.ceilings import last_level_bytes
from kvcache.paged.cache import PagedKvCache

__all__ = ["Scattered", "Shape", "available_bytes", "exact", "fill_rows", "queries_of", "relative_error"]

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """The shape of one attention call: `batch` sequences of `context` tokens each."""

    context: int
    batch: int = 1
    head_dim: int = 128
    block_size: int = 16
    query_heads: int = 32
    kv_heads: int = 8

    def __str__(self) -> str:
        size = f"{self.context // 1024}k" if self.context >= 1024 else str(self.context)
        return f"{size} x {self.batch}, dim {self.head_dim}, block {self.block_size}"

    @property
    def float_bytes(self) -> int:
        """Bytes of K and V as float32."""
        return self.batch * self.context * self.kv_heads * self.head_dim * 8


def available_bytes() -> int:
    """The memory available without swapping; a guess of 8 GiB if the system does not report it."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        return 8 << 30


@lru_cache(maxsize=1)
def fill_rows(context: int, kv_heads: int, head_dim: int) -> tuple[Float32, Float32]:
    """Keys and values of one sequence, unit Gaussians."""
    rng = np.random.default_rng(0)
    shape = (context, kv_heads, head_dim)
    return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


def queries_of(shape: Shape, rows: int) -> Float32:
    """`rows` queries, unit Gaussians."""
    return np.random.default_rng(1).standard_normal((rows, shape.query_heads, shape.head_dim), np.float32)


class Scattered:
    """A cache with several layers, which together exceed the last-level cache.

    Args:
        shape: the shape of one attention call.
        dtype: storage format of K and V.
        cold: whether to have enough layers that each call reads from memory; otherwise one layer.

    Attributes:
        cache, seq_ids: the cache, and its sequences as uint64 `(batch,)`.
        order: its block numbers in the order of the sequences' tokens.
        layers: the number of layers.
        block_bytes: bytes of a block in one layer.
    """

    def __init__(self, shape: Shape, dtype: str, *, cold: bool = True) -> None:
        self.shape, self.dtype = shape, dtype
        per_sequence = -(-shape.context // shape.block_size)
        sizes = (shape.block_size, shape.kv_heads, shape.head_dim)
        self.block_bytes = PagedKvCache(1, *sizes, dtype=dtype).block_memory_bytes
        self.layers = layer_count(per_sequence * shape.batch * self.block_bytes) if cold else 1
        self.cache = PagedKvCache(per_sequence * shape.batch, *sizes, num_layers=self.layers, dtype=dtype)
        self.seq_ids = np.arange(1, shape.batch + 1, dtype=np.uint64)
        self.order = scatter(self.cache, self.seq_ids, [shape.context] * shape.batch)
        keys, values = fill_rows(shape.context, shape.kv_heads, shape.head_dim)
        for layer in range(self.layers):
            for seq_id in self.seq_ids.tolist():
                self.cache.write(layer, seq_id, keys, values)
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that one call reads."""
        return self.block_bytes * len(self.order)

    def next_layer(self) -> int:
        """Advance to the next layer and return it."""
        self._turn = (self._turn + 1) % self.layers
        return self._turn

    def attend(self, queries: Float32, out: Float32, **options: Any) -> None:
        """Attention over the next layer: cold, if there are enough layers."""
        self.cache.attention(self.next_layer(), queries, self.seq_ids, out=out, **options)

    def attend_again(self, queries: Float32, out: Float32) -> None:
        """Attention over the same layer as in the last call: hot, if it fits a CPU cache."""
        self.cache.attention(self._turn, queries, self.seq_ids, out=out)


def layer_count(nbytes: int) -> int:
    """The number of layers of `nbytes` that together are three times the last-level cache, from 1 to 24."""
    return min(24, max(1, -(-3 * last_level_bytes() // nbytes)))


def scatter(cache: PagedKvCache, seq_ids: npt.NDArray[np.uint64], contexts: list[int]) -> npt.NDArray[np.int32]:
    """Start sequences with blocks drawn at random from the whole pool; returns the blocks in their order."""
    cache.allocate(0, cache.total_blocks * cache.block_size)
    order = np.random.default_rng(2).permutation(cache.block_table([0]).block_ids).astype(np.int32)
    at = 0
    for seq_id, context in zip(seq_ids.tolist(), contexts, strict=True):
        count = -(-context // cache.block_size)
        cache.adopt(seq_id, order[at : at + count], context)
        at += count
    cache.free(0)
    return order[:at]


def exact(keys: Float32, values: Float32, queries: Float32) -> npt.NDArray[np.float64]:
    """Attention of one head in float64: `keys`, `values` `(tokens, dim)`, `queries` `(rows, dim)`, nothing masked."""
    k, v = keys.astype(np.float64), values.astype(np.float64)
    scores = queries.astype(np.float64) @ k.T * k.shape[1] ** -0.5
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores @ v / scores.sum(axis=1, keepdims=True)


def relative_error(scattered: Scattered, queries: Float32, out: Float32) -> float:
    """Relative RMS error of the first sequence's output, for the queries of its first KV head.

    The reference is attention in float64 over the result of `read`.
    """
    group = scattered.shape.query_heads // scattered.shape.kv_heads
    keys, values = scattered.cache.read(scattered._turn, int(scattered.seq_ids[0]))
    right = exact(keys[:, 0], values[:, 0], queries[0, :group])
    wrong = out[0, :group] - right
    return float(np.sqrt(np.square(wrong).mean() / np.square(right).mean()))
