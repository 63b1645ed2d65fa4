"""`CacheBlock`: one block of a `PrefixCache` as an object, and `FoundBlocks`, those that a lookup found.

The object of a block that a lookup found is made when it is first asked for; its K and V are read then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvcache.errors import BlockNotFoundError
from kvcache.prefix.block_rows import read_block
from kvcache.prefix.cached_blocks import CachedBlocks
from kvcache.prefix.index.slots import Claim
from kvcache.support.arguments import as_count
from kvcache.support.copies import refuse_copies

__all__ = ["CacheBlock", "FoundBlocks", "FoundPrefix", "block_of"]

Float32 = npt.NDArray[np.float32]
# Reads K and V of one block: per layer float32 (num_kv_heads * block_size * head_dim,), each with its own head_dim.
ReadBlock = Callable[[], tuple[list[Float32], list[Float32]]]


class CacheBlock:
    """K and V of one block of tokens, as it was when it was returned.

    Args:
        num_layers, num_kv_heads, head_dim, block_size: its dimensions; the tensors are zero.
        value_head_dim: `head_dim` of V alone; None: that of K.

    Attributes:
        token_ids: the tokens that it covers, none in a new block.
        last_used: the cache's recency counter when it was last used.
        ref_count: the number of its holders.
        index: its id in the cache, -1 outside.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, value_head_dim: int | None = None
    ) -> None:
        num_layers, num_kv_heads = as_count(num_layers, "num_layers"), as_count(num_kv_heads, "num_kv_heads")
        head_dim, block_size = as_count(head_dim, "head_dim"), as_count(block_size, "block_size")
        value_dim = head_dim if value_head_dim is None else as_count(value_head_dim, "value_head_dim")
        self._floats = num_layers * num_kv_heads * (head_dim + value_dim) * block_size
        self._rows: tuple[list[Float32], list[Float32]] | None = None
        sizes = num_kv_heads * head_dim * block_size, num_kv_heads * value_dim * block_size
        self._read: ReadBlock = lambda: (
            [np.zeros(sizes[0], np.float32) for _ in range(num_layers)],
            [np.zeros(sizes[1], np.float32) for _ in range(num_layers)],
        )
        self.token_ids: list[int] = []
        self.last_used = 0
        self.ref_count = 0
        self.index = -1

    def _content(self) -> tuple[list[Float32], list[Float32]]:
        if self._rows is None:
            self._rows = self._read()
        return self._rows

    @property
    def keys(self) -> list[Float32]:
        """K per layer, float32 `(num_kv_heads * block_size * head_dim,)`, laid out [head][position][dim].

        Read on first access; BlockNotFoundError if the block was evicted before.
        """
        return self._content()[0]

    @property
    def values(self) -> list[Float32]:
        """V per layer, as `keys`, with the `head_dim` of V."""
        return self._content()[1]

    @property
    def memory_bytes(self) -> int:
        """Bytes of K and V of all layers as float32."""
        return 4 * self._floats

    def __getstate__(self) -> dict[str, Any]:
        self._content()  # a copy has K and V of its own; BlockNotFoundError as by `keys`
        return {name: value for name, value in self.__dict__.items() if name != "_read"}

    def __repr__(self) -> str:
        return f"CacheBlock(index={self.index}, {len(self.token_ids)} tokens, {self.memory_bytes} bytes)"


def block_of(cached: CachedBlocks, index: int, ref_count: int, clock: int, token_ids: list[int]) -> CacheBlock:
    """A block as it is at the index's time `clock`; its K and V are read when first asked for."""
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
        tokens: the tokens of the prompt.
        claim: the claim on the match.
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


class FoundPrefix(NamedTuple):
    """The result of a lookup, and a context manager: `with` gives `blocks`, which it releases at its end.

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
