"""Cached states that texts and pins hold stay where others leave."""

from contextlib import ExitStack
from unittest.mock import Mock

import numpy as np
import pytest

from kvcache.texts.cached_states import CachedStates, name_of

pytestmark = pytest.mark.one_build


def tokens_of(number):
    return np.arange(8 * number, 8 * number + 8, dtype=np.uint32)


def stored(most):
    """States of up to `most` texts, each of which has its number in all places."""
    states = CachedStates([6, 4], most)
    for number in range(most):
        assert states.store(tokens_of(number), None, [np.full(size, number, np.float32) for size in (6, 4)])
    return states


def test_a_hold_that_ends_late_counts_off_no_newer_one():
    """A hold from before `settle` may end behind it, when another text holds the same state again."""
    states = stored(2)
    with ExitStack() as late, ExitStack() as newer:
        assert states.hold(tokens_of(0), 8, None, late) is not None
        states.settle()
        page = states.hold(tokens_of(0), 8, None, newer)
        late.close()
        for number in (2, 3, 4):  # each needs the page of another state
            assert states.store(tokens_of(number), None, [np.full(size, number, np.float32) for size in (6, 4)])
            assert states.longest(tokens_of(0), 8, None) == 8
        assert [set(row) for row in states.read(page)] == [{0}, {0}]
        states.check()
    for number in range(5, 9):
        assert states.store(tokens_of(number), None, [np.zeros(6, np.float32), np.zeros(4, np.float32)])
    assert states.longest(tokens_of(0), 8, None) == 0


def test_holds_of_a_state_end_one_by_one():
    states = stored(1)
    other = [np.zeros(6, np.float32), np.zeros(4, np.float32)]
    with ExitStack() as first:
        with ExitStack() as second:
            assert states.hold(tokens_of(0), 8, None, first) is not None
            assert states.hold(tokens_of(0), 8, None, second) is not None
            assert not states.store(tokens_of(1), None, other)
        assert not states.store(tokens_of(1), None, other)
    assert states.store(tokens_of(1), None, other)


@pytest.mark.parametrize("place", ["heapq.heappush", "insort"])
def test_an_interrupt_within_a_change_is_mended(monkeypatch, place):
    """Every state that is cached is found and can leave, wherever the change of another one ended."""
    states = stored(3)
    states.index.forget(name_of(tokens_of(1), None))
    with monkeypatch.context() as patched:
        patched.setattr(f"kvcache.texts.cached_states.{place}", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            states.store(tokens_of(3), None, [np.zeros(size, np.float32) for size in (6, 4)])
    states.settle()
    states.check()
    for number in range(5, 8):
        assert states.store(tokens_of(number), None, [np.zeros(size, np.float32) for size in (6, 4)])
    assert [states.longest(tokens_of(number), 8, None) for number in range(8)] == [0] * 5 + [8] * 3
