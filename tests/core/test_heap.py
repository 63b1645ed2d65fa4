"""The indexed heap against a sorted list."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from oracles.trie import NaiveHeap

from kvcache.core.heap import IndexedHeap

IDS = st.integers(0, 12)
KEYS = st.one_of(st.integers(-3, 3), st.floats(-2, 2), st.sampled_from([math.inf, -math.inf, 2**53]))


class HeapMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.heap = IndexedHeap()
        self.naive = NaiveHeap()

    @rule(id=IDS, key=KEYS)
    def push_or_update(self, id: int, key: float) -> None:
        if id in self.naive.keys:
            with pytest.raises(ValueError, match="not in the heap"):
                self.heap.push(id, key)
            self.heap.update(id, key)
        else:
            with pytest.raises(KeyError, match="in the heap"):
                self.heap.update(id, key)
            self.heap.push(id, key)
        self.naive.keys[id] = float(key)

    @rule(id=IDS)
    def remove(self, id: int) -> None:
        if id in self.naive.keys:
            self.heap.remove(id)
            del self.naive.keys[id]
        else:
            with pytest.raises(KeyError):
                self.heap.remove(id)

    @precondition(lambda self: self.naive.keys)
    @rule()
    def pop(self) -> None:
        first = self.naive.order()[0]
        assert self.heap.peek() == first
        assert self.heap.pop() == first
        del self.naive.keys[first[0]]

    @rule()
    def clear(self) -> None:
        self.heap.clear()
        self.naive.keys.clear()

    @invariant()
    def same(self) -> None:
        self.heap.check()
        assert len(self.heap) == len(self.naive.keys)
        for id in range(14):
            assert (id in self.heap) == (id in self.naive.keys)
        for id, key in self.naive.keys.items():
            assert self.heap.key(id) == key


TestHeapMachine = HeapMachine.TestCase
TestHeapMachine.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


def test_pops_in_order_with_ties_to_the_lowest_id() -> None:
    heap = IndexedHeap()
    for id in (5, 1, 9, 3):
        heap.push(id, 7)
    heap.push(4, 6.5)
    assert [heap.pop()[0] for _ in range(5)] == [4, 1, 3, 5, 9]


@pytest.mark.parametrize("seed", range(4))
def test_long_random_history(seed: int) -> None:
    draw = random.Random(seed)
    heap, naive = IndexedHeap(), NaiveHeap()
    for step in range(5000):
        id, key = draw.randrange(300), float(draw.randrange(40))
        if id not in naive.keys:
            heap.push(id, key)
            naive.keys[id] = key
        elif draw.random() < 0.6:
            heap.update(id, key)
            naive.keys[id] = key
        else:
            heap.remove(id)
            del naive.keys[id]
        if step % 250 == 0:
            heap.check()
    assert [heap.pop() for _ in range(len(heap))] == naive.order()


def test_memory_is_steady_over_a_million_operations() -> None:
    heap = IndexedHeap()
    for id in range(1000):
        heap.push(id, id)
    size = heap.nbytes
    for step in range(1_000_000):
        heap.update(step % 1000, step * 7919 % 1009)
    heap.check()
    assert heap.nbytes == size
    assert size <= 2 * 20 * 1000 + 1000


def test_empty_heap() -> None:
    heap = IndexedHeap()
    heap.check()
    for take in (heap.pop, heap.peek):
        with pytest.raises(IndexError, match="empty"):
            take()
    assert len(heap) == 0
    assert heap.nbytes == 0


@pytest.mark.parametrize("id", [-1, 2**31, 2**40])
def test_ids_out_of_range_are_refused(id: int) -> None:
    heap = IndexedHeap()
    with pytest.raises(ValueError, match="id: expected an int in"):
        heap.push(id, 0)
    assert id not in heap


def test_wrong_types_and_nan_are_refused() -> None:
    heap = IndexedHeap()
    with pytest.raises(TypeError):
        heap.push("a", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nan"):
        heap.push(0, math.nan)
    assert "a" not in heap
    assert len(heap) == 0
