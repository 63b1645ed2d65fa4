"""What was evicted not long ago: the tokens without their KV, so that a miss can say why it missed."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvcache.trie.trie import TokenTrie

__all__ = ["GhostTrie"]

Tokens = npt.NDArray[np.uint32]


class GhostTrie:
    """The last sequences evicted, of at most `max_pages` pages, by namespace."""

    def __init__(self, page_size: int, max_pages: int) -> None:
        self._trie = TokenTrie(page_size)
        self._max_pages = max_pages
        self._roots: dict[Hashable, int] = {}

    def remember(self, tokens: Tokens, namespace: Hashable) -> None:
        """Pages of `tokens`, a multiple of the page size, have left. Without memory for that, all is forgotten."""
        try:
            self._remember(tokens, namespace)
        except MemoryError:
            self._trie.empty()

    def _remember(self, tokens: Tokens, namespace: Hashable) -> None:
        if namespace not in self._roots:
            self._roots[namespace] = self._trie.add_root()
        self._trie.insert(self._roots[namespace], tokens, np.zeros(len(tokens) // self._trie.page_size, np.int32))
        self._trie.evict(max(0, len(self._trie) - self._max_pages))
        if len(self._roots) > self._max_pages + 64:
            for name, root in list(self._roots.items()):
                if self._trie.is_leaf(root):
                    self._trie.drop_empty(self._roots.pop(name))

    def mend(self) -> None:
        """After an interrupt: no more pages than allowed, no root without a name."""
        self._trie.evict(max(0, len(self._trie) - self._max_pages))
        known = set(self._trie.roots())
        self._roots = {name: root for name, root in self._roots.items() if root in known}
        for root in known.difference(self._roots.values()):
            self._trie.drop_root(root)

    def remembers(self, tokens: Tokens, namespace: Hashable) -> bool:
        """Whether all of `tokens` were cached when something of them left."""
        root = self._roots.get(namespace)
        return root is not None and self._trie.match(root, tokens)[1] == len(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the ghosts hold."""
        return self._trie.nbytes

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        self._trie.check()
        assert len(self._trie) <= self._max_pages, "ghosts: more pages than allowed"
