"""The demo model, and the tools that measure an engine: recorded logits, random eviction, attention mass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvcache import InferenceEngine
from kvcache.demo import DIRECTORY
from kvcache.engine import Transformer
from kvcache.networks.protocols import cached_sizes
from kvcache.paged.cache import PagedKvCache

__all__ = ["RandomEngine", "Recorder", "attention_mass", "demo_model", "log_softmax"]


def demo_model() -> tuple[Transformer, Any]:
    """Load the demo model and its tokenizer."""
    tokenizer = InferenceEngine.from_pretrained(DIRECTORY).tokenizer
    return Transformer.from_pretrained(DIRECTORY), tokenizer


class Recorder:
    """A network, for any engine's `model`, that records `keep(logits)` of each call.

    Args:
        positions: overrides `max_position_embeddings`, for runs beyond them.
    """

    def __init__(self, model: Transformer, keep: Callable[[np.ndarray], np.ndarray], positions: int = 0) -> None:
        self.model, self.keep, self.config = model, keep, model.config
        self.attention = model.attention
        if positions:
            self.config = replace(model.config, max_position_embeddings=positions)
        self._kept: list[np.ndarray] = []

    def forward(self, tokens: Any, positions: Any, attend: Any, logits: Any, *, sink_positions: Any = None) -> Any:
        rows = self.model.forward(tokens, positions, attend, logits, sink_positions=sink_positions)
        self._kept.append(self.keep(rows))
        return rows

    def take(self) -> np.ndarray:
        """Return everything recorded since the last call, in one array."""
        kept, self._kept = np.concatenate(self._kept), []
        return kept


class _RandomScores(PagedKvCache):
    """A cache with random scores: a token draws a number once, and gets it as its score from every query."""

    rng = np.random.default_rng(0)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._drawn: dict[int, np.ndarray] = {}

    def attention(self, layer: int, queries: Any, seq_ids: Any, *, return_scores: bool = False, **more: Any) -> Any:
        out = super().attention(layer, queries, seq_ids, **more)
        if not return_scores:
            return out
        seq_id, count = int(seq_ids[0]), len(queries)
        drawn = np.concatenate([self._drawn.get(seq_id, np.empty(0)), self.rng.random(count)])
        self._drawn[seq_id] = drawn
        seen_by = np.minimum(np.arange(len(drawn), 0, -1), count)
        return out, (drawn * seen_by).astype(np.float32)

    def keep_tokens(self, seq_id: int, indices: Any) -> None:
        super().keep_tokens(seq_id, indices)
        self._drawn[seq_id] = self._drawn[seq_id][indices]

    def free(self, seq_id: int) -> None:
        super().free(seq_id)
        self._drawn.pop(seq_id, None)


class RandomEngine(InferenceEngine):
    """Evicts at random: H2O with a random score per token and layer. The survivors are a uniform sample."""

    def _make_cache(self, **options: Any) -> PagedKvCache:
        cache = _RandomScores(**options)
        cache.rng = np.random.default_rng(1)
        return cache


def log_softmax(rows: np.ndarray) -> np.ndarray:
    """float32 log-probabilities of logits `(n, vocab)`."""
    rows = rows - rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def attention_mass(model: Transformer, tokens: np.ndarray, queries: int) -> np.ndarray:
    """The share of the attention of the last `queries` tokens on each token, `(layers, len(tokens))`."""
    config = model.config
    cache = PagedKvCache(
        -(-len(tokens) // 16), 16, *cached_sizes(model), num_layers=config.num_layers, dtype="f32"
    )
    cache.allocate(0, 0)
    mass = np.zeros((config.num_layers, len(tokens)))
    for start, stop in ((0, len(tokens) - queries), (len(tokens) - queries, len(tokens))):
        cache.append(0, stop - start)

        def attend(layer: int, q: Any, k: Any, v: Any, stop: int = stop) -> Any:
            cache.write(layer, 0, k, v)
            mixed, mass[layer, :stop] = cache.attention(layer, q, [0], query_lens=[len(q)], return_scores=True)
            return mixed

        model.forward(tokens[start:stop], np.arange(start, stop), attend, "none")
    return mass / (queries * config.num_heads)
