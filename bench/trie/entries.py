"""Whole entries in the trie, as `PrefixKvCache` stores them: eviction of one entry, by the number of entries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np

from bench.support.common import Candidate, Case, Table, at_most, repeat, size_name
from kvcache.trie.entries import EntryTrie

__all__ = ["tables"]

LENGTH = 64  # tokens of an entry


def evict_case(sizes: tuple[int, ...]) -> Iterator[Candidate]:
    """Evict the least recently used entry; new entries replace the evicted ones, untimed."""
    for size in sizes:
        trie = EntryTrie()
        refill = partial(_refill, trie, trie.add_root(), size, itertools.count())
        refill()
        yield Candidate(size_name(size), partial(repeat, 32, trie.evict_entry), 32, refill)


def _refill(trie: EntryTrie, root: int, size: int, numbers: Iterator[int]) -> None:
    values = np.arange(LENGTH, dtype=np.int32)
    while trie.num_entries < size:
        node, _ = trie.insert(root, np.arange(LENGTH, dtype=np.uint32) + next(numbers), values)
        trie.mark(node)


def tables(sizes: tuple[int, ...]) -> list[Table]:
    """All tables about entries."""
    sizes = tuple(size for size in sizes if size <= 100_000)
    flat = at_most(2, size_name(sizes[-1]), size_name(sizes[0]))
    case = Case("evict an entry", partial(evict_case, sizes), (flat,))
    return [Table("Entries: evict, by entries of 64 tokens cached", (case,), growth=True)]
