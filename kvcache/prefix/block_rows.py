"""Blocks as the documented flat vectors, laid out [head][position][dim], to and from the rows of a `BlockStore`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.rowformat import RowFormats
from kvcache.core.runs import RUN
from kvcache.core.store import BlockStore
from kvcache.support.arguments import as_flat, as_floats, short

__all__ = ["Dims", "block_rows", "checked_rows", "read_block", "write_blocks"]

Float32 = npt.NDArray[np.float32]
Dims = tuple[int, int]  # channels per head of K and of V that a caller has; the store may have more


def block_rows(store: BlockStore, name: str, blocks: Sequence[Any], head_dim: int, stored_dim: int) -> list[Float32]:
    """Per layer the rows of all blocks, float32 `(len(blocks) * block_size, num_heads, stored_dim)`.

    Args:
        name: what messages call them.
        blocks: each per layer `(num_heads * block_size * head_dim,)`.
        stored_dim: channels of the store, as many or more; those behind are 0.

    Raises:
        TypeError, ValueError: other layers, lengths or dtypes.
    """
    heads, size = store.num_heads, store.block_size
    for block in blocks:
        got = len(block) if hasattr(block, "__len__") else short(block)
        if got != store.num_layers:
            raise ValueError(f"{name}: expected rows of {store.num_layers} layers in a block, got {got}")
    layers = []
    for layer in range(store.num_layers):
        flat = [as_floats(as_flat(block[layer], name), (heads * size * head_dim,), name) for block in blocks]
        rows = np.zeros((len(blocks), size, heads, stored_dim), np.float32)
        rows[..., :head_dim] = np.reshape(flat, (len(blocks), heads, size, head_dim)).swapaxes(1, 2)
        layers.append(rows.reshape(-1, heads, stored_dim))
    return layers


def checked_rows(
    store: BlockStore, pairs: Sequence[Any], dims: Dims, formats: RowFormats
) -> tuple[list[Float32], list[Float32]]:
    """Per layer the rows of K and of V of `(keys, values)` of blocks; ValueError unless the store can hold them."""
    for pair in pairs:
        if not hasattr(pair, "__len__") or len(pair) != 2:
            raise TypeError(f"pairs: expected keys and values of each block, got {short(pair)}")
    sides = zip(*pairs, strict=True)
    stored = zip(("keys", "values"), sides, dims, (store.head_dim, store.value_head_dim), strict=True)
    keys, values = (block_rows(store, *side) for side in stored)
    keys = [formats.rows(0, rows, rows.shape, "keys") for rows in keys]
    values = [formats.rows(1, rows, rows.shape, "values") for rows in values]
    for k, v in zip(keys, values, strict=True):
        store.check_values(k, v)
    return keys, values


def write_blocks(
    store: BlockStore, blocks: npt.NDArray[np.int32], keys: list[Float32], values: list[Float32], first_row: int
) -> None:
    """Fill `blocks` with rows of `block_rows`, from row `first_row` on."""
    runs = np.array([(block, 0, store.block_size) for block in blocks.tolist()], RUN)
    rows = slice(first_row, first_row + len(blocks) * store.block_size)
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        store.write(layer, runs, k[rows], v[rows])


def read_block(store: BlockStore, index: int, dims: Dims) -> tuple[list[Float32], list[Float32]]:
    """`(keys, values)` of one block, each per layer float32 `(num_heads * block_size * its channels,)`."""
    runs = np.array([(index, 0, store.block_size)], RUN)
    keys: list[Float32] = []
    values: list[Float32] = []
    for layer in range(store.num_layers):
        for rows, dim, out in zip(store.read(layer, runs), dims, (keys, values), strict=True):
            out.append(rows[..., :dim].swapaxes(0, 1).reshape(-1))
    return keys, values
