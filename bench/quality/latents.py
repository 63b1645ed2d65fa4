"""A network with heads of K and V stated as one with latent rows: what rounding costs where V is a part of K."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.quality.network import Recorder
from kvcache.calibration.passes import new_cache, run_piece
from kvcache.engine import Transformer
from kvcache.texts.features import features_of

__all__ = ["AsLatents", "fits", "like_factors"]

MOST = 576  # channels of a row
TOKENS, FIRSTS = 512, 16  # of the text that says how large K and V are, and those that count for nothing


def fits(model: Transformer) -> bool:
    """Whether all layers of a network have K and V of one size, and a row has room for those of a token."""
    alike = not features_of(model) & {"state", "silent", "latent", "shared", "sizes"}
    return alike and 2 * model.config.num_kv_heads * model.config.head_dim <= MOST


def like_factors(model: Transformer, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Powers of two that give K of each layer the size of V, `(num_layers,)`: by the root mean squares over a text."""
    text = tokens[:TOKENS]
    cache = new_cache(model, len(text), dtype="f32")
    cache.allocate(0, 0)
    run_piece(model, cache, text, 0, "none", len(text))
    rows = [cache.read(layer, 0) for layer in range(cache.num_layers)]
    sizes = np.array([[np.sqrt(np.square(side[FIRSTS:]).mean()) for side in each] for each in rows])
    return np.exp2(np.round(np.log2(sizes[:, 1] / sizes[:, 0]))).astype(np.float32)


@dataclass(frozen=True)
class _Config:
    """The sizes of such a network."""

    num_layers: int
    num_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    num_kv_heads: int = 1


class AsLatents(Recorder):
    """A network whose row of a token is V of all KV heads, which is the latent, and then their K: one KV head.

    The query of a head is zero but for the K of its own KV head, and of what attention returns it takes V of that head:
    over f32 the results are those of the network, bit for bit. K is multiplied and queries are divided by a constant.

    Args:
        factors: of K, one for each layer, powers of two.
    """

    def __init__(self, model: Transformer, keep: Any, factors: npt.NDArray[np.float32]) -> None:
        super().__init__(model, keep)
        config = model.config
        self._heads, self._dim, self._factors = config.num_kv_heads, config.head_dim, factors
        self._wide = self._heads * self._dim
        self.config: Any = _Config(
            config.num_layers, config.num_heads, 2 * self._wide, config.vocab_size, config.max_position_embeddings
        )
        self.attention = tuple(
            replace(
                each, scale=each.scale or self._dim**-0.5, num_kv_heads=1, head_dim=2 * self._wide, latent=self._wide
            )
            for each in model.attention if each is not None
        )

    def forward(self, tokens: Any, positions: Any, attend: Any, logits: Any, **places: Any) -> Any:
        group = self.model.config.num_heads // self._heads
        own = np.arange(self.model.config.num_heads) // group

        def latent(layer: int, queries: Any, keys: Any, values: Any, *_: Any) -> Any:
            n, factor = len(queries), self._factors[layer]
            rows = np.concatenate([values.reshape(n, -1), keys.reshape(n, -1) * factor], axis=1)[:, None]
            met = np.zeros((n, len(own), 2, self._heads, self._dim), np.float32)
            met[:, np.arange(len(own)), 1, own] = queries / factor
            mixed = attend(layer, met.reshape(n, len(own), -1), np.ascontiguousarray(rows, np.float32), None)
            parts = mixed.reshape(n, len(own), self._heads, self._dim)
            return np.ascontiguousarray(parts[:, np.arange(len(own)), own])

        return super().forward(tokens, positions, latent, logits, **places)
