"""Adversarial shapes: a million equal tokens, a comb of divergences, 100,000 children of one node.

A bound that holds for random prompts must hold for these. Each case does one operation on the shape and on a
harmless trie of as many pages; the second is the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from bench.common import Candidate, Case, Table, at_most
from kvcache._trie import TokenTrie

__all__ = ["SHAPES", "tables"]

Tokens = npt.NDArray[np.uint32]
PAGE = 16


def all_equal(num_tokens: int) -> Iterator[Tokens]:
    """One prompt, every token the same, and prefixes of it."""
    tokens = np.full(num_tokens, 7, np.uint32)
    yield tokens[: num_tokens // 2]
    yield tokens


def comb(num_tokens: int) -> Iterator[Tokens]:
    """A spine that another prompt leaves after every page."""
    spine = np.random.default_rng(0).integers(0, 150_000, num_tokens, dtype=np.uint32)
    yield spine
    for page in range(1, num_tokens // PAGE):
        tooth = np.concatenate([spine[page * PAGE - PAGE : page * PAGE], np.full(PAGE, 150_001, np.uint32)])
        yield np.concatenate([spine[: page * PAGE], tooth[PAGE:]])


def fan(num_tokens: int) -> Iterator[Tokens]:
    """One page, and below it as many children as there are pages."""
    head = np.full(PAGE, 9, np.uint32)
    for child in range(num_tokens // PAGE):
        yield np.concatenate([head, np.full(PAGE, child, np.uint32)])


def harmless(num_tokens: int) -> Iterator[Tokens]:
    """Random prompts of 2,048 tokens."""
    rng = np.random.default_rng(0)
    for _ in range(max(1, num_tokens // 2048)):
        yield rng.integers(0, 150_000, min(num_tokens, 2048), dtype=np.uint32)


SHAPES: dict[str, tuple[Callable[[int], Iterator[Tokens]], int]] = {
    "a million equal tokens": (all_equal, 1_000_000 // PAGE * PAGE),
    "a comb of 2,000 divergences": (comb, 32_000),
    "100,000 children of one node": (fan, 1_600_000),
}


def fill(shape: Callable[[int], Iterator[Tokens]], num_tokens: int) -> tuple[TokenTrie, int, list[Tokens]]:
    """A trie with this shape, and some of its prompts."""
    trie = TokenTrie(PAGE)
    root = trie.add_root()
    kept = []
    for i, prompt in enumerate(shape(num_tokens)):
        trie.insert(root, prompt, np.zeros(len(prompt) // PAGE, np.int32))
        if i < 64:
            kept.append(prompt)
    return trie, root, kept


def shape_case(name: str, operation: str) -> Iterator[Candidate]:
    """The operation on the shape, per token of the prompts it is given, beside harmless ones."""
    shape, num_tokens = SHAPES[name]
    for column, make in (("the shape", shape), ("random prompts", harmless)):
        trie, root, kept = fill(make, num_tokens)
        yield Candidate(column, *_operation(operation, trie, root, kept))


def _operation(
    operation: str, trie: TokenTrie, root: int, kept: list[Tokens]
) -> tuple[Callable[[], object], int, Callable[[], object] | None]:
    longest = max(kept, key=len).copy()
    if operation == "match, per page":
        return partial(trie.lookup, root, longest), len(longest) // PAGE, None
    turn = itertools.cycle(kept)
    full = trie.num_pages

    def refill() -> None:
        for prompt in kept:
            if trie.num_pages < full:
                trie.insert(root, prompt, np.zeros(len(prompt) // PAGE, np.int32))
        trie.touch(*trie.match(root, next(turn)))

    return partial(_evict, trie, 64), 64, refill


def _evict(trie: TokenTrie, count: int) -> None:
    for _ in range(count):
        trie.evict(1)


def tables(sizes: tuple[int, ...]) -> list[Table]:
    """Every shape under match and evict."""
    cases = [
        Case(
            f"{operation}: {name}",
            partial(shape_case, name, operation),
            (at_most(bound, "the shape", "random prompts"),),
        )
        for operation, bound in (("match, per page", 4), ("evict a page", 2))
        for name in SHAPES
    ]
    return [Table("Shapes: adversarial prompts", tuple(cases))]
