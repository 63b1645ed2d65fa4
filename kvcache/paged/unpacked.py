"""The tokens of a sequence that a residual or `first_tokens` keeps unpacked; the methods of `PagedKvCache` about them.

They serve texts that continue behind a cached prefix: its blocks are packed, and its newest and first tokens, read
from the sequence that computed them and kept elsewhere, are unpacked again in the sequence that adopts the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_count, as_integer
from kvcache.core.kvrows import KvRows
from kvcache.paged.seq_ids import as_seq_id

if TYPE_CHECKING:
    from kvcache.paged.cache import PagedKvCache
    from kvcache.paged.residual import ResidualSequences

__all__ = ["pack", "read_unpacked", "reserve_unpacked", "unpack", "unpacked_tokens"]

Float32 = npt.NDArray[np.float32]
Rows = Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]


def unpacked_tokens(cache: PagedKvCache, seq_id: int) -> tuple[int, int, int]:
    """Which tokens have f16 rows, `(firsts, base, stop)`: those of [0, firsts) and of [base, stop), the newest ones.

    Raises:
        ValueError: the cache has no `residual_length` and no `first_tokens`; so for all of these methods.
    """
    residual, ids = _residual(cache), [as_seq_id(seq_id)]
    with residual.lock:
        firsts, base, stop, _ = residual.spans[residual.uids(ids)[0]]
    return firsts, base, stop


def read_unpacked(cache: PagedKvCache, layer: int, seq_id: int) -> tuple[Float32, Float32]:
    """`(keys, values)` of the tokens of `unpacked_tokens`, first ones first, as `read` returns them."""
    residual, number, ids = _residual(cache), as_integer(layer, "layer"), [as_seq_id(seq_id)]
    with residual.lock:
        return residual.rows.read(number, residual.uids(ids)[0])


def unpack(cache: PagedKvCache, seq_id: int, newest: Rows = (), firsts: Rows = ()) -> None:
    """Give a sequence f16 rows of its newest tokens and of its first ones; all others are read packed from now on.

    Args:
        newest: for each layer K and V `(n, num_heads, head_dim)` of the last n tokens, all of one group; empty: none.
        firsts: those of the first `first_tokens` tokens, which come before the newest; empty: none.
    """
    residual = _residual(cache)
    residual.unpack(as_seq_id(seq_id), _as_rows(residual, newest, "newest"), _as_rows(residual, firsts, "firsts"))


def pack(cache: PagedKvCache, seq_id: int, num_tokens: int) -> None:
    """Read the first `num_tokens` tokens packed from now on, but for `first_tokens`; frees their f16 rows."""
    _residual(cache).pack(as_seq_id(seq_id), as_count(num_tokens, "num_tokens"))


def reserve_unpacked(cache: PagedKvCache, num_tokens: int) -> None:
    """Map f16 rows for so many tokens in all, now rather than when they are needed; touched when first written."""
    residual, count = _residual(cache), as_count(num_tokens, "num_tokens")
    with residual.lock:
        missing = -(-count // residual.rows.block_size) - residual.rows.total_blocks
        if missing > 0:
            residual.rows.grow(missing)


def _residual(cache: PagedKvCache) -> ResidualSequences:
    if cache._residual is None:
        raise ValueError("residual_length: expected a cache with it or with first_tokens, got 0 and 0")
    return cache._residual


def _as_rows(residual: ResidualSequences, rows: Rows, name: str) -> list[KvRows]:
    found = [residual.rows._blocks.as_rows(keys, values) for keys, values in rows]
    if len(found) not in (0, residual.rows.num_layers):
        raise ValueError(f"{name}: expected rows of {residual.rows.num_layers} layers, got {len(found)}")
    if len({each.count for each in found}) > 1:
        raise ValueError(f"{name}: expected as many tokens in each layer, got {[each.count for each in found]}")
    for layer, each in enumerate(found):
        residual.rows._store.check_rows(each, layer)
    return found
