"""What a `BatchEngine` keeps K and V in: a pool of blocks, what stays unpacked of each text, pools of windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.core.arguments import as_count
from kvcache.core.layer_formats import formats_of_layers
from kvcache.core.memory import num_blocks_within
from kvcache.core.store import BlockStore
from kvcache.engine.storage import Storage
from kvcache.engine.windows import LayerGroups
from kvcache.networks.protocols import Model, layer_attention
from kvcache.paged.cache import PagedKvCache
from kvcache.serving.blocks import SharedBlocks
from kvcache.serving.budget import MOST
from kvcache.serving.newest import make_groups
from kvcache.serving.windows import WindowPools, num_blocks_with_windows

__all__ = ["make_pools"]

_DEFAULT_TOKENS = 16384  # of the default pool, at most


def make_pools(
    model: Model,
    storage: Storage,
    rotate: bool | str,
    block_size: int,
    num_blocks: int | None,
    max_memory_bytes: int | str | None,
    max_running: int,
    *,
    keep_all: bool,
) -> SharedBlocks:
    """The memory of a `BatchEngine`; see there for the arguments and errors.

    Args:
        storage: how it keeps K and V.
        keep_all: layers with a window keep all tokens too.
    """
    config = model.config
    block_size = as_count(block_size, "block_size", 1, most=None)
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
    newest = make_groups(config, storage, max_running, layer_attention(model))
    if keep_all:
        groups = LayerGroups(tuple(range(config.num_layers)), ())
    if groups.windows and max_memory_bytes is not None:
        most = max_running * (-(-config.max_position_embeddings // block_size) + 1)
        num_blocks = num_blocks_with_windows(num_blocks, max_memory_bytes, groups, max_running, most, settings)
    else:
        num_blocks = num_blocks_within(
            num_blocks, max_memory_bytes, len(groups.whole), *settings(groups.whole),
            beside=0 if newest is None else newest.nbytes,
        )  # fmt: skip
    make = storage.of_layers(PagedKvCache, {
        "block_size": block_size, "num_heads": config.num_kv_heads, "head_dim": config.head_dim, "rotate": rotate,
        "calibration": storage.calibration,
    })  # fmt: skip
    cache = make(num_blocks=num_blocks, layers=groups.whole)
    return SharedBlocks(cache, newest, WindowPools.of(groups, model, num_blocks, block_size, max_running, make))
