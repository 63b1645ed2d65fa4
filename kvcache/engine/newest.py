"""Newest groups of texts in full, so that a cached prefix that ends inside of one goes on from there.

A query sees the tokens of its own group in full (residual.py), and a cached prefix has them packed alone: without what
is kept here they would have to run again, from the first token of the group on. Kept are the groups in which prompts
and answers end, and those in which texts part; when there are too many, those go that were used longest ago.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvcache.engine.protocols import Float32
from kvcache.engine.residual import Residual
from kvcache.errors import SequenceNotFoundError
from kvcache.prefix.blocks import PrefixCache

__all__ = ["NewestGroups"]

# One token in full for so many in the prefix cache: a ninth more memory in q4 (16 bits over 32 of 4.5), a fifth in q2.
_SHARE = 32
Tokens = NDArray[np.uint32]


class NewestGroups:
    """K and V of groups as a `Residual` has them, by the exact tokens that lead to them and that they are of.

    Args:
        residual: where they come from.
        block_size: of the blocks that prefixes are cached in.
        max_blocks: how many there can be of these; room for groups, at least for two, goes by that.

    Attributes:
        cache: the blocks. A group that begins at token `first` is a text of its own in the namespace `(namespace, the
            bytes of all tokens before it)`.
    """

    def __init__(self, residual: Residual, block_size: int, max_blocks: int) -> None:
        self._residual = residual
        size = gcd(residual.length, block_size)  # where a cached block ends, one of a group does
        num_tokens = max(2 * residual.length, max_blocks * block_size // _SHARE)
        self._paged = residual.empty_cache(-(-num_tokens // size), size)
        self.cache = PrefixCache.over(self._paged)

    def keep(self, text: Tokens, namespace: Hashable) -> None:
        """Keep what the residual has of the group that `text` ends in, as far as it fills blocks and there is room."""
        residual, size = self._residual, self.cache.block_size
        first, num_blocks = residual.first, (residual.stop - residual.first) // size
        if first % residual.length or not num_blocks:
            return  # the group's first tokens were packed before it could see them
        group, name = text[first : first + num_blocks * size], _name(text[:first], namespace)
        with self.cache.open_session(group, name) as found:
            if found.matched_prefix_len == len(group):
                return
        self.cache.evict(num_blocks - self._paged.free_block_count)
        if self._paged.free_block_count < num_blocks:
            return  # somebody holds the others
        with self._sequence() as seq_id:
            self._paged.allocate(seq_id, len(group))
            for layer in range(self._paged.num_layers):
                keys, values = residual.read(layer)
                self._paged.write(layer, seq_id, keys[: len(group)], values[: len(group)])
            self.cache.adopt(group, self._paged.block_table([seq_id]).block_ids, name)

    def recall(self, tokens: Tokens, namespace: Hashable) -> tuple[int, list[tuple[Float32, Float32]]]:
        """`(count, rows)`: how many tokens of the group that `tokens` end in are here, and K and V of these.

        Per layer `(count, num_kv_heads, head_dim)` each.
        """
        first = len(tokens) - len(tokens) % self._residual.length
        group, name = tokens[first:], _name(tokens[:first], namespace)
        with self.cache.open_session(group, name) as found, self._sequence() as seq_id:
            self._paged.adopt(seq_id, found.shared_blocks, found.num_tokens)
            return found.num_tokens, [self._paged.read(layer, seq_id) for layer in range(self._paged.num_layers)]

    def check(self) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self.cache.check()
        assert self._paged.used_block_count == len(self.cache), "blocks are in use that no group names"

    @contextmanager
    def _sequence(self) -> Iterator[int]:
        """The id of a sequence for the time being; one that an interrupt has left goes."""
        try:
            self._free()
            yield 0
        finally:
            self._free()

    def _free(self) -> None:
        with suppress(SequenceNotFoundError):
            self._paged.free(0)  # a release: if it cannot be done now, it is before the next call


def _name(before: Tokens, namespace: Hashable) -> Hashable:
    return namespace, before.tobytes()
