"""The size and the storage formats of an engine's cache."""

from __future__ import annotations

from typing import Any

from kvcache.core.arguments import as_count
from kvcache.engine.evicting import Budgets
from kvcache.engine.protocols import Model

__all__ = ["cache_options"]

_DEFAULT_TOKENS = 8192  # maximum number of tokens of the default pool


def cache_options(
    model: Model,
    budgets: Budgets | None,
    *,
    num_blocks: int | None,
    block_size: int,
    prefill_chunk: int,
    **formats: Any,
) -> dict[str, Any]:
    """The arguments of `PagedKvCache` for an engine over `model`, with `formats` as they are.

    With `budgets`, each layer has sequences of its own in a cache of one layer.
    """
    config = model.config
    if num_blocks is None and budgets is not None:
        num_blocks = budgets.peak_blocks(block_size, prefill_chunk, config.max_position_embeddings)
    elif num_blocks is None:
        # Plus one block: cutting the last token off may copy the last block.
        num_blocks = -(-min(config.max_position_embeddings, _DEFAULT_TOKENS) // block_size) + 1
    return {
        "num_blocks": as_count(num_blocks, "num_blocks", 1, most=None),
        "block_size": block_size,
        "num_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_layers": config.num_layers if budgets is None else 1,
        **formats,
    }
