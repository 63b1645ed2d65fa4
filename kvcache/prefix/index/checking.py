"""The invariants of an index and its slots, over arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvcache.prefix.index.prefixes import PrefixIndex
    from kvcache.prefix.index.slots import Slots

__all__ = ["check_index"]


def check_index(index: PrefixIndex) -> None:
    """AssertionError names the broken invariant."""
    index.trie.check()
    spaces = index.spaces()
    assert index.by_root == {space.root: space for space in spaces}, "prefix index: a namespace without pages"
    assert index.by_name == {space.name: space for space in spaces}, "prefix index: names differ"
    assert index.trie.roots() == sorted(index.by_root), "prefix index: roots differ"
    parked = 0
    for slots in index.kinds:
        check_slots(slots)
        records = slots.records()
        named = [page for space in spaces if space.slots is slots for page in index.trie.all_values(space.root)]
        assert sorted(named) == records["named"].nonzero()[0].tolist(), "prefix index: the trie names other pages"
        leaves = records["parked"][records["parked"] >= 0].tolist()
        assert [index.trie.num_pins(node) for node in leaves] == [1] * len(leaves), "prefix index: parked is unpinned"
        parked += len(leaves)
    assert parked == index.trie.total_pins, "prefix index: a parked leaf is in no page's record"
    assert index.hit_tokens <= index.lookup_tokens, "prefix index: more tokens found than looked up"


def check_slots(slots: Slots) -> None:
    """AssertionError names the broken invariant, and the page."""
    records, references = slots.records(), slots.pool.ref_counts()
    pins, waits = records["pins"], records["waits"] != 0
    for wrong, what in (
        (pins != slots.counts(pins=True), "pins do not add up"),
        (records["lookups"] < 0, "lookups do not add up"),
        (waits & (records["named"] == 0), "waits without a name"),
        (waits & (slots.counts() > 0), "waits and is held"),
        ((records["parked"] >= 0) & (pins == 0), "its leaf is parked, and nothing pins it"),
        (slots.counts(references=True) > references, "the pool counts fewer references"),
    ):
        assert not wrong.any(), f"page {wrong.argmax()}: {what}"
    assert np.count_nonzero(waits) == slots.num_waiting, "slots: pages that wait do not add up"
    assert slots.num_waiting or slots.source is None, "slots: nothing waits, and there is a source"
    table = slots.of(np.arange(slots.pool.num_blocks, dtype=np.int32))
    for pool, of_group in zip(slots.pools, table if len(table) > 1 else [], strict=False):
        used = of_group[of_group >= 0]
        assert len(used) == len(np.unique(used)) == pool.num_used, "slots: a group has lost some"
        assert references[of_group >= 0].all(), "slots: a group has some of free pages"
