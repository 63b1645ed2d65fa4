"""What `PrefixCache` returns: blocks, sessions, and a frozen snapshot of its counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_count
from kvcache.core.copying import refuse_copies
from kvcache.prefix.index.slots import Claim

__all__ = ["CacheBlock", "CacheSession", "PrefixCacheStats"]

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


class CacheSession:
    """The matched blocks of a request, which stay in the cache until the session is released or dropped.

    Attributes:
        matched_prefix_len: tokens of the matched blocks.
        tail_block: a block whose first `tail_tokens` tokens continue the match, to be copied; -1 if there is none.
        tail_tokens: see there.
    """

    def __init__(
        self,
        matched_prefix_len: int,
        block_indices: list[int] | None,
        tail_block: int = -1,
        tail_tokens: int = 0,
        claim: Claim | None = None,
        close: Callable[[CacheSession], None] | None = None,
    ) -> None:
        self.matched_prefix_len = matched_prefix_len
        self.tail_block = tail_block
        self.tail_tokens = tail_tokens
        self._blocks = block_indices
        self._claim = claim  # references on these blocks
        if claim is not None:
            claim.keep()
        self._close = close

    @property
    def block_indices(self) -> list[int]:
        """The matched blocks in the order of the text."""
        if self._blocks is None:
            assert self._claim is not None
            self._blocks = self._claim.pages[: self._claim.num_held].tolist()
        return self._blocks

    def cached_tokens(self, block_size: int) -> int:
        """Tokens in blocks of this size."""
        return len(self.block_indices) * block_size

    @property
    def is_empty(self) -> bool:
        """Whether no block matched."""
        return not self.block_indices

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed: those of the matched blocks, and the head of the tail block."""
        return self.matched_prefix_len + self.tail_tokens

    @property
    def shared_blocks(self) -> list[int]:
        """The blocks of these tokens, the tail block last."""
        return [*self.block_indices, self.tail_block] if self.tail_tokens else list(self.block_indices)

    def __repr__(self) -> str:
        tail = f", {self.tail_tokens} tokens of block {self.tail_block}" if self.tail_tokens else ""
        return f"CacheSession({self.matched_prefix_len} tokens in {len(self.block_indices)} blocks{tail})"

    __reduce_ex__ = refuse_copies("`open_session` opens another one")

    def __enter__(self) -> CacheSession:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._close is not None:
            self._close(self)


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """A snapshot of the counters.

    Attributes:
        hit_rate: `hit_tokens` over `lookup_tokens`, 0.0 before the first lookup.
        cached_blocks, capacity_blocks: blocks in the cache, and how many it may hold.
        memory_bytes: bytes of K and V of the blocks in the cache.
        total_hits: blocks found.
        total_misses: lookups that stopped before the prompt's last full block.
        total_evictions: blocks evicted.
        hit_tokens, lookup_tokens: tokens found, of the prompts asked for. Blocks that match in part count with the
            tokens that match, if the lookup was a session, which can use them.
        miss_reasons: why lookups stopped. "evicted": the next block was cached before. "namespace": another namespace
            has it. "shorter_than_block": a cached block begins with the same tokens, but differs before its end; or
            the prompt is shorter than a block, which is no miss. "no_shared_prefix": none of these.
        bookkeeping_bytes: memory of the index beside the K and V: tokens, trie, a record per block, and a hash of
            each of the blocks evicted last.
    """

    hit_rate: float
    cached_blocks: int
    capacity_blocks: int
    memory_bytes: int
    total_hits: int
    total_misses: int
    total_evictions: int
    hit_tokens: int
    lookup_tokens: int
    miss_reasons: Mapping[str, int]
    bookkeeping_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "miss_reasons", MappingProxyType(dict(self.miss_reasons)))

    def _content(self) -> dict[str, Any]:
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return content | {"miss_reasons": dict(self.miss_reasons)}  # a mapping proxy is not pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self._content().values())

    def __repr__(self) -> str:
        return f"PrefixCacheStats({', '.join(f'{name}={value!r}' for name, value in self._content().items())})"
