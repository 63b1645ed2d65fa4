"""The token trie against a dict of whole prefixes: matches, values, eviction order, pins, shapes."""

from __future__ import annotations

import pytest

from kvcache.errors import InvalidOperationError
from kvcache.trie.trie import TokenTrie


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
    trie.insert(root, [1, 2, 3, 9], [7, 8])  # splits the pinned node, whose id stays valid
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
    assert sorted(trie.all_values(first).tolist()) == [0, 1, 2]
    assert trie.roots() == [first, second]
    with pytest.raises(ValueError, match="root: expected the id of a root"):
        trie.match(99, [1])
    assert trie.lookup(second, [1, 2, 3])[2].tolist() == [7, 8]


@pytest.mark.parametrize("page_size", [0, -1, 257])
def test_page_sizes_out_of_range(page_size: int) -> None:
    with pytest.raises(ValueError, match="page_size: expected 1 to 256"):
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
    ]:
        with pytest.raises(error):
            call()
    trie.check()
    assert trie.num_pages == 1
