"""Passes of a network over one text, in a cache of its own, whose bits are known: what calibrations measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.protocols import Float32, Logits, Model, cached_sizes, layer_attention
from kvcache.paged.cache import PagedKvCache

__all__ = ["new_cache", "run_piece"]


def new_cache(model: Model, num_tokens: int, **options: Any) -> PagedKvCache:
    """A cache of all layers of a network whose K and V have one size, with room for a text and a block more.

    Args:
        options: of `PagedKvCache`.
    """
    first, (heads, dim) = next(each for each in layer_attention(model) if each is not None), cached_sizes(model)
    sizes: dict[str, Any] = {"num_heads": heads, "head_dim": dim}
    if first.latent is not None:
        sizes = {"latent": (first.latent, dim - first.latent)}
    return PagedKvCache(-(-num_tokens // 16) + 1, 16, **sizes, num_layers=model.config.num_layers, **options)


def run_piece(
    model: Model, cache: PagedKvCache, tokens: NDArray[np.uint32], pos: int, logits: Logits, length: int,
    note: Callable[[int, Float32, Float32], None] | None = None,
) -> Float32:
    """Append tokens to sequence 0 of a cache of all layers, and run them through the network; returns its logits.

    Args:
        pos: of the first token.
        length: tokens of the whole text, which say its regime, see `Model`.
        note: called in each layer with its number, the queries and the keys.
    """
    count, options = len(tokens), [each.options() for each in layer_attention(model) if each is not None]
    cache.append(0, count)

    def attend(layer: int, queries: Float32, keys: Any, values: Any, /, *_: Any) -> Float32:
        cache.write(layer, 0, keys, values)
        if note is not None:
            note(layer, queries, keys)
        mixed: Float32 = cache.attention(layer, queries, [0], query_lens=[count], **options[layer])
        return mixed

    regime: Callable[[int], int] | None = getattr(model, "regime", None)
    places: dict[str, Any] = {} if regime is None or not regime(length) else {"regime": regime(length)}
    return model.forward(tokens, np.arange(pos, pos + count), attend, logits, **places)
