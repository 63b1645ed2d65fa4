"""The token trie against a dict of whole prefixes: matches, values, eviction order, pins, shapes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from oracle_trie import NaiveTrie, Tokens

from kvcache._edges import edges_of
from kvcache._trie import TokenTrie
from kvcache.errors import InvalidOperationError

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
        self.epoch = 0
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
    def pin_match(self, choice: int, text: Tokens) -> tuple[int, int, int, Tokens]:
        node, length = self.trie.match(self.root(choice), text)
        node = self.trie.boundary(node, length)
        root, tokens = self.end_of(node)
        assert tokens == text[: length // self.page_size * self.page_size]
        self.trie.pin(node)
        self.naive.pins.append((root, tokens))
        return self.epoch, node, root, tokens

    @rule(choice=st.integers(0, 2), text=TEXT)
    def touch_node(self, choice: int, text: Tokens) -> None:
        node, _ = self.trie.match(self.root(choice), text)
        self.trie.touch(node)
        self.naive.touch(*self.end_of(node))

    @rule(target=pinned, choice=st.integers(0, 2), text=TEXT)
    def pin(self, choice: int, text: Tokens) -> tuple[int, int, int, Tokens]:
        node, _ = self.trie.match(self.root(choice), text)
        root, tokens = self.end_of(node)
        self.trie.pin(node)
        self.naive.pins.append((root, tokens))
        return self.epoch, node, root, tokens

    @rule(pin=consumes(pinned))
    def unpin(self, pin: tuple[int, int, int, Tokens]) -> None:
        epoch, node, root, tokens = pin
        if epoch == self.epoch and (root, tokens) in self.naive.pins:
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
        _, tokens = self.end_of(node)  # Mostly a whole cached sequence, so that something happens.
        assert self.trie.remove(root, tokens).tolist() == self.naive.remove(root, tokens)

    @precondition(lambda self: len(self.naive.roots) > 2)
    @rule(choice=st.integers(0, 2))
    def drop_root(self, choice: int) -> None:
        root = self.root(choice)
        pages = self.naive.roots.pop(root)
        self.naive.pins = [pin for pin in self.naive.pins if pin[0] != root]
        self.epoch += 1
        assert sorted(self.trie.drop_root(root).tolist()) == sorted(value for value, _ in pages.values())
        self.release_all()

    def release_all(self) -> None:
        """Pins of an older epoch cannot be told apart by id alone: let them go through the trie's own count."""
        for root, tokens in self.naive.pins:
            node, _ = self.trie.match(root, tokens)
            self.trie.unpin(node)
        self.naive.pins.clear()

    @precondition(lambda self: self.trie.num_pages > 12)
    @rule()
    def clear(self) -> None:
        freed = self.trie.clear().tolist()
        expected = [value for pages in self.naive.roots.values() for value, _ in pages.values()]
        assert sorted(freed) == sorted(expected)
        for pages in self.naive.roots.values():
            pages.clear()
        self.naive.pins.clear()
        self.epoch += 1

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


# ---------------------------------------------------------------------- named cases


def filled(page_size: int, *texts: list[int]) -> tuple[TokenTrie, int]:
    """A trie with one root and these sequences; page values count from 0 in the order of insertion."""
    trie, count = TokenTrie(page_size), 0
    root = trie.add_root()
    for text in texts:
        pages = len(text) // page_size
        trie.insert(root, text, range(count, count + pages))
        count += pages
    return trie, root


def test_the_drawing() -> None:
    trie, root = filled(4, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 24, 25])
    assert trie.num_nodes == 4
    assert trie.num_pages == 3
    _, length, values, partial = trie.lookup(root, [1, 2, 3, 4, 5, 6, 9])
    assert length == 6
    assert values.tolist() == [0]
    assert partial == 3
    _, length, values, partial = trie.lookup(root, [1, 2, 3, 4, 5, 6, 7])
    assert (length, values.tolist(), partial) == (7, [0], 1)


