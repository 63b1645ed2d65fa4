"""`ExpectedAttention`: the tokens that queries which are still to come will attend to, as far as can be expected."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import InvalidOperationError
from kvcache.kernels.functions import column_sums, cos, exp, product, sin, sums_of
from kvcache.networks.protocols import Model, layer_attention
from kvcache.networks.rope import Rope
from kvcache.policies.ranked import Ranked
from kvcache.support.arguments import as_count, as_finite

__all__ = ["ExpectedAttention"]

Float64 = npt.NDArray[np.float64]


class ExpectedAttention(Ranked):
    """Keeps the tokens with the highest expected attention times norm of their value, and the first ones.

    Queries before their position embedding count as normally distributed: the last ones give mean and covariance. The
    mean rotation of the next positions turns both, and a key k of the expected query has the weight
    exp(mean k / sqrt(d) + k' covariance k / 2 d) in a softmax over the tokens.

    Source: Devoto, Jeblick and Jégou, "Expected Attention: KV Cache Compression by Estimating Attention from Future
    Queries Distribution" (arXiv 2510.00636), section 3, and its implementation in kvpress.

    Args:
        queries: of how many of the last queries mean and covariance are, 1 to 4,096. Every layer keeps their rows.
        future: positions over which the rotation is averaged.
        sinks: first tokens of the text, which stay, and whose queries do not count.
        covariance: whether the covariance counts; without it only the mean does.
        value_norms: whether expected attention is multiplied by the norms of the values.
        epsilon: what is added to it before.
        per_head: whether each KV head keeps tokens of its own.

    Raises:
        TypeError, ValueError: not such numbers; from `of_network`: a network that does not say by `config.rope` how it
            turns queries, or changes them after that.
    """

    score_queries = 0
    reads_keys = reads_values = True

    def __init__(
        self, queries: int = 512, *, future: int = 512, sinks: int = 4, covariance: bool = True,
        value_norms: bool = True, epsilon: float = 0.0, per_head: bool = False,
    ) -> None:
        super().__init__(per_head=per_head)
        self.reads_queries = as_count(queries, "queries", 1, 4096)
        self.future, self.sinks = as_count(future, "future", 1, 1 << 20), as_count(sinks, "sinks")
        self.covariance, self.value_norms = bool(covariance), bool(value_norms)
        self.epsilon = as_finite(epsilon, "epsilon", 0.0)
        self._frequencies: list[Float64] = []  # of each layer, radians per position of each pair of channels
        self._scales: list[float | None] = []

    def of_network(self, model: Model, /) -> ExpectedAttention:
        """See `Policy.of_network`."""
        config: Any = model.config
        rope, norm = getattr(config, "rope", None), getattr(config, "qk_norm", "")
        if not isinstance(rope, Rope):
            name = type(model).__name__
            raise TypeError(f"eviction_policy: expected a network with a Rope as config.rope, got {name}")
        if norm == "turned":
            raise ValueError("eviction_policy: expected queries without a norm after their rotation, got one")
        own, turned = copy(self), rope.frequencies(config.rotary_dim)
        own._frequencies = [turned if each else turned[:0] for each in config.rotated]
        own._scales = [None if each is None else each.scale for each in layer_attention(model)]
        return own

    def worth(self, layer: int, scores: Any, positions: Any, budget: int, /, *rows: Any) -> Float64:
        """See `Ranked.worth`."""
        if not self._scales:
            raise InvalidOperationError("ExpectedAttention: expected of_network(model) before, got none")
        first = int(np.searchsorted(positions, self.sinks))
        found = np.full(len(positions), np.inf)
        keys, values = (each[first:].astype(np.float64) for each in rows[:2])
        if not len(keys):
            return found
        expected = self._turned(layer, rows[2].astype(np.float64), int(positions[-1]) + 1)
        mean = column_sums(expected) / len(expected)  # (group, head_dim)
        scale = self._scales[layer] or 1 / math.sqrt(keys.shape[1])
        logits = scale * product(mean, keys.T)
        if self.covariance:
            for head, each in enumerate((expected - mean).swapaxes(0, 1)):
                spread = product(each.T, each) / len(each)
                logits[head] += 0.5 * scale * scale * sums_of(product(keys, spread) * keys)
        weights = exp(logits - logits.max(axis=1, keepdims=True))
        attention = column_sums(weights / sums_of(weights)[:, None]) / len(weights)
        if self.value_norms:
            attention = (attention + self.epsilon) * np.sqrt(sums_of(values * values))
        found[first:] = attention
        return found

    def _turned(self, layer: int, queries: Float64, end: int) -> Float64:
        """The queries `(m, group, head_dim)` before `end` under the mean rotation of the positions from `end` on."""
        places = np.arange(end - len(queries), end)
        counted = places >= min(self.sinks, end - 1)
        rows, frequencies = queries[counted], self._frequencies[layer]
        pairs, future = len(frequencies), np.arange(end, end + self.future)
        angles, back = (np.multiply.outer(each, frequencies) for each in (future, places[counted]))
        mean_cos, mean_sin = column_sums(cos(angles)) / self.future, column_sums(sin(angles)) / self.future
        own_cos, own_sin = cos(back), sin(back)  # turned back by its own angle, then by the mean of those to come
        real = (own_cos * mean_cos + own_sin * mean_sin)[:, None]
        imaginary = (own_cos * mean_sin - own_sin * mean_cos)[:, None]
        first, second = rows[..., :pairs], rows[..., pairs : 2 * pairs]
        turned = first * real - second * imaginary, first * imaginary + second * real
        return np.concatenate([*turned, rows[..., 2 * pairs :]], axis=-1)
