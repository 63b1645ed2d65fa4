"""How many blocks a limit in bytes allows, and sums of what `memory()` of several objects says.

`memory()` of every engine and cache has the same keys, in bytes:

    weights      engines alone: all matrices and vectors, once
    kv           K and V of all slots, used or not
    bookkeeping  tables, pools, orders of eviction, indexes
    scratch      work memory of the kernels: what attention keeps from call to call, as much as its largest call took,
                 and of engines the rows and partial sums of the largest product so far, which it freed when it ended
    disk         of K and V, the file of a cache that spills, whose "kv" are the most in memory; nothing without one
    huge         of weights and kv, what lies on huge pages now; 0 if the system does not say, as only Linux does

Arrays that a call returns, and a network's rows of activations, belong to the call and are not counted. Of the memory
that they leave, the process keeps up to 128 MiB for the next ones (support/recycled.pxd).
"""

from __future__ import annotations

from typing import Any

from kvcache.core.store import BlockStore
from kvcache.support.arguments import as_bytes, as_integer

__all__ = ["as_spill_limit", "num_blocks_within", "total"]

_MOST = 2**31 - 1  # blocks of a store


def num_blocks_within(
    num_blocks: int | None,
    max_memory_bytes: int | str | None,
    num_layers: int,
    *settings: Any,
    name: str = "num_blocks",
    beside: int = 0,
) -> int:
    """The size of a pool: `num_blocks`, or as many blocks as `max_memory_bytes` allow, or the lower of both.

    Args:
        num_layers, settings: as of `BlockStore`, without its number of blocks.
        name: of `num_blocks` in messages.
        beside: bytes of the limit that are taken by other K and V.

    Raises:
        TypeError: neither is given; another kind.
        ValueError: the bytes are too few for one block; a setting that `BlockStore` does not support.
    """
    if num_blocks is None and max_memory_bytes is None:
        raise TypeError(f"{name}: expected an int, or max_memory_bytes in its place, got None")
    count = None if num_blocks is None else as_integer(num_blocks, name)
    if max_memory_bytes is not None:
        limit = as_bytes(max_memory_bytes, "max_memory_bytes")
        size = BlockStore(num_layers, 0, *settings).block_bytes
        if limit < beside + size:
            also = f" ({beside} beside it)" if beside else ""
            raise ValueError(
                f"max_memory_bytes: expected at least {beside + size}, the bytes of one block{also}, got {limit}"
            )
        most = min((limit - beside) // size, _MOST) if size else _MOST
        count = most if count is None else min(count, most)
    assert count is not None
    return count


def as_spill_limit(num_blocks: int | None, max_memory_bytes: int | str | None) -> int:
    """The bytes in memory of a pool of `num_blocks` blocks that spills: `max_memory_bytes`.

    Raises:
        TypeError: one of them is not given; another kind.
        ValueError: no bytes.
    """
    for name, value in (("num_blocks", num_blocks), ("max_memory_bytes", max_memory_bytes)):
        if value is None:
            raise TypeError(f"{name}: expected a number beside spill, got None")
    limit = as_bytes(max_memory_bytes, "max_memory_bytes")
    if not limit:
        raise ValueError("max_memory_bytes: expected at least 1 with spill, got 0")
    return limit


def total(*reports: dict[str, int]) -> dict[str, int]:
    """The sums of several reports of `memory()`, by key, in the order of the first that has it."""
    return {key: sum(report.get(key, 0) for report in reports) for report in reports for key in report}
