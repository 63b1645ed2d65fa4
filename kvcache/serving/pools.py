"""What a `BatchEngine` keeps K and V in: pools of blocks, the newest groups of the residual, pools of windows."""

from __future__ import annotations

from functools import partial

from kvcache.core.arguments import as_count
from kvcache.core.memory import num_blocks_within
from kvcache.core.rowformat import Format, stored_dtypes
from kvcache.core.store import BlockStore
from kvcache.engine.calibrating import as_calibration
from kvcache.engine.residual import as_length
from kvcache.engine.windows import LayerGroups
from kvcache.networks.protocols import Model, layer_attention
from kvcache.paged.cache import PagedKvCache
from kvcache.serving.blocks import SharedBlocks
from kvcache.serving.budget import MOST
from kvcache.serving.newest import NewestGroups
from kvcache.serving.windows import WindowPools, num_blocks_with_windows

__all__ = ["make_pools"]

_DEFAULT_TOKENS = 16384  # of the default pool, at most


def make_pools(
    model: Model,
    formats: tuple[str | Format, str | Format],
    rotate: bool | str,
    block_size: int,
    num_blocks: int | None,
    max_memory_bytes: int | str | None,
    max_running: int,
    residual_length: int | None,
    *,
    keep_all: bool,
) -> SharedBlocks:
    """The memory of a `BatchEngine`; see there for the arguments and errors.

    Args:
        formats: of K and V.
        keep_all: layers with a window keep all tokens too.
    """
    config, attention = model.config, layer_attention(model)
    block_size = as_count(block_size, "block_size", 1, most=None)
    if num_blocks is None and max_memory_bytes is None:
        num_blocks = -(-min(4 * config.max_position_embeddings, _DEFAULT_TOKENS) // block_size) + 1
    if num_blocks is not None:
        num_blocks = as_count(num_blocks, "num_blocks", 1, most=None)
    dtypes = stored_dtypes(formats, False)
    settings = block_size, config.num_kv_heads, config.head_dim, *dtypes, rotate
    BlockStore(config.num_layers, 0, *settings)  # raises for a format that is not supported
    groups = LayerGroups.of(model, block_size, MOST)
    without = "layers that keep a window" if groups.windows else ""
    length = as_length(residual_length, *dtypes, without=without)
    newest = NewestGroups(config, dtypes, length, max_running, attention) if length else None
    if keep_all:
        groups = LayerGroups(tuple(range(config.num_layers)), ())
    if groups.windows and max_memory_bytes is not None:
        most = max_running * (-(-config.max_position_embeddings // block_size) + 1)
        num_blocks = num_blocks_with_windows(num_blocks, max_memory_bytes, groups, max_running, most, *settings)
    else:
        beside = 0 if newest is None else newest.nbytes
        num_blocks = num_blocks_within(num_blocks, max_memory_bytes, len(groups.whole), *settings, beside=beside)
    make = partial(
        PagedKvCache, block_size=block_size, num_heads=config.num_kv_heads, head_dim=config.head_dim,
        key_dtype=formats[0], value_dtype=formats[1], rotate=rotate,
        calibration=as_calibration(model, False, dtypes[0], without),
    )  # fmt: skip
    cache = make(num_blocks=num_blocks, num_layers=len(groups.whole))
    return SharedBlocks(cache, newest, WindowPools.of(groups, model, num_blocks, block_size, max_running, make))
