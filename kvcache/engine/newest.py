"""Unpacked copies of the groups in which cached texts end, so that a request can continue inside a group.

A query reads the tokens of its own group unpacked (residual.py), but a cached prefix has only packed tokens. Without a
copy, the tokens of the last group would run through the network again. Copies exist of the groups in which prompts and
answers end, and of the groups in which two texts diverge. The least recently used copies are evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvcache.core.memory import total
from kvcache.engine.firsts import FirstTokens
from kvcache.engine.residual import Residual
from kvcache.errors import SequenceNotFoundError
from kvcache.networks.protocols import Float32
from kvcache.prefix.blocks import PrefixCache

__all__ = ["NewestGroups"]

# Cached tokens per unpacked token: a ninth more memory in q4 (16 bits over 32 times 4.5), a fifth in q2.
_SHARE = 32
Tokens = NDArray[np.uint32]


def _shape(residual: Residual | FirstTokens, block_size: int, max_blocks: int) -> tuple[int, int]:
    """Number and size of the blocks of `NewestGroups`."""
    # The end of a cached block is also the end of one of these blocks, as is that of the first tokens.
    size = gcd(residual.length, block_size, residual.firsts)
    num_tokens = max(2 * (residual.length + residual.firsts), max_blocks * block_size // _SHARE)
    return -(-num_tokens // size), size


class NewestGroups:
    """Unpacked K and V of groups, found by the exact tokens of the group and of the text before it.

    Args:
        residual: the source of K and V.
        block_size: tokens per block of the prefix cache.
        max_blocks: maximum number of blocks of the prefix cache; sets the room for groups, at least two.

    Attributes:
        cache: the blocks. A group that begins at token `first` is a text of its own in the namespace `(namespace, the
            bytes of all tokens before it)`.
    """

    def __init__(self, residual: Residual | FirstTokens, block_size: int, max_blocks: int) -> None:
        self._residual = residual
        self._paged = residual.empty_cache(*_shape(residual, block_size, max_blocks))
        self.cache = PrefixCache.over(self._paged)

    @staticmethod
    def kv_bytes(residual: Residual | FirstTokens, block_size: int, max_blocks: int) -> int:
        """Bytes of K and V of an object with these arguments."""
        num_blocks, size = _shape(residual, block_size, max_blocks)
        return num_blocks * residual.empty_cache(0, size).block_memory_bytes

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"."""
        return total(self._paged.memory(), self.cache.memory())

    def keep(self, text: Tokens, namespace: Hashable) -> None:
        """Store the full blocks of the residual's group, the last of `text`, and its first tokens, if there is room."""
        residual, size = self._residual, self.cache.block_size
        first, num_blocks = residual.first, len(residual.read(0)[0]) // size
        if first and residual.firsts and len(residual.read_firsts(0)[0]):
            self._keep(text[: residual.firsts], _name(text[:0], namespace), residual.read_firsts)
        if first % residual.length or not num_blocks:
            return  # the first tokens of the group exist in packed form only
        self._keep(text[first : first + num_blocks * size], _name(text[:first], namespace), residual.read)

    def _keep(self, group: Tokens, name: Hashable, read: Callable[[int], tuple[Float32, Float32]]) -> None:
        num_blocks = len(group) // self.cache.block_size
        with self.cache.open_session(group, name) as found:
            if found.matched_prefix_len == len(group):
                return
        self.cache.evict(num_blocks - self._paged.free_block_count)
        if self._paged.free_block_count < num_blocks:
            return  # open sessions hold the other blocks
        with self._sequence() as seq_id:
            self._paged.allocate(seq_id, len(group))
            for layer in range(self._paged.num_layers):
                keys, values = read(layer)
                self._paged.write(layer, seq_id, keys[: len(group)], values[: len(group)])
            self.cache.adopt(group, self._paged.block_table([seq_id]).block_ids, name)

    def recall(self, tokens: Tokens, namespace: Hashable) -> tuple[int, list[tuple[Float32, Float32]]]:
        """Find the stored start of the last group of `tokens`: `(count, rows)`, its tokens and their K and V.

        `rows` has K and V `(count, num_kv_heads, head_dim)` for each layer.
        """
        first = len(tokens) - len(tokens) % self._residual.length
        return self._recall(tokens[first:], _name(tokens[:first], namespace))

    def recall_firsts(self, tokens: Tokens, namespace: Hashable) -> list[tuple[Float32, Float32]]:
        """K and V of the first tokens of `tokens` for each layer, as `recall` returns them; empty: some are missing."""
        count, rows = self._recall(tokens[: self._residual.firsts], _name(tokens[:0], namespace))
        return rows if count == self._residual.firsts else []

    def _recall(self, group: Tokens, name: Hashable) -> tuple[int, list[tuple[Float32, Float32]]]:
        with self.cache.open_session(group, name) as found, self._sequence() as seq_id:
            self._paged.adopt(seq_id, found.shared_blocks, found.num_tokens)
            return found.num_tokens, [self._paged.read(layer, seq_id) for layer in range(self._paged.num_layers)]

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self.cache.check()
        assert self._paged.used_block_count == len(self.cache), "blocks are in use that no group names"

    @contextmanager
    def _sequence(self) -> Iterator[int]:
        """The id of a temporary sequence; frees one that an interrupted call left behind."""
        try:
            self._free()
            yield 0
        finally:
            self._free()

    def _free(self) -> None:
        with suppress(SequenceNotFoundError):
            self._paged.free(0)  # inside another call it is queued, and done before the next call


def _name(before: Tokens, namespace: Hashable) -> Hashable:
    return namespace, before.tobytes()
