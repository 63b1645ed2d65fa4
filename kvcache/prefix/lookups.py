"""Blocks of a `PrefixCache` as objects, found by a lookup or by id: its methods `lookup`, `release` and `get_block`.

The object of a block that a lookup found is made when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_integer
from kvcache.core.copying import refuse_copies
from kvcache.core.tokens import as_tokens
from kvcache.errors import BlockNotFoundError, InvalidOperationError
from kvcache.prefix.block_rows import read_block
from kvcache.prefix.cached_blocks import CachedBlocks
from kvcache.prefix.files import fetch_all
from kvcache.prefix.index.slots import Claim
from kvcache.prefix.sessions import CacheBlock

if TYPE_CHECKING:
    from kvcache.prefix.blocks import PrefixCache

__all__ = ["FoundBlocks", "Lookup", "get_block", "lookup", "release"]

Float32 = npt.NDArray[np.float32]


def block_of(cached: CachedBlocks, index: int, ref_count: int, clock: int, token_ids: list[int]) -> CacheBlock:
    """A block as it was when the index's clock said `clock`; its K and V are read when first asked for."""
    store, dims, slots = cached.store, cached.dims, cached.slots
    block = CacheBlock(store.num_layers, store.num_heads, dims[0], store.block_size, dims[1])
    block.index, block.token_ids, block.ref_count, block.last_used = index, token_ids, ref_count, clock

    def read() -> tuple[list[Float32], list[Float32]]:
        with cached.lock:
            record = slots.records([index])[0]
            if record["born"] > clock or not (record["named"] or slots.counts()[index]):
                raise BlockNotFoundError(index)
            return read_block(store, index, dims)

    block._read = read
    return block


class FoundBlocks(Sequence[CacheBlock]):
    """The blocks of a prompt, in its order.

    Args:
        tokens: of the prompt.
        claim: of the match.
    """

    def __init__(self, cached: CachedBlocks, tokens: npt.NDArray[np.uint32], claim: Claim) -> None:
        self._cached, self._clock = cached, cached.index.clock
        self._indices = claim.pages[: claim.num_held].copy()
        self._to_release = self._indices.copy()
        self._tokens = tokens[: len(self._indices) * cached.store.block_size].copy()
        self._made: dict[int, CacheBlock] = {}
        self._held: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self._indices)

    def release(self) -> None:
        """End this lookup's hold on every block; a second call does nothing."""
        self._cached.lock.when_free(lambda: self._cached.slots.release_each(self._to_release))

    __reduce_ex__ = refuse_copies("a list of its blocks can be copied")

    def __repr__(self) -> str:
        return f"FoundBlocks({len(self)} blocks of {self._cached.store.block_size} tokens)"

    @overload
    def __getitem__(self, i: int) -> CacheBlock: ...
    @overload
    def __getitem__(self, i: slice) -> list[CacheBlock]: ...
    def __getitem__(self, i: int | slice) -> CacheBlock | list[CacheBlock]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        if i not in self._made:
            index, size = int(self._indices[i]), self._cached.store.block_size
            tokens = self._tokens[i * size : (i + 1) * size].tolist()
            if self._held is None:
                with self._cached.lock:
                    self._held = self._cached.slots.counts()[self._indices]
            self._made[i] = block_of(self._cached, index, int(self._held[i]), self._clock, tokens)
        return self._made[i]


class Lookup(NamedTuple):
    """What a lookup found, and a context manager: `with` gives `blocks`, which it releases at its end.

    Attributes:
        matched_len: tokens of the blocks.
        blocks: in the order of the prompt.
    """

    matched_len: int
    blocks: Sequence[CacheBlock]

    def __enter__(self) -> Sequence[CacheBlock]:
        return self.blocks

    def __exit__(self, *exception: object) -> None:
        if isinstance(self.blocks, FoundBlocks):
            self.blocks.release()


def lookup(cache: PrefixCache, token_ids: Any, namespace: Hashable = None) -> Lookup:
    """`(matched_len, blocks)`: the full blocks that begin the prompt, each held until `release(block.index)`.

    Each block found counts a hit, a stop before the last full block a miss. `blocks` makes each when it is first
    asked for. `with cache.lookup(tokens) as blocks:` releases them all at its end, and `release` none of them.
    """
    ids, cached = as_tokens(token_ids), cache._cached
    with cached.lock:
        cached.fetch(ids, namespace)
        claim = cached.index.claim(ids, namespace, whole=True)
        blocks = FoundBlocks(cached, ids, claim) if claim.num_held else []
        claim.hold_each()
        return Lookup(len(blocks) * cached.store.block_size, blocks)


def release(cache: PrefixCache, index: int) -> None:
    """Release a block that `lookup` returned; during another call of this thread, when that call ends.

    Raises:
        InvalidOperationError: no lookup holds it.
    """
    index, slots, lock = as_integer(index, "index"), cache._cached.slots, cache._cached.lock

    def expect_held() -> None:
        if not slots.is_looked_up(index):
            raise InvalidOperationError(f"expected a block that a lookup holds, got {index}")

    def end() -> None:
        expect_held()
        slots.release_each(np.array([index], np.int32))

    if lock.inside:
        expect_held()
    lock.when_free(end)


def get_block(cache: PrefixCache, index: int) -> CacheBlock | None:
    """A cached block, or one that is held, by its index; None if there is none."""
    index, cached, slots = as_integer(index, "index"), cache._cached, cache._cached.slots
    if not 0 <= index < cached.pool.num_blocks:
        return None
    with cached.lock:
        fetch_all(cached.index)
        slots.release_dropped()
        held, record = int(slots.counts()[index]), slots.records([index])[0]
        if not held and not record["named"]:
            return None
        block = block_of(cached, index, held, cached.index.clock, slots.tokens_of(np.array([index]))[0].tolist())
        block.last_used = int(record["used"])
        return block
