"""The cost of trie operations by the number of cached pages, hot and from DRAM."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bench.support.common import Candidate, Case, Table, alternating, at_most, repeat, size_name
from bench.trie.trie import FLOOR, OURS, PAGE, SHORT, VOCABULARY, Tokens, filled, floor, path_of, prompts
from kvcache.trie.trie import TokenTrie

__all__ = ["tables"]

LEAF = 256  # tokens of a prompt in the eviction of leaves
COLD = 64  # prompts in one cold sample


def _filled(num_pages: int, length: int) -> tuple[TokenTrie, int, list[Tokens]]:
    stored = prompts(max(num_pages * PAGE // length, 1), length, seed=5)
    return *filled(stored), stored


def growth_case(sizes: tuple[int, ...], make: Callable[..., Candidate], length: int) -> Iterator[Candidate]:
    """One operation on tries of several sizes, which exist at the same time."""
    for num_pages in sizes:
        yield make(size_name(num_pages), *_filled(num_pages, length))


def match(name: str, trie: TokenTrie, root: int, stored: list[Tokens]) -> Candidate:
    """Look up the same prompt repeatedly, like a prompt in use."""
    return Candidate(name, partial(trie.lookup, root, stored[0].copy()))


def miss(name: str, trie: TokenTrie, root: int, stored: list[Tokens]) -> Candidate:
    """Look up a prompt whose first token no cached prompt has."""
    return Candidate(name, partial(trie.match, root, np.full(SHORT, VOCABULARY, np.uint32)))


def insert(name: str, trie: TokenTrie, root: int, stored: list[Tokens]) -> Candidate:
    """Insert new prompts; before that the oldest are evicted, untimed, as in a full cache."""
    groups = itertools.cycle(np.array_split(np.array(prompts(4_096, SHORT, seed=7)), 256))
    values = np.arange(SHORT // PAGE, dtype=np.int32)
    fresh: list[Tokens] = []

    def make_room() -> None:
        fresh[:] = [prompt.copy() for prompt in next(groups)]
        trie.evict(len(fresh) * len(values))

    def run() -> None:
        for prompt in fresh:
            trie.insert(root, prompt, values)

    return alternating(name, make_room, run, 16)


def evict(pages: int, name: str, trie: TokenTrie, root: int, stored: list[Tokens]) -> Candidate:
    """Evict the `pages` least recently used pages; they are inserted again in the same order, untimed."""
    turn, full = itertools.cycle(stored), trie.num_pages
    values = np.arange(len(stored[0]) // PAGE, dtype=np.int32)

    def refill() -> None:
        while trie.num_pages < full:
            trie.insert(root, next(turn), values)

    return alternating(name, refill, partial(repeat, 32, trie.evict, pages), 32)


def cold_case(num_pages: int) -> Iterator[Candidate]:
    """Look up another prompt each time: with many prompts its cached copy is in DRAM, while the prompt itself is hot.

    The floor compares the same prompts with copies that are equally scattered, plus a random access per page.
    """
    trie, root, stored = _filled(num_pages, SHORT)
    copies = [prompt.copy() for prompt in stored]
    order = itertools.cycle(np.random.default_rng(6).permutation(len(stored)))
    access = floor(stored[0], PAGE)
    queries = [np.empty(SHORT, np.uint32) for _ in range(COLD)]
    asked = [0] * COLD

    def ask() -> None:
        for i, query in enumerate(queries):
            asked[i] = int(next(order))
            query[:] = stored[asked[i]]

    def look_up() -> None:
        for query in queries:
            trie.lookup(root, query)

    def compare() -> None:
        for i, query in enumerate(queries):
            access(query, copies[asked[i]])

    yield alternating(OURS, ask, look_up, COLD)
    yield alternating(FLOOR, ask, compare, COLD)


def pin_case(nodes: tuple[int, ...]) -> Iterator[Candidate]:
    """Pin the result of a match and unpin it, on paths of each number of `nodes`."""
    for num_nodes in nodes:
        (tokens,) = prompts(1, 32_768)
        trie, root = filled(path_of(tokens, num_nodes, PAGE))
        node, length = trie.match(root, tokens)
        yield Candidate(f"{num_nodes} nodes", partial(_pin, trie, node, length))


def _pin(trie: TokenTrie, node: int, length: int) -> None:
    pinned = trie.boundary(node, length)
    trie.pin(pinned)
    trie.unpin(pinned)


def tables(sizes: tuple[int, ...]) -> list[Table]:
    """All tables about growth."""
    flat = (at_most(2, size_name(sizes[-1]), size_name(sizes[0])),)
    operations: list[tuple[str, Callable[..., Candidate], int]] = [
        ("match 2k cached tokens", match, SHORT),
        ("miss at the first token", miss, SHORT),
        ("insert 2k tokens, into memory long unused", insert, SHORT),
        ("evict a page", partial(evict, 1), SHORT),
        (f"evict a prompt of {LEAF}", partial(evict, LEAF // PAGE), LEAF),
    ]
    growth = [Case(what, partial(growth_case, sizes, make, length), flat) for what, make, length in operations]
    cold = [Case(f"{size_name(n)} pages", partial(cold_case, n), (at_most(4, OURS, FLOOR),)) for n in sizes]
    nodes = (1, 16, 2_048)
    pin = Case("boundary, pin, unpin", partial(pin_case, nodes), (at_most(2, "2048 nodes", "1 nodes"),))
    return [
        Table("Trie: growth with cached pages of 16 tokens", tuple(growth), growth=True),
        Table("Trie: match of 2k tokens, another prompt each time, by cached pages", tuple(cold)),
        Table("Trie: pin and unpin, by nodes on the path", (pin,), growth=True),
    ]
