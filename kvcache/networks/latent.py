"""Latent attention: the queries, keys and results of a layer whose heads share one latent per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.grouped import multiply_groups
from kvcache.kernels.layers import layer_norm, rms_norm
from kvcache.kernels.matrix import Matrix
from kvcache.networks.index_sizes import IndexSizes
from kvcache.networks.latent_sizes import LatentSizes
from kvcache.networks.linear import MatrixStack
from kvcache.networks.padded_heads import padded
from kvcache.networks.protocols import IndexRows
from kvcache.networks.rope import RopeTable

__all__ = [
    "IndexWeights", "LatentWeights", "Turn", "index_rows", "latent_queries", "latent_results", "latent_rows",
    "times_heads", "turn_of",
]

Float32 = NDArray[np.float32]
Weight = Matrix | MatrixStack
Times = Callable[[Float32, Weight], Float32]
Turn = Callable[[Float32], Float32]

_EPS = 1e-6  # of the norms of latents, whatever other norms have: as transformers computes them


@dataclass(frozen=True, slots=True, eq=False)
class IndexWeights:
    """The weights of an indexer.

    Attributes:
        queries: `(heads * dim, queries)`, of the queries' own latent.
        keys: `(dim + heads, hidden)`: the key of a token, and the weights of heads.
        norm: `(2, dim)`, weight and bias of the LayerNorm of keys.
    """

    queries: Weight
    keys: Weight
    norm: Float32


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """The weights of latent attention beside its first and last matrix (`LayerWeights.qkv`, `output`).

    Attributes:
        queries: `(heads * (plain + turned), queries)`, of the queries' own latent; None: they have none.
        queries_norm: `(queries,)`; None likewise.
        norm: `(latent,)`, of the latent.
        keys: of each head `(latent, plain)`, the transpose of its key matrix.
        values: of each head `(value, latent)`.
        index: those of the layer's own indexer; None: it has none.
    """

    queries: Weight | None
    queries_norm: Float32 | None
    norm: Float32
    keys: tuple[Matrix, ...]
    values: tuple[Matrix, ...]
    index: IndexWeights | None = None


def latent_queries(projected: Float32, sizes: LatentSizes, weights: LatentWeights) -> Float32:
    """The rows of which queries are made, `(n, ...)`: their own latent, normed, or these queries, if they have none.

    `projected`: see `latent_rows`.
    """
    own = projected[:, : projected.shape[1] - sizes.key]
    return own if weights.queries_norm is None else rms_norm(np.ascontiguousarray(own), weights.queries_norm, _EPS)


def index_rows(
    normed: Float32, own: Float32, sizes: IndexSizes, weights: IndexWeights, times: Times, turn: Turn
) -> IndexRows:
    """The rows of an indexer, as a cache takes them. Its scores have a factor: weights have that.

    Args:
        normed: the rows that the layer takes, `(n, hidden)`.
        own: see `latent_queries`.
        turn: RoPE of the first channels of `(n, heads, dim)`.
    """
    both = times(normed, weights.keys)
    keys = layer_norm(np.ascontiguousarray(both[:, : sizes.dim]), weights.norm[0], weights.norm[1], _EPS)
    queries = times(own, weights.queries).reshape(len(own), sizes.heads, sizes.dim)
    turned = padded(turn(np.concatenate([queries, keys[:, None]], axis=1)), (sizes.dim,))
    scaled = both[:, sizes.dim :] * np.float32(1 / math.sqrt(sizes.heads * sizes.dim))
    return IndexRows(np.ascontiguousarray(turned[:, : sizes.heads]), scaled, turned[:, sizes.heads :])


def latent_rows(
    projected: Float32, own: Float32, sizes: LatentSizes, weights: LatentWeights, times: Times, turns: Sequence[Turn],
    activations: str, others: Any = slice(None),
) -> tuple[Float32, ...]:
    """Queries and keys as a cache takes them, and the queries turned in other ways.

    Args:
        projected: what the first matrix of the layer gives, `(n, ...)`: queries, or their latent; then the latent and
            the turned channels of keys.
        own: see `latent_queries`.
        times: the product of rows with a matrix.
        turns: RoPE of `(n, heads, turned)` for each set of positions, or what returns its argument; the first one turns
            keys too.
        activations: as of `Matrix.multiply`.
        others: the rows whose queries are turned in the other ways.

    Returns:
        Keys `(n, 1, latent + turned)`; then for each of `turns` queries `(n, heads, latent + turned)`.
    """
    n, heads = len(projected), len(weights.keys)
    first = projected.shape[1] - sizes.key
    queries = own if weights.queries is None else times(own, weights.queries)
    by_head = queries.reshape(n, heads, sizes.query)
    keys = np.empty((n, 1, sizes.key), np.float32)
    keys[:, 0, : sizes.latent] = rms_norm(projected[:, first : first + sizes.latent], weights.norm, _EPS)
    met = times_heads(by_head[:, :, : sizes.plain], weights.keys, activations)
    found = [keys]
    for turn in turns:
        chosen = others if len(found) > 1 else slice(None)
        turning = by_head[chosen, :, sizes.plain :]
        whole = np.empty((len(turning), heads, sizes.key), np.float32)
        whole[:, :, : sizes.latent] = met[chosen]
        if len(found) == 1:
            both = turn(np.concatenate([turning, projected[:, None, first + sizes.latent :]], axis=1))
            whole[:, :, sizes.latent :], keys[:, :, sizes.latent :] = both[:, :heads], both[:, heads:]
        else:
            whole[:, :, sizes.latent :] = turn(np.ascontiguousarray(turning))
        found.append(whole)
    return tuple(found)


def latent_results(mixed: Float32, weights: LatentWeights, activations: str) -> Float32:
    """The results of all heads, `(n, heads * value)`, of what attention gives, `(n, heads, latent)`."""
    return times_heads(mixed, weights.values, activations).reshape(len(mixed), -1)


def times_heads(x: Float32, matrices: Sequence[Matrix], activations: str) -> Float32:
    """Multiply float32 `(n, heads, columns)` by a matrix of each head, each `(rows, columns)`; `(n, heads, rows)`."""
    n, heads = len(x), len(matrices)
    rows = np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(heads * n, -1)
    out = np.empty((heads * n, len(matrices[0])), np.float32)
    if n:
        multiply_groups(matrices, [n] * heads, rows.__dlpack__(), out.__dlpack__(), activations=activations)
    return out.reshape(heads, n, -1).transpose(1, 0, 2)


def turn_of(table: RopeTable | None, rows: tuple[NDArray[Any], ...]) -> Turn:
    """The rotation of heads by rows of a table; without one heads stay as they are."""
    if table is None:
        return np.ascontiguousarray
    cosines, sines = rows
    return partial(table.rotate, rows=(cosines, sines))