def test_existing_pages_keep_their_values() -> None:
    trie, root = filled(2, [1, 2, 3, 4])
    assert trie.insert(root, [1, 2, 3, 4, 5, 6], [10, 11, 12])[1] == 2
    assert trie.lookup(root, [1, 2, 3, 4, 5, 6])[2].tolist() == [0, 1, 12]


def test_a_chain_loses_its_tail_not_its_head() -> None:
    trie, root = filled(1, list(range(6)), [9])
    assert trie.evict(2).tolist() == [5, 4]
    assert trie.match(root, list(range(6)))[1] == 4
    assert trie.evict(9).tolist() == [3, 2, 1, 0, 6]


def test_touch_refreshes_the_matched_pages_only() -> None:
    trie, root = filled(2, [1, 2, 3, 4, 5, 6], [9, 9])
    trie.touch(*trie.match(root, [1, 2, 3, 4]))
    assert trie.evict(3).tolist() == [2, 3, 1]


def test_a_pinned_path_stays_and_unpins() -> None:
    trie, root = filled(2, [1, 2, 3, 4, 5, 6], [1, 2, 7, 8])
    node, _ = trie.match(root, [1, 2, 3, 4])
    trie.pin(node)
    trie.insert(root, [1, 2, 3, 9], [7, 8])  # Splits the pinned node; its id stays good.
    assert sorted(trie.evict(99).tolist()) == [4, 8]
    assert trie.num_pages == 3
    trie.unpin(node)
    assert trie.evict(99).tolist() == [2, 1, 0]
    assert trie.num_nodes == 1


def test_a_pin_inside_a_page_keeps_one_page_that_completes_it() -> None:
    trie, root = filled(4, [1, 2, 3, 4], [1, 2, 5, 6], [8, 8, 8, 8])
    node, length = trie.match(root, [1, 2, 9])
    assert length == 2
    trie.pin(node)
    assert trie.evict(9).tolist() == [0, 2]
    assert trie.remove(root, [1, 2, 5, 6]).tolist() == []
    assert (trie.match(root, [1, 2, 9])[1], trie.lookup(root, [1, 2, 9])[3]) == (2, 1)
    trie.unpin(node)
    assert trie.evict(9).tolist() == [1]


def test_unpin_without_pin_is_refused() -> None:
    trie, root = filled(1, [1, 2, 3])
    node, _ = trie.match(root, [1, 2, 3])
    trie.pin(node)
    trie.unpin(node)
    with pytest.raises(InvalidOperationError, match="without pins"):
        trie.unpin(node)


def test_pins_of_a_root_balance() -> None:
    trie, root = filled(1, [1])
    trie.pin(root)
    assert trie.evict(9).tolist() == [0]
    trie.unpin(root)
    trie.check()


