"""Adversarial shapes: a million equal tokens, a comb of divergences, 100,000 children of one node.

The bounds of ordinary prompts must hold for these shapes. A match is compared with memcmp and an access per page, an
insert with the match of the same tokens, an eviction with the same shape at a tenth of the size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bench.support.common import Candidate, Case, Table, alternating, at_most, repeat
from bench.trie.trie import FLOOR, OURS, PAGE, VOCABULARY, Tokens, floor
from bench.trie.trie import SHORT as SUFFIX
from kvcache.trie.trie import TokenTrie

__all__ = ["SHAPES", "tables"]

COUNT = 64  # operations in one sample


def all_equal(num_tokens: int) -> Iterator[Tokens]:
    """Prompts that repeat one token, in lengths of 1000, 999, ... thousandths of `num_tokens`."""
    tokens = np.full(num_tokens, 7, np.uint32)
    for part in range(1000, 0, -1):
        yield tokens[: num_tokens * part // 1000 // PAGE * PAGE]


def comb(num_tokens: int) -> Iterator[Tokens]:
    """A spine, and after every page a prompt that diverges from it."""
    spine = np.random.default_rng(0).integers(0, VOCABULARY, num_tokens, dtype=np.uint32)
    yield spine
    for depth in range(PAGE, num_tokens, PAGE):
        yield np.concatenate([spine[:depth], np.full(PAGE, VOCABULARY + 1, np.uint32)])


def fan(num_tokens: int) -> Iterator[Tokens]:
    """One page with as many children as there are pages."""
    for child in range(num_tokens // PAGE):
        yield np.repeat(np.array([9, child], np.uint32), PAGE)


# name -> (prompts of a shape, its size in tokens)
SHAPES: dict[str, tuple[Callable[[int], Iterator[Tokens]], int]] = {
    "a million equal tokens": (all_equal, 1_000_000 // PAGE * PAGE),
    "a comb of 2,000 divergences": (comb, 32_000),
    "100,000 children of one node": (fan, 1_600_000),
}


def filled(name: str, share: float = 1) -> tuple[TokenTrie, int, list[Tokens]]:
    """A trie of this shape at a share of its size, its root, and its first prompts."""
    shape, num_tokens = SHAPES[name]
    trie = TokenTrie(PAGE)
    root = trie.add_root()
    first = []
    for prompt in shape(int(num_tokens * share) // PAGE * PAGE):
        trie.insert(root, prompt, np.zeros(len(prompt) // PAGE, np.int32))
        if len(first) < COUNT:
            first.append(prompt.copy())
    return trie, root, first


def match_case(name: str) -> Iterator[Candidate]:
    """Match the longest prompt of the shape."""
    trie, root, first = filled(name)
    yield Candidate(OURS, partial(trie.match, root, first[0].copy()))
    yield Candidate(FLOOR, partial(floor(first[0], PAGE), first[0].copy(), first[0].copy()))


def insert_case(name: str) -> Iterator[Candidate]:
    """Insert the longest prompt with suffixes of 2k tokens, which are removed again; and match as many tokens."""
    trie, root, first = filled(name)
    suffixes = np.full((16, SUFFIX), VOCABULARY + 2, np.uint32) + np.arange(16, dtype=np.uint32)[:, None]
    longer = [np.concatenate([first[0], suffix]) for suffix in suffixes]
    values = np.zeros(len(longer[0]) // PAGE, np.int32)

    def remove() -> None:
        for prompt in longer:
            trie.remove(root, prompt)

    def insert() -> None:
        for prompt in longer:
            trie.insert(root, prompt, values)

    yield alternating(OURS, remove, insert, len(longer))
    yield Candidate("its match", lambda: [trie.lookup(root, prompt) for prompt in longer], len(longer))


def evict_case(name: str) -> Iterator[Candidate]:
    """Evict a page; evicted pages are inserted again, untimed, and every prompt is used in turn."""
    for column, share in (("a tenth of the size", 0.1), ("full size", 1)):
        trie, root, first = filled(name, share)
        refill = partial(_refill, trie, root, first, trie.num_pages)
        yield alternating(column, refill, partial(repeat, COUNT, trie.evict, 1), COUNT)


def _refill(trie: TokenTrie, root: int, first: list[Tokens], full: int) -> None:
    for prompt in itertools.chain(first, first):
        if trie.num_pages < full:
            trie.insert(root, prompt, np.zeros(len(prompt) // PAGE, np.int32))
        trie.touch(*trie.match(root, prompt))


def tables(sizes: tuple[int, ...]) -> list[Table]:
    """A table of all shapes for match, insert and evict."""
    bounds = {
        "match": (match_case, at_most(4, OURS, FLOOR)),
        "insert": (insert_case, at_most(3, OURS, "its match")),
        "evict a page": (evict_case, at_most(2, "full size", "a tenth of the size")),
    }
    return [
        Table(f"Shapes: {verb}", tuple(Case(name, partial(case, name), (claim,)) for name in SHAPES))
        for verb, (case, claim) in bounds.items()
    ]
