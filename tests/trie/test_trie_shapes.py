"""Extreme shapes: a million equal tokens, a comb of divergences, 100,000 children of one node, a million pages."""

import numpy as np
import pytest
from pace import FAST

from kvcache.trie.trie import TokenTrie


def filled(page_size, prompts):
    """A trie with one root and these prompts; every page has another value."""
    trie, count = TokenTrie(page_size), 0
    root = trie.add_root()
    for prompt in prompts:
        pages = len(prompt) // page_size
        trie.insert(root, prompt, np.arange(count, count + pages, dtype=np.int32))
        count += pages
    return trie, root


def drained(trie):
    """The pages in the order of eviction, page by page and all at once; each is evicted once."""
    pages = len(trie)
    first = np.concatenate([trie.evict(1) for _ in range(min(pages, 500))])
    gone = np.concatenate([first, trie.evict(pages)])
    assert len(gone) == pages
    assert len(np.unique(gone)) == pages
    assert len(trie) == 0
    assert trie.num_nodes == 1
    trie.check()
    return gone


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_million_equal_tokens(page_size):
    n = 1_000_000
    tokens = np.full(n, 7, np.uint32)
    trie, root = filled(page_size, [tokens[:page_size], tokens[: n // 2], tokens])
    assert trie.num_nodes == 2
    assert trie.match(root, tokens)[1] == n
    assert trie.match(root, np.append(tokens, 7))[1] == n
    assert trie.match(root, tokens[:-1])[1] == n - 1
    values = trie.lookup(root, tokens)[2]
    trie.check()
    assert trie.evict(1).tolist() == [values[-1]]
    assert trie.match(root, tokens)[1] == n - page_size
    trie.check()
    np.testing.assert_array_equal(drained(trie), values[-2::-1])
    assert trie.nbytes < 10_000


@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_a_comb_of_divergences(page_size):
    """Prompts that diverge from one prompt at every depth: a path of thousands of nodes, without recursion."""
    n = 4096
    spine = np.arange(n, dtype=np.uint32)

    def tooth(depth):
        length = (depth // page_size + 1) * page_size
        return np.append(spine[:depth], np.full(length - depth, 2**32 - 1, np.uint32))

    trie, root = filled(page_size, [spine, *map(tooth, range(n - page_size))])
    trie.check()
    assert trie.num_nodes > 2 * (n - page_size)
    node, length = trie.match(root, spine)
    assert length == n
    assert trie.lookup(root, spine)[2].tolist() == list(range(n // page_size))
    teeth = trie.num_pages - n // page_size
    trie.pin(node)
    assert len(trie.evict(trie.num_pages)) == teeth
    trie.unpin(node)
    assert trie.match(root, spine)[1] == n
    trie.check()
    drained(trie)


@pytest.mark.parametrize("head", [2, 4])
def test_a_hundred_thousand_children_of_one_node(head):
    """They diverge inside a page of 4 tokens, or after one."""
    n, pages = 20_000 if FAST else 100_000, head // 4 + 1

    def prompt(child):
        text = np.zeros(4 * pages, np.uint32)
        text[:head], text[head] = 7, child
        return text

    trie, root = filled(4, map(prompt, range(n)))
    trie.check()
    assert trie.num_nodes == n + 2
    for child in (*range(0, n, 997), n - 1):
        assert trie.lookup(root, prompt(child))[2][-1] == pages * child + pages - 1
    assert trie.match(root, prompt(n))[1] == head
    assert trie.evict(n // 2).tolist() == [pages * child + pages - 1 for child in range(n // 2)]
    trie.check()
    assert trie.match(root, prompt(5))[1] == head
    drained(trie)


def test_memory_is_steady_over_a_million_pages():
    """Replace the contents of a full cache many times; no array grows."""
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
