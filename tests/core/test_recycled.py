"""Memory that is taken again, against a list of what is free; arrays in it keep their values."""

from __future__ import annotations

import gc
from threading import Thread

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.errors import OutOfMemoryError
from kvcache.kernels.layers import rms_norm
from kvcache.kernels.matrix import Matrix
from kvcache.support.recycled import Piece, check, free_pieces

LEAST, MOST, MOST_PIECES = 1 << 17, 128 << 20, 16


class PieceMachine(RuleBasedStateMachine):
    """Sizes of free pieces, in the order in which they were freed, and of those in use."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.free = free_pieces()
        self.used: list[tuple[Piece, int]] = []

    @rule(size=st.one_of(st.integers(0, 2 * LEAST), st.integers(LEAST, 20 << 20)))
    def take(self, size: int) -> None:
        fitting = [each for each in self.free if LEAST <= size <= each <= 2 * size]
        taken = min(fitting, default=size)
        if fitting:
            self.free.remove(taken)
        self.used.append((Piece(size), taken))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, size = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        if size >= LEAST:
            self.free.append(size)
        while sum(self.free) > MOST or len(self.free) > MOST_PIECES:
            self.free.pop(0)

    @invariant()
    def the_same_are_free(self) -> None:
        check()
        assert free_pieces() == self.free

    def teardown(self) -> None:
        self.used.clear()


TestPieces = PieceMachine.TestCase
TestPieces.settings = settings(max_examples=50, stateful_step_count=40)


def norms(value: float, rows: int, weight: np.ndarray) -> np.ndarray:
    return rms_norm(np.full((rows, 64), value, np.float32), weight, 0.0)


def test_large_arrays_keep_their_values():
    """Arrays of several threads keep them too, while others are made and freed."""
    wrong: list[int] = []

    def make(seed: int) -> None:
        rng = np.random.default_rng(seed)
        held: list[tuple[np.ndarray, float]] = []
        for value in range(1, 200):
            weight = np.full(64, value, np.float32)
            held.append((norms(1.0, int(rng.integers(1, 5000)), weight), float(value)))
            if len(held) > 6:
                held.pop(int(rng.integers(len(held))))
            wrong.extend(int(want) for array, want in held if not (array == want).all())

    threads = [Thread(target=make, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_next_array_takes_the_memory_of_the_last():
    """A large one; it begins at a cache line, and views keep it."""
    weight, rows = np.ones(64, np.float32), 100_003  # no other test takes as many
    first = norms(1.0, rows, weight)
    address, view = first.ctypes.data, first[1000:]
    assert address % 64 == 0
    del first
    other = norms(1.0, rows, weight)
    assert other.ctypes.data != address
    del view
    assert norms(1.0, rows, weight).ctypes.data == address


def test_scratch_of_a_product_is_taken_again():
    matrix, x = Matrix(16, 4096, "f32"), np.ones((64, 4096), np.float32)
    matrix.multiply(x)
    before = free_pieces()
    for _ in range(3):
        matrix.multiply(x)
        assert sorted(free_pieces()) == sorted(before)


def test_memory_that_the_system_refuses():
    with pytest.raises(OutOfMemoryError):
        Piece(1 << 60)
    with pytest.raises(OverflowError):
        Piece(1 << 70)
