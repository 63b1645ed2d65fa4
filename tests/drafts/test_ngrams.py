"""Prompt lookup: what it proposes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.drafts.ngrams import NGrams

pytestmark = pytest.mark.one_build


def ids(*tokens):
    return np.array(tokens, np.uint32)


def test_what_followed_the_last_tokens():
    text, follow = ids(1, 2, 3, 4, 5, 6, 9, 1, 2, 3), NGrams().follow
    assert follow(text, 8).tolist() == [4, 5, 6, 9, 1, 2, 3]
    assert follow(text, 2).tolist() == [4, 5]
    assert follow(ids(1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3), 3).tolist() == [8, 1, 2], "the newest place"
    assert follow(ids(4, 4, 4, 4), 3).tolist() == [4]
    for nothing in (text[:9], ids(1, 2, 3), ids(), ids(3, 1, 2, 7, 2, 1, 2)):
        assert follow(nothing, 8).tolist() == []
    assert follow(text, 0).tolist() == []


@given(st.lists(st.sampled_from([0, 1, 256, 1 << 24]), max_size=30), st.integers(0, 10))
def test_it_is_what_a_plain_search_finds(tokens, most):
    """Some of these tokens have the bytes of two others across their border."""
    want = []
    for start in range(len(tokens) - 4, -1, -1):
        if tokens[start : start + 3] == tokens[-3:]:
            want = tokens[start + 3 : start + 3 + most]
            break
    assert NGrams().follow(ids(*tokens), most).tolist() == want
