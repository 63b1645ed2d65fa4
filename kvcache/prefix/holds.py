"""Holds: what requests keep of a prefix cache while they run, as pins in its trie and references in its pool."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.core.pool import BlockPool
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.trie.trie import TokenTrie

__all__ = ["Holds"]

Int32 = npt.NDArray[np.int32]


class _Hold(NamedTuple):
    trie: TokenTrie  # the one that was pinned; a cache that is cleared starts another
    node: int  # pinned; -1: none
    blocks: Int32  # counted
    every: Int32  # referenced: these, and the tail block where there is one
    by_lookup: bool  # until released by name; else until its owner dies


class Holds:
    """Holds by key. The pin keeps the blocks in the trie, the references keep what is in them, whatever happens.

    Attributes:
        counts: holds on each block, int32 `(num_blocks,)`.
        looked_up: block -> the holds that lookups left on it, for whoever releases it by name.
        ended: keys of holds that were dropped; garbage collection may add to it at any time.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._open: dict[int, _Hold] = {}
        self._last = 0
        self.looked_up: dict[int, list[int]] = {}
        self.counts = np.zeros(pool.num_blocks, np.int32)
        self.ended: deque[int] = deque()

    def new_key(self) -> int:
        """A key for `take`. Who dies with it lets go of what was taken, if it was: so have it before you take."""
        self._last += 1
        return self._last

    def take(
        self, key: int, trie: TokenTrie, node: int, blocks: Int32, tail_block: int = -1, *, by_lookup: bool = False
    ) -> None:
        """Hold `blocks`, which end with `node`, and `tail_block`.

        Raises:
            MemoryError: nothing has changed then.
        """
        every = blocks if tail_block < 0 else np.append(blocks, np.int32(tail_block))
        counts = self.counts[blocks] + 1  # a block stands once among those of one prompt
        self._open[key] = _Hold(trie, node, blocks, every, by_lookup)
        try:
            self._pool.retain(every)
        except Exception:
            del self._open[key]
            raise
        if node >= 0:
            trie.pin(node)
        self.counts[blocks] = counts

    def end(self, key: int) -> None:
        """Let go; nothing happens the second time."""
        hold = self._open.get(key)
        if hold is None:
            return
        self._pool.release(hold.every)
        del self._open[key]
        if hold.node >= 0:
            hold.trie.unpin(hold.node)
        try:
            self.counts[hold.blocks] = self.counts[hold.blocks] - 1
        except OutOfMemoryError:  # of a signal handler: this call fails
            raise
        except MemoryError:  # whoever lets go because memory is short must be able to
            counts = self.counts.data
            for block in hold.blocks.data:
                counts[block] -= 1

    def keep(self, held: dict[int, int]) -> None:
        """What a lookup has taken, block -> key, stays from now on until `end_lookup`."""
        self.looked_up |= {block: [*self.looked_up.get(block, ()), key] for block, key in held.items()}

    def end_lookup(self, block: int) -> None:
        """Let go of what a lookup took of a block; InvalidOperationError if none holds it."""
        keys = self.looked_up.get(block)
        if not keys:
            raise InvalidOperationError(f"expected a block that a lookup holds, got {block}")
        self.end(keys[-1])
        keys.pop()
        if not keys:
            del self.looked_up[block]

    def settle(self) -> None:
        """End what was dropped."""
        while self.ended:
            self.end(self.ended[0])
            self.ended.popleft()

    def mend(self, trie: TokenTrie) -> None:
        """What is open is held, and nothing else; of the holds of lookups, those that `keep` knows are open."""
        kept = {block: [key for key in keys if key in self._open] for block, keys in self.looked_up.items()}
        self.looked_up = {block: keys for block, keys in kept.items() if keys}
        known = {key for keys in self.looked_up.values() for key in keys}
        for key in [key for key, hold in self._open.items() if hold.by_lookup and key not in known]:
            del self._open[key]
        holds = self._open.values()
        counted = np.concatenate([np.empty(0, np.int32), *(hold.blocks for hold in holds)])
        trie.repin([hold.node for hold in holds if hold.trie is trie and hold.node >= 0])
        self.counts = np.bincount(counted, minlength=len(self.counts)).astype(np.int32)

    def blocks(self) -> Int32:
        """Every reference held, as block ids, int32."""
        return np.concatenate([np.empty(0, np.int32), *(hold.every for hold in self._open.values())])
