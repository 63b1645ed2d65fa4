"""The size and the storage formats of an engine's cache, and of the prefix cache before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from kvcache.calibration.residual import residual_bytes
from kvcache.core.arguments import as_bytes, as_count
from kvcache.core.layer_formats import formats_of_layers, is_mixed
from kvcache.core.memory import num_blocks_within
from kvcache.core.store import BlockStore
from kvcache.engine.evicting import Budgets
from kvcache.engine.newest import NewestGroups
from kvcache.engine.sequence import LiveSequence
from kvcache.engine.storage import Storage
from kvcache.engine.windows import LayerGroups, num_pages
from kvcache.networks.protocols import Model

__all__ = ["cache_options", "num_cache_blocks"]

_DEFAULT_TOKENS = 8192  # maximum number of tokens of the default pool


def cache_options(
    model: Model,
    budgets: Budgets | None,
    *,
    num_blocks: int | None,
    max_memory_bytes: int | str | None,
    block_size: int,
    prefill_chunk: int,
    storage: Storage,
    rotate: bool | str,
    groups: LayerGroups,
) -> dict[str, Any]:
    """The arguments of `PagedKvCache` for an engine over `model`, for the layers that keep all tokens.

    With `budgets`, each layer has sequences of its own. `max_memory_bytes` bound this cache,
    those of the windows and the residual together.
    """
    config = model.config
    separate, positions = budgets is not None, config.max_position_embeddings
    num_layers = 1 if separate else len(groups.whole)  # of a block
    if num_blocks is None and budgets is not None:
        num_blocks = budgets.peak_blocks(block_size, prefill_chunk, positions)
    elif num_blocks is None:
        # Plus one block: cutting the last token off may copy the last block.
        tokens = positions if max_memory_bytes is not None else min(positions, _DEFAULT_TOKENS)
        num_blocks = -(-tokens // block_size) + 1
    num_blocks = as_count(num_blocks, "num_blocks", 1, most=None)
    if budgets is not None and any(map(is_mixed, storage.dtypes)):
        raise ValueError("dtype: expected one format with an eviction_policy, got one for each layer")
    for dtype, name in zip(storage.dtypes, ("key_dtype", "value_dtype"), strict=True):
        if is_mixed(dtype) and len(dtype) != config.num_layers:
            raise ValueError(f"{name}: expected one format, or one for each of {config.num_layers} layers, got {dtype}")

    def settings(layers: Sequence[int]) -> tuple[Any, ...]:
        dtypes = [formats_of_layers(dtype, layers) for dtype in storage.dtypes]
        return block_size, config.num_kv_heads, config.head_dim, *dtypes, rotate

    whole = settings(groups.whole)
    if max_memory_bytes is not None:
        BlockStore(num_layers, 0, *whole)  # raises for a format that is not supported
        piece = min(prefill_chunk, positions)
        beside = residual_bytes(config, storage.dtypes, storage.residual_length, piece, storage.firsts) + sum(
            group.num_blocks * BlockStore(len(group.layers), 0, *settings(group.layers)).block_bytes
            for group in groups.windows
        )
        num_blocks = num_blocks_within(num_blocks, max_memory_bytes, num_layers, *whole, beside=beside)
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "num_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_layers": len(groups.whole),
        "separate_layers": separate,
        "key_dtype": formats_of_layers(storage.formats[0], groups.whole),
        "value_dtype": formats_of_layers(storage.formats[1], groups.whole),
        "rotate": rotate,
        "calibration": storage.calibration_of(groups.whole),
        "residual_length": storage.residual_length,
        "first_tokens": storage.firsts,
    }


def num_cache_blocks(sequence: LiveSequence, num_blocks: int | None, max_memory_bytes: int | str | None) -> int:
    """The blocks of a prefix cache before the engine of `sequence`: `num_blocks`, or what `max_memory_bytes` allow.

    The bytes bound K and V of the engine's caches, its residual, the blocks, the pages of windows and the unpacked
    groups together.

    Raises:
        TypeError: neither is given; another kind.
        ValueError: a negative number; too few bytes for one block.
    """
    if num_blocks is None and max_memory_bytes is None:
        raise TypeError("max_cache_blocks: expected an int, or max_memory_bytes in its place, got None")
    count = None if num_blocks is None else as_count(num_blocks, "max_cache_blocks", most=None)
    if max_memory_bytes is not None:
        limit = as_bytes(max_memory_bytes, "max_memory_bytes")
        cache, before = sequence.cache, sequence.memory()["kv"]

        def needed(blocks: int) -> int:
            pages = sum(
                num_pages(group.window, cache.block_size, blocks) * group.cache.block_memory_bytes
                for group in sequence.windows.groups
            )
            return before + blocks * cache.block_memory_bytes + pages + NewestGroups.kv_bytes(cache, blocks)

        if limit < needed(1):
            raise ValueError(
                f"max_memory_bytes: expected at least {needed(1)}, the bytes of one block and of the engine's K and V, "
                f"got {limit}"
            )
        most = bisect_right(range(limit // max(1, cache.block_memory_bytes) + 1), limit, key=needed) - 1
        count = most if count is None else min(count, most)
    assert count is not None
    return count
