"""Unpacked copies of the groups in which cached texts end, so that a request can continue inside a group.

A query reads the tokens of its own group unpacked (paged/residual.pxd), but a cached prefix has only packed tokens.
Without a copy, the tokens of the last group would run through the network again. Copies exist of the groups in which
prompts and answers end, and of the groups in which two texts diverge. The least recently used copies are evicted.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.kvrows import KvRows
from kvcache.core.layer_formats import unpacked
from kvcache.core.memory import total
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.prefix_cache import PrefixCache

__all__ = ["NewestGroups", "num_newest"]

# Cached tokens per unpacked token: a ninth more memory in q4 (16 bits over 32 times 4.5), a fifth in q2.
_SHARE = 32
_OWN = 0  # the temporary sequence
Tokens = NDArray[np.uint32]


def num_newest(length: int, firsts: int, block_size: int, max_blocks: int, texts: int = 0) -> tuple[int, int]:
    """Number and size of the blocks of `NewestGroups` over a cache with these settings; 0: there is nothing to keep."""
    # The end of a cached block is also the end of one of these blocks, as is that of the first tokens.
    size = gcd(length, block_size, firsts)
    if not texts and ((length or firsts) <= 1 or not max_blocks):
        return 0, size
    num_tokens = texts * firsts if texts else max(2 * ((length or firsts) + firsts), max_blocks * block_size // _SHARE)
    return -(-num_tokens // size), size


def _length(cache: PagedKvCache) -> int:
    """Tokens of a group; the first tokens are one where there are no others."""
    return cache.residual_length or cache.first_tokens


def _rows(source: PagedKvCache, num_blocks: int, block_size: int) -> PagedKvCache:
    """A cache for the unpacked tokens of another one."""
    key_dtype, value_dtype = unpacked(source.key_dtype), unpacked(source.value_dtype)
    sizes: dict[str, Any] = {"num_heads": source.num_heads, "head_dim": source.head_dim}
    if source.latent is not None:
        sizes = {"latent": source.latent}
    return PagedKvCache(
        num_blocks, block_size, **sizes, num_layers=source.num_layers, key_dtype=key_dtype, value_dtype=value_dtype
    )


class NewestGroups:
    """Unpacked K and V of groups, found by the exact tokens of the group and of the text before it.

    Args:
        source: the cache of the sequences, with a residual or first tokens. Their groups are stored here.
        max_blocks: maximum number of blocks of the prefix cache over it; sets the room for groups, at least two.
        texts: instead of it, the number of texts whose sink tokens have room, which are then all that is kept.

    Attributes:
        cache: the blocks. A group that begins at token `first` is a text of its own in the namespace `(namespace, the
            bytes of all tokens before it)`.
    """

    def __init__(self, source: PagedKvCache, max_blocks: int = 0, *, texts: int = 0) -> None:
        self._source, self._length, self._firsts = source, _length(source), source.first_tokens
        self._keeps_groups = not texts
        shape = num_newest(source.residual_length, source.first_tokens, source.block_size, max_blocks, texts)
        self._paged = _rows(source, *shape)
        self.cache = PrefixCache.over(self._paged)

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"."""
        return total(self._paged.memory(), self.cache.memory())

    def keep(self, seq_id: int, text: Tokens, namespace: Hashable) -> None:
        """Store the sink tokens of a sequence, and the full blocks of the last group of `text`, its first tokens."""
        firsts, base, stop = self._source.unpacked_tokens(seq_id)
        size, first = self.cache.block_size, (len(text) - 1) // self._length * self._length
        if 0 < self._firsts <= len(text) and (firsts == self._firsts or not base):
            self._keep(seq_id, 0, text[: self._firsts], _name(text[:0], namespace))
        num_blocks = (min(stop, len(text)) - first) // size
        if not self._keeps_groups or first < base or num_blocks <= 0:
            return  # the first tokens of the group exist in packed form only
        group = text[first : first + num_blocks * size]
        self._keep(seq_id, firsts + first - base, group, _name(text[:first], namespace))

    def _keep(self, seq_id: int, row: int, group: Tokens, name: Hashable) -> None:
        """Store tokens of a sequence, of which the first is the unpacked one `row`."""
        num_blocks = len(group) // self.cache.block_size
        if self.cache.peek(group, name) == len(group):
            return
        self.cache.evict(num_blocks - self._paged.free_block_count)
        if self._paged.free_block_count < num_blocks:
            return  # open sessions hold the other blocks
        try:
            self._free()
            self._paged.allocate(_OWN, len(group))
            for layer in range(self._paged.num_layers):
                keys, values = self._source.read_unpacked(layer, seq_id)
                own_rows = slice(row, row + len(group))
                self._paged.write(layer, _OWN, keys[own_rows], None if self._paged.latent else values[own_rows])
            self.cache.adopt(group, self._paged.block_table([_OWN]).block_ids, name)
        finally:
            self._free()

    def recall(self, tokens: Tokens, namespace: Hashable) -> tuple[int, list[KvRows]]:
        """Find the stored start of the last group of `tokens`: how many tokens it has, and their rows in each layer."""
        first = len(tokens) - len(tokens) % self._length
        if not self._keeps_groups:
            return 0, []
        return self._recall(tokens[first:], _name(tokens[:first], namespace))

    def recall_firsts(self, tokens: Tokens, namespace: Hashable) -> list[KvRows]:
        """The rows of the first tokens of `tokens` in each layer; empty: some are missing."""
        count, rows = self._recall(tokens[: self._firsts], _name(tokens[:0], namespace))
        return rows if count == self._firsts else []

    def _recall(self, group: Tokens, name: Hashable) -> tuple[int, list[KvRows]]:
        with self.cache.open_session(group, name) as found:
            try:
                self._free()
                self._paged.adopt(_OWN, np.array(found.shared_blocks, np.int64), count := found.num_tokens)
                return count, [KvRows(*rows) for rows in self._paged.read_layers(_OWN)]
            finally:
                self._free()

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self.cache.check()
        # An interrupted call may leave the temporary sequence. A signal handler may clear the cache between two reads,
        # so no two numbers are compared here.
        assert self._paged.num_sequences <= 1, "sequences are left beside the temporary one"

    def _free(self) -> None:
        """End the temporary sequence, which an interrupted call may have left."""
        if _OWN in self._paged:
            self._paged.free(_OWN)  # inside another call it is queued, and done before the next call


def _name(before: Tokens, namespace: Hashable) -> Hashable:
    return namespace, before.tobytes()
