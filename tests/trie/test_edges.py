"""The trie as flat edges, and `prune`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.trie import Tokens
from pace import examples

from kvcache.trie.edges import edges_of
from kvcache.trie.trie import TokenTrie

# Two letters and few pages, so that sequences share prefixes and fork inside pages.
TEXT = st.lists(st.integers(0, 1), max_size=13).map(tuple)


def pages_of(trie: TokenTrie, root: int) -> dict[Tokens, int]:
    """The value of every page by all tokens up to its end."""
    found: dict[Tokens, int] = {}
    for leaf in trie.leaf_ids():
        top, tokens, values = trie.path(leaf)
        if top == root:
            for i, value in enumerate(values.tolist()):
                found[tuple(tokens[: (i + 1) * trie.page_size].tolist())] = value
    return found


@settings(max_examples=examples(150), deadline=None)
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


@settings(max_examples=examples(150), deadline=None)
@given(size=st.integers(1, 4), texts=st.lists(TEXT, max_size=12))
def test_edges_are_the_trie(size: int, texts: list[Tokens]) -> None:
    trie = TokenTrie(size)
    roots = [trie.add_root(), trie.add_root()]
    for i, text in enumerate(texts):
        whole = text[: len(text) // size * size]
        trie.insert(roots[i % 3 == 0], whole, list(range(100 * i, 100 * i + len(whole) // size)))
    for root in roots:
        edges = edges_of(trie, [root])
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
    both, each = edges_of(trie, roots), [edges_of(trie, [root]) for root in roots]
    assert both.roots.tolist() == [0] * len(each[0].ends) + [1] * len(each[1].ends)
    for field in ("ends", "marked", "stamps", "tokens", "values"):
        assert getattr(both, field).tolist() == [x for edges in each for x in getattr(edges, field).tolist()]
    first, second = (edges.parents.tolist() for edges in each)
    assert both.parents.tolist() == first + [p if p < 0 else p + len(first) for p in second]
    with pytest.raises(ValueError, match="expected the id of a root"):
        edges_of(trie, [99])
