"""Shapes made to hurt: a million equal tokens, a comb of divergences, 100,000 children of one node."""

import numpy as np
import pytest

from kvcache._trie import TokenTrie

PAGE = 16


def filled(prompts):
    trie = TokenTrie(PAGE)
    root = trie.add_root()
    page = 0
    for prompt in prompts:
        values = np.arange(page, page + len(prompt) // PAGE, dtype=np.int32)
        _, existing = trie.insert(root, prompt, values)
        page += len(values) - existing
    return trie, root


def drained(trie):
    """Evict page by page and all at once; every page leaves once."""
    pages = len(trie)
    first = np.concatenate([trie.evict(1) for _ in range(min(pages, 500))])
    rest = trie.evict(pages)
    gone = np.concatenate([first, rest])
    assert len(gone) == pages
    assert len(np.unique(gone)) == pages
    assert len(trie) == 0
    assert trie.num_nodes == 1
    trie.check()


def test_a_million_equal_tokens():
    tokens = np.full(1_000_000 // PAGE * PAGE, 7, np.uint32)
    trie, root = filled([tokens[:PAGE], tokens[: 500_000 // PAGE * PAGE], tokens])
    assert trie.match(root, tokens)[1] == len(tokens)
    assert trie.match(root, np.append(tokens, 7))[1] == len(tokens)
    assert trie.match(root, tokens[:-1])[1] == len(tokens) - 1
    trie.check()
    drained(trie)


def test_a_comb_of_divergences():
    # A path of thousands of nodes: nothing may recurse along it, nor pay for all of it at every step.
    teeth = 3_000
    spine = np.arange(teeth * PAGE, dtype=np.uint32)
    tooth = np.full(PAGE, 2**32 - 1, np.uint32)
    prompts = (np.concatenate([spine[: page * PAGE], tooth]) for page in range(1, teeth))
    trie, root = filled([spine, *prompts])
    assert trie.num_nodes > 2 * (teeth - 1)
    node, length = trie.match(root, spine)
    assert length == len(spine)
    trie.pin(node)
    assert len(trie.evict(10 * teeth)) == teeth - 1
    trie.unpin(node)
    assert trie.match(root, spine)[1] == len(spine)
    trie.check()
    drained(trie)


def test_a_hundred_thousand_children_of_one_node():
    children = 100_000
    head = np.full(PAGE, 9, np.uint32)
    trie, root = filled([np.concatenate([head, np.full(PAGE, i, np.uint32)]) for i in range(children)])
    assert trie.num_nodes == children + 2
    for child in (0, 1, children // 2, children - 1):
        assert trie.match(root, np.concatenate([head, np.full(PAGE, child, np.uint32)]))[1] == 2 * PAGE
    assert trie.match(root, np.concatenate([head, np.full(PAGE, children, np.uint32)]))[1] == PAGE
    drained(trie)


@pytest.mark.parametrize("length", [PAGE, 16 * PAGE])
def test_dropping_a_trie_of_many_nodes_frees_them_without_recursion(length, rng):
    trie, root = filled(rng.integers(0, 150_000, (2_000, length), dtype=np.uint32))
    assert len(trie.drop_root(root)) == 2_000 * length // PAGE
    trie.check()
