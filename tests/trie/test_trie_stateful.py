"""The token trie against its naive twin, over random and over long histories."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from oracles.trie import NaiveTrie, Tokens

from kvcache.trie.trie import TokenTrie

# Two letters and few pages, so that sequences share prefixes and fork inside pages, and evictions reach forks.
TEXT = st.lists(st.integers(0, 1), max_size=13).map(tuple)


class TrieMachine(RuleBasedStateMachine):
    page_size = 1
    pinned = Bundle("pinned")

    def __init__(self) -> None:
        super().__init__()
        self.trie = TokenTrie(self.page_size)
        self.naive = NaiveTrie(self.page_size)
        self.next_value = 0
        for _ in range(2):
            self.add_root()

    def root(self, choice: int) -> int:
        roots = sorted(self.naive.roots)
        return roots[choice % len(roots)]

    @precondition(lambda self: len(self.naive.roots) < 3)
    @rule()
    def add_root(self) -> None:
        root = self.trie.add_root()
        assert root not in self.naive.roots
        self.naive.roots[root] = {}

    @rule(choice=st.integers(0, 2), text=TEXT)
    def insert(self, choice: int, text: Tokens) -> None:
        root = self.root(choice)
        tokens = text[: len(text) // self.page_size * self.page_size]
        values = list(range(self.next_value, self.next_value + len(tokens) // self.page_size))
        self.next_value += len(values)
        node, existing = self.trie.insert(root, tokens, values)
        assert existing == self.naive.insert(root, tokens, values)
        assert self.end_of(node) == (root, tokens)

    def end_of(self, node: int) -> tuple[int, Tokens]:
        root, tokens, _ = self.trie.path(node)
        return root, tuple(tokens.tolist())

    @rule(choice=st.integers(0, 2), text=TEXT)
    def match(self, choice: int, text: Tokens) -> None:
        root = self.root(choice)
        node, length = self.trie.match(root, text)
        assert length == self.naive.match(root, text)
        assert self.end_of(node)[1][:length] == text[:length]
        again, same, values, partial = self.trie.lookup(root, text)
        assert (again, same) == (node, length)
        assert values.tolist() == self.naive.values(root, text)
        assert partial in self.naive.donors(root, text)

    @rule(choice=st.integers(0, 2), text=TEXT)
    def touch_match(self, choice: int, text: Tokens) -> None:
        root = self.root(choice)
        node, length = self.trie.match(root, text)
        full = length // self.page_size * self.page_size
        assert self.end_of(self.trie.touch(node, length)) == (root, text[:full])
        self.naive.touch(root, text[:length])

    @rule(target=pinned, choice=st.integers(0, 2), text=TEXT)
    def pin_match(self, choice: int, text: Tokens) -> tuple[int, int, Tokens]:
        node, length = self.trie.match(self.root(choice), text)
        node = self.trie.boundary(node, length)
        root, tokens = self.end_of(node)
        assert tokens == text[: length // self.page_size * self.page_size]
        self.trie.pin(node)
        self.naive.pins.append((root, tokens))
        return node, root, tokens

    @rule(choice=st.integers(0, 2), text=TEXT)
    def touch_node(self, choice: int, text: Tokens) -> None:
        node, _ = self.trie.match(self.root(choice), text)
        self.trie.touch(node)
        self.naive.touch(*self.end_of(node))

    @rule(target=pinned, choice=st.integers(0, 2), text=TEXT)
    def pin(self, choice: int, text: Tokens) -> tuple[int, int, Tokens]:
        node, _ = self.trie.match(self.root(choice), text)
        root, tokens = self.end_of(node)
        self.trie.pin(node)
        self.naive.pins.append((root, tokens))
        return node, root, tokens

    @rule(pin=consumes(pinned))
    def unpin(self, pin: tuple[int, int, Tokens]) -> None:
        node, root, tokens = pin
        assert self.end_of(node) == (root, tokens)
        self.trie.unpin(node)
        self.naive.pins.remove((root, tokens))

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        assert self.trie.evict(count).tolist() == self.naive.evict(count)

    @rule(choice=st.integers(0, 2), text=TEXT)
    def remove(self, choice: int, text: Tokens) -> None:
        root = self.root(choice)
        node, _ = self.trie.match(root, text)
        _, tokens = self.end_of(node)  # mostly a whole cached sequence, which can be removed
        assert self.trie.remove(root, tokens).tolist() == self.naive.remove(root, tokens)

    @invariant()
    def same(self) -> None:
        self.trie.check()
        assert self.trie.roots() == sorted(self.naive.roots)
        assert self.trie.num_pages == len(self.trie) == sum(map(len, self.naive.roots.values()))
        for root, pages in self.naive.roots.items():
            assert sorted(self.trie.all_values(root).tolist()) == sorted(value for value, _ in pages.values())
            for page, (value, _) in pages.items():
                assert self.trie.match(root, page)[1] == len(page)
                assert self.trie.lookup(root, page)[2][-1] == value


def machine(page_size: int, examples: int) -> Any:
    case: Any = type(f"TrieMachine{page_size}", (TrieMachine,), {"page_size": page_size})
    case = case.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    return case


TestPagesOfOne = machine(1, 100)
TestPagesOfTwo = machine(2, 100)
TestPagesOfThree = machine(3, 100)
TestPagesOfFour = machine(4, 100)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_long_random_history(page_size: int) -> None:
    """Longer sequences than those of the state machine, in a cache of bounded size."""
    draw = random.Random(page_size)
    trie, naive = TokenTrie(page_size), NaiveTrie(page_size)
    root = trie.add_root()
    naive.roots[root] = {}
    stems = [[draw.randrange(3) for _ in range(60)] for _ in range(5)]
    for step in range(80 if page_size == 1 else 300):
        stem = draw.choice(stems)
        text = stem[: draw.randrange(61)] + [draw.randrange(3) for _ in range(draw.randrange(12))]
        tokens = tuple(text[: len(text) // page_size * page_size])
        values = [step * 100 + i for i in range(len(tokens) // page_size)]
        assert trie.insert(root, tokens, values)[1] == naive.insert(root, tokens, values)
        surplus = trie.num_pages - 120 // page_size
        if surplus > 0:
            assert trie.evict(surplus).tolist() == naive.evict(surplus)
        assert trie.lookup(root, text)[2].tolist() == naive.values(root, tuple(text))
        trie.check()


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_long_random_history_with_pins(page_size: int) -> None:
    """Pinned forks inside pages, while everything else is evicted."""
    draw = random.Random(page_size)
    trie, naive = TokenTrie(page_size), NaiveTrie(page_size)
    root = trie.add_root()
    naive.roots[root] = {}
    pins: list[tuple[int, Tokens]] = []
    for step in range(3000):
        text = tuple(draw.randrange(2) for _ in range(draw.randrange(3 * page_size + 1)))
        action = draw.random()
        if action < 0.4:
            tokens = text[: len(text) // page_size * page_size]
            values = [step * 10 + i for i in range(len(tokens) // page_size)]
            assert trie.insert(root, tokens, values)[1] == naive.insert(root, tokens, values)
        elif action < 0.6 and len(pins) < 3:
            node, _ = trie.match(root, text)
            pins.append((node, tuple(trie.path(node)[1].tolist())))
            naive.pins.append((root, pins[-1][1]))
            trie.pin(node)
        elif action < 0.75 and pins:
            node, tokens = pins.pop(draw.randrange(len(pins)))
            trie.unpin(node)
            naive.pins.remove((root, tokens))
        elif action < 0.9:
            count = draw.randrange(9)
            assert trie.evict(count).tolist() == naive.evict(count)
        else:
            node, _ = trie.match(root, text)
            tokens = tuple(trie.path(node)[1].tolist())
            assert trie.remove(root, tokens).tolist() == naive.remove(root, tokens)
        assert trie.match(root, text)[1] == naive.match(root, text)
        assert trie.lookup(root, text)[3] in naive.donors(root, text)
        trie.check()
