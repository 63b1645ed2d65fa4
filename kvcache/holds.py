"""Holds: what requests keep of a prefix cache while they run, as pins in its trie and references in its pool."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache._pool import BlockPool
from kvcache._trie import TokenTrie

__all__ = ["Holds"]

Int32 = npt.NDArray[np.int32]


class _Hold(NamedTuple):
    trie: TokenTrie  # the one that was pinned; a cache that is cleared starts another
    node: int  # pinned; -1: none
    blocks: Int32  # counted
    every: Int32  # referenced: these, and the tail block where there is one


class Holds:
    """Holds by key. The pin keeps the blocks in the trie, the references keep what is in them, whatever happens.

    Attributes:
        counts: holds on each block, int32 `(num_blocks,)`.
        ended: keys of holds that were dropped; garbage collection may add to it at any time.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._open: dict[int, _Hold] = {}
        self._last = 0
        self.counts = np.zeros(pool.num_blocks, np.int32)
        self.ended: deque[int] = deque()

    def take(self, trie: TokenTrie, node: int, blocks: Int32, tail_block: int = -1) -> int:
        """Hold `blocks`, which end with `node`, and `tail_block`; returns the key.

        Raises:
            MemoryError: nothing has changed then.
        """
        every = blocks if tail_block < 0 else np.append(blocks, np.int32(tail_block))
        counts = self.counts[blocks] + 1  # a block stands once among those of one prompt
        key = self._last + 1
        self._open[key] = _Hold(trie, node, blocks, every)
        try:
            self._pool.retain(every)
        except BaseException:
            del self._open[key]
            raise
        if node >= 0:
            trie.pin(node)
        self.counts[blocks] = counts
        self._last = key
        return key

    def end(self, key: int) -> None:
        """Let go; nothing happens the second time."""
        hold = self._open.get(key)
        if hold is None:
            return
        counts = self.counts[hold.blocks] - 1
        self._pool.release(hold.every)
        del self._open[key]
        if hold.node >= 0:
            hold.trie.unpin(hold.node)
        self.counts[hold.blocks] = counts

    def settle(self) -> None:
        """End what was dropped."""
        while self.ended:
            self.end(self.ended[0])
            self.ended.popleft()

    def blocks(self) -> Int32:
        """Every reference held, as block ids, int32."""
        return np.concatenate([np.empty(0, np.int32), *(hold.every for hold in self._open.values())])