def test_an_unpinned_leaf_grows_in_place_and_forks_heal() -> None:
    trie, root = filled(2, [1, 2, 3, 4])
    trie.insert(root, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    assert trie.num_nodes == 2
    trie.insert(root, [1, 2, 3, 9], [0, 5])
    assert trie.num_nodes == 4
    trie.remove(root, [1, 2, 3, 9])
    trie.insert(root, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    assert trie.num_nodes == 2
    trie.check()


def test_namespaces_share_nothing() -> None:
    trie, first = filled(1, [1, 2, 3])
    second = trie.add_root()
    assert trie.match(second, [1, 2, 3]) == (second, 0)
    trie.insert(second, [1, 2], [7, 8])
    assert trie.lookup(second, [1, 2, 3])[2].tolist() == [7, 8]
    assert sorted(trie.drop_root(first).tolist()) == [0, 1, 2]
    third = trie.add_root()
    trie.drop_empty(third)
    assert trie.roots() == [second]
    with pytest.raises(ValueError, match="expected the id of a node"):
        trie.match(first, [1])
    assert trie.lookup(second, [1, 2, 3])[2].tolist() == [7, 8]


@pytest.mark.parametrize("page_size", [0, -1, 257])
def test_page_sizes_out_of_range(page_size: int) -> None:
    with pytest.raises(ValueError, match="expected a page size"):
        TokenTrie(page_size)


def test_bad_input_changes_nothing() -> None:
    trie, root = filled(2, [1, 2])
    node, _ = trie.match(root, [1, 2])
    for call, error in [
        (lambda: trie.insert(root, [1, 2, 3], [0]), ValueError),
        (lambda: trie.insert(root, [1, 2], [0, 1]), ValueError),
        (lambda: trie.insert(root, [1, 2], [0.5]), TypeError),
        (lambda: trie.insert(root, [1, 2], [2**31]), ValueError),
        (lambda: trie.insert(node, [1, 2], [0]), ValueError),
        (lambda: trie.insert(root, [1.0, 2], [0]), TypeError),
        (lambda: trie.insert(root, [1, 2**32], [0]), ValueError),
        (lambda: trie.match(99, [1]), ValueError),
        (lambda: trie.match(-1, [1]), ValueError),
        (lambda: trie.touch(node, 3), ValueError),
        (lambda: trie.touch(node, -1), ValueError),
        (lambda: trie.evict(-1), ValueError),
        (lambda: trie.drop_root(node), ValueError),
        (lambda: trie.drop_empty(node), ValueError),
        (lambda: trie.drop_empty(root), InvalidOperationError),
    ]:
        with pytest.raises(error):
            call()
    trie.check()
    assert trie.num_pages == 1


# ---------------------------------------------------------------------- long and adversarial


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_million_equal_tokens(page_size: int) -> None:
    trie, n = TokenTrie(page_size), 1_000_000
    root = trie.add_root()
    tokens = np.zeros(n, np.uint32)
    trie.insert(root, tokens, np.arange(n // page_size))
    assert trie.num_nodes == 2
    assert trie.match(root, tokens)[1] == n
    assert trie.evict(1).tolist() == [n // page_size - 1]
    assert trie.match(root, tokens)[1] == n - page_size
    trie.check()
    assert trie.evict(n)[-1] == 0
    assert trie.nbytes < 10_000


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_comb_of_divergences(page_size: int) -> None:
    """Sequences that leave a common one at every depth: thousands of splits of one long node."""
    trie, n = TokenTrie(page_size), 4096
    root = trie.add_root()
    trunk = np.arange(n, dtype=np.uint32)
    trie.insert(root, trunk, np.arange(n // page_size))
    for depth in range(n - page_size):
        length = (depth // page_size + 1) * page_size
        branch = np.append(trunk[:depth], np.full(length - depth, 2**32 - 1, np.uint32))
        trie.insert(root, branch, np.arange(length // page_size))
    trie.check()
    assert trie.match(root, trunk)[1] == n
    assert trie.lookup(root, trunk)[2].tolist() == list(range(n // page_size))
    pages = trie.num_pages
    assert len(trie.evict(pages)) == pages
    assert trie.num_nodes == 1
    trie.check()


def test_a_hundred_thousand_children_of_one_node() -> None:
    trie, n = TokenTrie(4), 100_000
    root = trie.add_root()
    for i in range(n):
        trie.insert(root, np.array([7, 7, i, 0], np.uint32), [i])
    trie.check()
    for i in range(0, n, 997):
        assert trie.lookup(root, [7, 7, i, 0])[2].tolist() == [i]
    assert trie.match(root, [7, 7, n])[1] == 2
    assert trie.evict(n // 2).tolist() == list(range(n // 2))
    trie.check()
    assert trie.match(root, [7, 7, 5])[1] == 2


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_long_random_history(page_size: int) -> None:
    """Longer sequences than the state machine draws, over a cache held to a capacity."""
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
    """Forks inside pages, pinned where they lie, while everything around them is evicted."""
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


def test_memory_is_steady_over_a_million_pages() -> None:
    """Turn the contents of a full cache over again and again; no array grows any more."""
    trie, capacity, n = TokenTrie(16), 2048, 64
    root = trie.add_root()
    draw = np.random.default_rng(0)
    stem = draw.integers(0, 50_000, 512, dtype=np.uint32)
    sizes = []
    for step in range(16_000):
        tokens = draw.integers(0, 50_000, 1024, dtype=np.uint32)
        shared = int(draw.integers(0, 500))
        tokens[:shared] = stem[:shared]
        trie.insert(root, tokens, np.arange(n))
        trie.evict(max(0, trie.num_pages - capacity))
        if step % 4000 == 1000:
            sizes.append(trie.nbytes)
            trie.check()
    assert max(sizes) < 1.1 * sizes[0]
    assert sizes[-1] < capacity * (17 * 4 + 64)


# -- what damage takes, and what is saved -------------------------------------------------------------------


def pages_of(trie: TokenTrie, root: int) -> dict[Tokens, int]:
    """Every page by all tokens up to its end."""
    found: dict[Tokens, int] = {}
    for leaf in trie.leaf_ids():
        top, tokens, values = trie.path(leaf)
        if top == root:
            for i, value in enumerate(values.tolist()):
                found[tuple(tokens[: (i + 1) * trie.page_size].tolist())] = value
    return found


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 4), texts=st.lists(TEXT, max_size=12), cuts=st.lists(TEXT, min_size=1, max_size=4))
def test_prune_takes_a_page_and_all_that_follows(size: int, texts: list[Tokens], cuts: list[Tokens]) -> None:
    trie = TokenTrie(size)
    root, other = trie.add_root(), trie.add_root()
    for i, text in enumerate(texts):
        whole = text[: len(text) // size * size]
        trie.insert((root, other)[i % 3 == 0], whole, list(range(100 * i, 100 * i + len(whole) // size)))
    kept = pages_of(trie, other)
    for cut in cuts:
        tokens = cut[: len(cut) // size * size]
        if not tokens:
            with pytest.raises(ValueError, match="at least one, got 0"):
                trie.prune(root, tokens)
            continue
        before = pages_of(trie, root)
        gone = {page for page in before if page[: len(tokens)] == tokens}
        freed = trie.prune(root, tokens)
        trie.check()
        assert sorted(freed.tolist()) == sorted(before[page] for page in gone)
        assert pages_of(trie, root) == {page: value for page, value in before.items() if page not in gone}
        assert pages_of(trie, other) == kept


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 4), texts=st.lists(TEXT, max_size=12))
def test_edges_are_the_trie(size: int, texts: list[Tokens]) -> None:
    trie = TokenTrie(size)
    roots = [trie.add_root(), trie.add_root()]
    for i, text in enumerate(texts):
        whole = text[: len(text) // size * size]
        trie.insert(roots[i % 3 == 0], whole, list(range(100 * i, 100 * i + len(whole) // size)))
    for root in roots:
        edges = edges_of(trie, root)
        rebuilt: dict[Tokens, int] = {}
        paths: list[Tokens] = []
        token, value = 0, 0
        for parent, end in zip(edges.parents.tolist(), edges.ends.tolist(), strict=True):
            above = paths[parent] if parent >= 0 else ()
            text = above + tuple(edges.tokens[token : token + end - len(above)].tolist())
            token += end - len(above)
            paths.append(text)
            for page in range(len(above) // size, end // size):
                rebuilt[text[: (page + 1) * size]] = int(edges.values[value])
                value += 1
        assert rebuilt == pages_of(trie, root)
        assert (token, value) == (len(edges.tokens), len(edges.values))
        inner = edges.parents >= 0
        assert (edges.stamps[inner] <= edges.stamps[edges.parents[inner]]).all()
    with pytest.raises(ValueError, match="expected the id of a root"):
        edges_of(trie, 99)


def test_repin_pins_these_and_no_others():
    trie = TokenTrie(2)
    root = trie.add_root()
    a, _ = trie.insert(root, [1, 2], [0])
    b, _ = trie.insert(root, [3, 4], [1])
    trie.pin(a)
    trie.repin([b, b])
    assert (trie.num_pins(a), trie.num_pins(b)) == (0, 2)
    trie.check()
    assert trie.evict(2).tolist() == [0]
