"""What a `BatchEngine` keeps K and V in: a pool of blocks, what stays unpacked of texts, pools of windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.core.arguments import as_bytes, as_count
from kvcache.core.layer_formats import formats_of_layers
from kvcache.core.memory import num_blocks_within
from kvcache.core.store import BlockStore
from kvcache.engine.cache_options import cache_options
from kvcache.engine.evicting import Budgets, EvictingSequence
from kvcache.engine.newest import NewestGroups
from kvcache.engine.residual import residual_bytes
from kvcache.engine.storage import Storage
from kvcache.engine.windows import LayerGroups
from kvcache.networks.protocols import Model
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.residual import row_block
from kvcache.serving.blocks import SharedBlocks
from kvcache.serving.budget import CHEAP_ROWS, MOST, MOST_PROMPTS
from kvcache.serving.evicting import EvictingTexts
from kvcache.serving.windows import WindowPools, num_blocks_with_windows
from kvcache.tiers.source import GROUP_TOKENS
from kvcache.tiers.tiers import Tiers

__all__ = ["make_pools"]

_DEFAULT_TOKENS = 16384  # of the default pool, at most


def make_pools(
    model: Model,
    budgets: Budgets | None,
    storage: Storage,
    rotate: bool | str,
    block_size: int,
    num_blocks: int | None,
    max_memory_bytes: int | str | None,
    max_running: int,
    tiers: Tiers | None,
) -> SharedBlocks:
    """The memory of a `BatchEngine`; see there for the arguments and errors.

    Args:
        budgets: of layers that evict; None: they keep all tokens.
        tiers: with them, layers with a window keep more than it, so that the window at the end of a value is there.
    """
    if budgets is not None:
        if tiers is not None:
            raise ValueError(f"tiers: expected none with an eviction_policy, got {tiers}")
        return _make_evicting(model, budgets, storage, rotate, block_size, num_blocks, max_memory_bytes, max_running)
    config, block_size = model.config, as_count(block_size, "block_size", 1, most=None)
    if num_blocks is None and max_memory_bytes is None:
        num_blocks = -(-min(4 * config.max_position_embeddings, _DEFAULT_TOKENS) // block_size) + 1
    if num_blocks is not None:
        num_blocks = as_count(num_blocks, "num_blocks", 1, most=None)

    def settings(layers: Sequence[int]) -> tuple[Any, ...]:
        dtypes = [formats_of_layers(dtype, layers) for dtype in storage.dtypes]
        return block_size, config.num_kv_heads, config.head_dim, *dtypes, rotate

    own = block_size, config.num_kv_heads, config.head_dim, *storage.dtypes, rotate
    BlockStore(config.num_layers, 0, *own)  # raises for formats that are not supported
    groups = LayerGroups.of(model, block_size, MOST)
    spare = 0 if tiers is None else max(GROUP_TOKENS, block_size)
    options = {
        "block_size": block_size, "num_heads": config.num_kv_heads, "head_dim": config.head_dim, "rotate": rotate,
        "residual_length": storage.residual_length, "first_tokens": storage.firsts,
    }  # fmt: skip
    make = storage.of_layers(PagedKvCache, options)
    cache, newest = make(0, groups.whole), None
    if storage.residual_length or storage.firsts:
        cache.reserve_unpacked(_most_unpacked(storage.residual_length, storage.firsts, max_running))
    if storage.firsts:
        newest = NewestGroups(cache, texts=4 * max_running)
    if groups.windows and max_memory_bytes is not None:
        most = max_running * (-(-config.max_position_embeddings // block_size) + 1)
        num_blocks = num_blocks_with_windows(num_blocks, max_memory_bytes, groups, spare, max_running, most, settings)
    else:
        num_blocks = num_blocks_within(
            num_blocks, max_memory_bytes, len(groups.whole), *settings(groups.whole),
            beside=cache.total_memory_bytes + (0 if newest is None else newest.memory()["kv"]),
        )  # fmt: skip
    windows = WindowPools.of(groups, spare, model, num_blocks, block_size, max_running, make)
    cache.grow(num_blocks)
    return SharedBlocks(cache, newest, windows)


def _most_unpacked(length: int, firsts: int, max_running: int) -> int:
    """Tokens that the texts of a step keep unpacked at most, in blocks of them.

    Each has its group behind its first tokens; with groups, a piece of several tokens has these too, and at most one
    block in part. `unpack` makes room for two blocks more than it needs.
    """
    size = row_block(length, firsts)
    pieces = MOST + size * (MOST_PROMPTS + CHEAP_ROWS) if length else 0
    return max_running * (firsts + length) + pieces + 2 * size


def _make_evicting(
    model: Model,
    budgets: Budgets,
    storage: Storage,
    rotate: bool | str,
    block_size: int,
    num_blocks: int | None,
    max_memory_bytes: int | str | None,
    max_running: int,
) -> EvictingTexts:
    """As `make_pools`. ValueError: there is too little for one text."""
    block_size = as_count(block_size, "block_size", 1, most=None)
    options = cache_options(
        model, budgets, num_blocks=None, max_memory_bytes=None, block_size=block_size, prefill_chunk=MOST,
        storage=storage, rotate=rotate, groups=LayerGroups.of(model, block_size, MOST),
    )  # fmt: skip
    each, most = options["num_blocks"], max_running
    if num_blocks is not None:
        most = min(most, as_count(num_blocks, "num_blocks", each, most=None) // each)
    if max_memory_bytes is not None:
        limit = as_bytes(max_memory_bytes, "max_memory_bytes")
        own = PagedKvCache(**options | {"num_blocks": 0}).block_memory_bytes * each
        own += residual_bytes(model.config, storage.dtypes, storage.residual_length, MOST, storage.firsts)
        if limit < own:
            raise ValueError(f"max_memory_bytes: expected at least {own}, the bytes of one text, got {limit}")
        most = min(most, limit // own)

    def make() -> EvictingSequence:
        return EvictingSequence(model, PagedKvCache(**options), MOST, budgets)

    return EvictingTexts(make, most)
