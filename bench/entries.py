"""Whole entries in the trie, as `PrefixKvCache` keeps them: eviction one entry at a time, over their number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np

from bench.common import Candidate, Case, Table, at_most
from kvcache._entries import EntryTrie

__all__ = ["tables"]

LENGTH = 64  # tokens of an entry


def evict_case(sizes: tuple[int, ...]) -> Iterator[Candidate]:
    """Evict the least recently used entry; as many new ones in between, untimed."""
    for size in sizes:
        rng = np.random.default_rng(0)
        trie = EntryTrie()
        root = trie.add_root()
        values = np.arange(LENGTH, dtype=np.int32)
        turn = itertools.cycle(rng.integers(0, 150_000, (4096, LENGTH), dtype=np.uint32))

        def refill(trie: EntryTrie = trie, root: int = root, turn: Iterator = turn, size: int = size) -> None:  # type: ignore[type-arg]
            while len(trie) < size:
                tokens = next(turn)
                tokens[0] = (tokens[0] + 4096) % 2**31
                node, _ = trie.insert(root, tokens, values)  # noqa: B023  (the same in every round)
                trie.mark(node)

        refill()
        name = f"{size // 1000}k" if size < 1_000_000 else f"{size // 1_000_000}M"
        yield Candidate(name, partial(_evict, trie, 32), 32, refill)


def _evict(trie: EntryTrie, count: int) -> None:
    for _ in range(count):
        trie.evict_entry()


def tables(sizes: tuple[int, ...]) -> list[Table]:
    """Everything about entries."""
    sizes = tuple(size for size in sizes if size <= 100_000)
    low, high = (f"{n // 1000}k" for n in (sizes[0], sizes[-1]))
    case = Case("evict an entry", partial(evict_case, sizes), (at_most(2, high, low),))
    return [Table("Entries: evict, by entries of 64 tokens cached", (case,), growth=True)]
