"""Scores of an evicting sequence: the positions of its tokens, and the attention mass on them by query.

A list of tokens is that of a layer, or of a KV head of it where heads keep tokens of their own.

    scores of           shape                  `mean`: attention mass per query that could see the token
    all queries         (n,) or (heads, n)     their sum, over the number of queries since the token
    the last w queries  (<= w, heads, n)       the sum of their rows, over the number of them that could see it
    no queries          (0,) or (heads, 0)     zeros
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.kernels.functions import column_sums
from kvcache.networks.protocols import Float32
from kvcache.paged.cache import PagedKvCache

__all__ = ["Alive", "Drawn", "Scoring"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Alive:
    """The tokens of one list.

    Attributes:
        positions: in the text, ascending, int64 `(n,)`.
        scores: attention mass, `(..., n)`, see `Scoring`.
        queries: the last ones, `(m, num_heads, head_dim)`; without rows `(0,)`.
    """

    positions: Int64
    scores: npt.NDArray[Any]
    queries: Float32

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.positions.nbytes + self.scores.nbytes + self.queries.nbytes


class Drawn(NamedTuple):
    """Scores and rows that the last queries of a pass leave.

    Attributes:
        scores: the attention mass on each token, as `Scoring` counts it; None: nothing counts.
        queries: their rows, `(m, num_heads, head_dim)`; None: nobody reads them.
    """

    scores: Float32 | None = None
    queries: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """Which queries count in the score of a token.

    Attributes:
        queries: how many of the last queries; None: all that could see the token; 0: no scores.
        heads: KV heads, each with scores of its own; None: the sum over all heads.
        rows: how many of the last queries are kept themselves.
    """

    queries: int | None
    heads: int | None = None
    rows: int = 0

    @property
    def no_tokens(self) -> Alive:
        heads = () if self.heads is None else (self.heads,)
        rows = (0, *heads, 0) if self.queries else (*heads, 0)
        scores = np.empty(rows, np.float32 if self.queries else np.float64)
        return Alive(np.empty(0, np.int64), scores, np.empty(0, np.float32))

    def attend(
        self, cache: PagedKvCache, layer: int, queries: Float32, seq_ids: npt.NDArray[np.uint64],
        query_lens: Int64, options: dict[str, Any],
    ) -> tuple[Float32, Drawn]:
        """Attention of the last tokens of a sequence of this layer of the cache; and what `add` takes."""
        mixed, scores = self._attend(cache, layer, queries, seq_ids, query_lens, options)
        return mixed, Drawn(scores, queries[-self.rows :].copy() if self.rows else None)

    def _attend(
        self, cache: PagedKvCache, layer: int, queries: Float32, seq_ids: npt.NDArray[np.uint64],
        query_lens: Int64, options: dict[str, Any],
    ) -> tuple[Float32, Float32 | None]:
        if self.queries == 0:
            return cache.attention(layer, queries, seq_ids, query_lens=query_lens, **options), None
        by: Any = True if self.heads is None else "head"
        if self.queries is None or len(queries) == 1:
            mixed, drawn = cache.attention(layer, queries, seq_ids, query_lens=query_lens, return_scores=by, **options)
            return mixed, drawn if self.queries is None else drawn[None]
        mixed = cache.attention(layer, queries, seq_ids, query_lens=query_lens, **options)
        last = min(self.queries, len(queries))
        held = cache.get_sequence(int(seq_ids[0]))
        assert held is not None
        shown = np.arange(held.num_tokens - last + 1, held.num_tokens + 1)  # by each of the last queries
        ids = np.repeat(seq_ids, last)
        _, drawn = cache.attention(layer, queries[-last:], ids, context_lens=shown, return_scores=by, **options)
        rows = np.zeros((last, *drawn.shape[:-1], held.num_tokens), np.float32)
        for row, part in zip(rows, np.split(drawn, np.cumsum(shown)[:-1], axis=-1), strict=True):
            row[..., : part.shape[-1]] = part
        return mixed, rows

    def add(self, alive: Alive, pos: int, count: int, drawn: Drawn) -> Alive:
        """The tokens after `count` new ones at `pos`, and what `attend` returned for their queries."""
        positions = np.concatenate([alive.positions, np.arange(pos, pos + count)])
        old = alive.scores
        scores = np.concatenate([old, np.zeros((*old.shape[:-1], count), old.dtype)], axis=-1)
        return self.joined(Alive(positions, scores, alive.queries), drawn)

    def joined(self, alive: Alive, drawn: Drawn) -> Alive:
        """The same tokens with what `attend` returned for the newest queries."""
        scores, queries = alive.scores, alive.queries
        if drawn.scores is not None:
            more = drawn.scores
            scores = np.concatenate([scores, more])[-self.queries :] if self.queries else scores + more
        if drawn.queries is not None:
            queries = np.concatenate([queries, drawn.queries])[-self.rows :] if len(queries) else drawn.queries
        return Alive(alive.positions, scores, queries)

    def mean(self, alive: Alive, end: int) -> Float64:
        """The score of each token in a text of `end` tokens, `(n,)` or `(heads, n)`: the mass on it per query."""
        seen_by = end - alive.positions  # the number of queries that could see each token, its own included
        if not self.queries:
            return alive.scores / seen_by
        return column_sums(alive.scores) / np.minimum(seen_by, len(alive.scores))

    def keep(self, alive: Alive, kept: Int64) -> Alive:
        """The tokens at these indices alone."""
        return Alive(alive.positions[kept], alive.scores[..., kept], alive.queries)

    def cut(self, alive: Alive, stop: int, end: int) -> Alive:
        """The first `stop` tokens of a text of `end`, none of them evicted; sums keep the queries that are cut off."""
        scores, queries = alive.scores[..., :stop], alive.queries[: max(0, len(alive.queries) - (end - stop))]
        if self.queries:
            scores = scores[: max(0, len(scores) - (end - stop))]
        return Alive(alive.positions[:stop], scores, queries)
