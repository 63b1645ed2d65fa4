"""Prompt lookup: what it proposes, and how it learns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.serving.guesses import MOST, Guesses

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


def ids(*tokens):
    return np.array(tokens, np.uint32)


def eager():
    guesses = Guesses()
    for _ in range(4):
        guesses.learn(1, 1)
    return guesses


def test_what_followed_the_last_tokens():
    text = ids(1, 2, 3, 4, 5, 6, 9, 1, 2, 3)
    assert eager().propose(text, 8).tolist() == [4, 5, 6, 9, 1, 2, 3]
    assert eager().propose(text, 2).tolist() == [4, 5]
    assert eager().propose(ids(1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3), 3).tolist() == [8, 1, 2], "the newest place"
    assert eager().propose(ids(4, 4, 4, 4), 3).tolist() == [4]
    for nothing in (text[:9], ids(1, 2, 3), ids(), ids(3, 1, 2, 7, 2, 1, 2)):
        assert eager().propose(nothing, 8).tolist() == []
    assert eager().propose(text, 0).tolist() == []


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 10))
def test_it_is_what_a_plain_search_finds(tokens, most):
    want = []
    for start in range(len(tokens) - 4, -1, -1):
        if tokens[start : start + 3] == tokens[-3:]:
            want = tokens[start + 3 : start + 3 + min(most, MOST)]
            break
    assert eager().propose(ids(*tokens), most).tolist() == want


def test_guesses_that_fail_become_rare():
    guesses, text = Guesses(), ids(1, 2, 3, 1, 2, 3, 1, 2, 3)
    made = 0
    for _ in range(1000):
        if count := len(guesses.propose(text, 8)):
            guesses.learn(count, 0)
            made += count
    assert made < 25
    assert (guesses.guessed, guesses.accepted) == (made, 0)


def test_guesses_that_hold_become_more():
    guesses, text = Guesses(), ids(*[1, 2, 3, 4, 5, 6, 7, 8, 9] * 3)
    sizes = []
    for _ in range(4):
        sizes.append(len(guesses.propose(text, 99)))
        guesses.learn(sizes[-1], sizes[-1])
    assert sizes == [2, 4, 8, MOST]
