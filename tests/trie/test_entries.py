"""The trie with entries against a set of whole keys."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from oracles.trie import NaiveEntries, Tokens

from kvcache.trie.entries import EntryTrie

KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)


class EntryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.trie = EntryTrie()
        self.naive = NaiveEntries()
        self.next_value = 0
        for _ in range(2):
            self.naive.entries[self.trie.add_root()] = set()

    @rule(root=st.integers(0, 1), key=KEYS)
    def store(self, root: int, key: Tokens) -> None:
        values = list(range(self.next_value, self.next_value + len(key)))
        self.next_value += len(key)
        new = key not in self.naive.entries[root]
        node, existing = self.trie.insert(root, key, values)
        assert existing == self.naive.insert(root, key, values)
        assert self.trie.mark(node) == new
        assert self.trie.is_marked(node)

    @rule(root=st.integers(0, 1), key=KEYS)
    def find(self, root: int, key: Tokens) -> None:
        node, length = self.trie.match(root, key)
        assert length == self.naive.match(root, key)
        assert self.trie.entry_at(node, length)[1] == self.naive.stored_prefix(root, key)
        if length:
            self.trie.touch_entry(node)
            self.naive.use(root, self.naive.serving(root, key[:length]))

    @rule()
    def evict(self) -> None:
        freed = self.trie.evict_entry()
        assert (None if freed is None else freed[1].tolist()) == self.naive.evict()

    @rule(root=st.integers(0, 1), key=KEYS)
    def remove(self, root: int, key: Tokens) -> None:
        node, length = self.trie.match(root, key)
        key = key[: self.trie.entry_at(node, length)[1]]  # mostly an entry, which can be removed
        expected = self.naive.forget(root, key) if key else []
        assert self.trie.remove(root, key).tolist() == expected

    @invariant()
    def same(self) -> None:
        self.trie.check()
        assert self.trie.num_entries == sum(map(len, self.naive.entries.values()))
        assert self.trie.num_tokens == self.trie.num_pages == sum(len(self.naive.alive(root)) for root in (0, 1))
        for (root, prefix), value in self.naive.values.items():
            assert self.trie.lookup(root, prefix)[2][-1] == value


TestEntries = EntryMachine.TestCase
TestEntries.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def store(trie: EntryTrie, root: int, key: list[int], first_value: int = 0) -> None:
    node, _ = trie.insert(root, key, range(first_value, first_value + len(key)))
    trie.mark(node)


def evict(trie: EntryTrie) -> list[int]:
    freed = trie.evict_entry()
    assert freed is not None
    return freed[1].tolist()


def test_entries_leave_before_what_they_are_built_on() -> None:
    trie = EntryTrie()
    root = trie.add_root()
    store(trie, root, [1, 2, 3, 4])
    store(trie, root, [1, 2], 10)
    store(trie, root, [1, 2, 5], 20)
    freed = [trie.evict_entry() for _ in range(4)]
    assert [None if f is None else f[1].tolist() for f in freed] == [[3, 2], [22], [1, 0], None]


def test_using_a_shared_prefix_keeps_an_entry_that_holds_it() -> None:
    trie = EntryTrie()
    root = trie.add_root()
    store(trie, root, [1, 2, 3], 0)
    store(trie, root, [1, 2, 4], 10)
    store(trie, root, [9], 20)
    node, length = trie.match(root, [1, 2, 7])
    assert length == 2
    trie.touch_entry(node)
    assert evict(trie) == [2]
    assert evict(trie) == [20]
    assert trie.match(root, [1, 2, 4])[1] == 3


def test_removing_an_inner_entry_frees_nothing() -> None:
    trie = EntryTrie()
    root = trie.add_root()
    store(trie, root, [1, 2, 3])
    store(trie, root, [1, 2])
    assert trie.remove(root, [1, 2]).tolist() == []
    assert trie.num_entries == 1
    assert trie.remove(root, [1, 2, 3]).tolist() == [2, 1, 0]
    assert trie.num_nodes == 1


def test_pages_are_single_tokens() -> None:
    with pytest.raises(ValueError, match="page_size: expected 1, got"):
        EntryTrie(4)
    trie = EntryTrie()
    with pytest.raises(ValueError, match="node: expected one with tokens"):
        trie.mark(trie.add_root())


def test_long_random_history() -> None:
    draw = random.Random(1)
    trie, naive = EntryTrie(), NaiveEntries()
    root = trie.add_root()
    naive.entries[root] = set()
    stems = [tuple(draw.randrange(3) for _ in range(30)) for _ in range(4)]
    for step in range(200):
        key = draw.choice(stems)[: draw.randrange(1, 31)] + tuple(draw.randrange(3) for _ in range(draw.randrange(5)))
        values = [step * 100 + i for i in range(len(key))]
        node, existing = trie.insert(root, key, values)
        assert existing == naive.insert(root, key, values)
        trie.mark(node)
        while trie.num_entries > 12:
            freed = trie.evict_entry()
            assert freed is not None
            assert freed[1].tolist() == naive.evict()
        trie.check()
