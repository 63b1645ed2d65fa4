"""`TextCounts` against a Counter of whole texts, over random histories."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache import PrefixCache
from kvcache.prefix.texts import TextCounts

pytestmark = pytest.mark.no_level

BLOCKS, SIZE = 12, 2
PAGES = st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE)


class TextsMachine(RuleBasedStateMachine):
    """Blocks of texts, each behind another one or at the beginning."""

    def __init__(self):
        super().__init__()
        self.real = TextCounts(BLOCKS, SIZE)
        self.text_of = {}  # of the counted blocks

    @rule(before=st.integers(-1, BLOCKS - 1), pages=st.lists(PAGES, max_size=3))
    def add(self, before, pages):
        blocks = [block for block in range(BLOCKS) if block not in self.text_of][: len(pages)]
        text = self.text_of.get(before, ())
        before = before if before in self.text_of else -1
        pages = pages[: len(blocks)]
        self.real.add(before, np.array(blocks, np.int32), np.array(pages, np.uint32).reshape(-1, SIZE))
        for block, page in zip(blocks, pages, strict=True):
            text += tuple(page)
            self.text_of[block] = text

    @rule(some=st.sets(st.integers(0, BLOCKS - 1)))
    def drop(self, some):
        gone = [block for block in some if self.text_of.pop(block, None) is not None]
        self.real.drop(np.array(gone, np.int32))

    @rule()
    def recount(self):
        self.real.recount(np.array(list(self.text_of), np.int32))

    @rule(before=st.integers(-1, BLOCKS - 1), page=PAGES)
    def count(self, before, page):
        before = before if before in self.text_of else -1
        text = self.text_of.get(before, ()) + tuple(page)
        assert self.real.count(before, np.array(page, np.uint32)) == Counter(self.text_of.values())[text]

    @invariant()
    def sound(self):
        self.real.check(np.array(list(self.text_of), np.int32))


TestTexts = TextsMachine.TestCase


def test_a_miss_knows_of_other_namespaces_until_they_have_left():
    cache = PrefixCache(1000, SIZE, 1, 1, 8)
    row = np.ones(SIZE * 8, np.float32)

    def reason(tokens, name):
        before = dict(cache.stats().miss_reasons)
        with cache.open_session(tokens, name):
            pass
        after = cache.stats().miss_reasons
        return next(key for key in after if after[key] != before[key])

    for name in range(400):
        cache.store([1, 2, 3, 4], 0, [([row], [row])] * 2, namespace=name)
    cache.store([1, 2, 8, 8], 0, [([row], [row])] * 2, namespace="other")
    assert reason([1, 2, 3, 4], "other") == "namespace"
    assert reason([1, 2, 8, 8], 7) == "namespace"
    assert reason([8, 8], 7) == "no_shared_prefix"
    cache.evict(1)  # the tail of namespace 0
    assert reason([1, 2, 3, 4], 0) == "evicted"
    cache.clear()
    assert reason([1, 2, 3, 4], "other") == "no_shared_prefix"
    cache.check()


def test_a_check_finds_what_is_not_counted():
    texts = TextCounts(4, SIZE)
    texts.add(-1, np.array([1], np.int32), np.array([[5, 6]], np.uint32))
    with pytest.raises(AssertionError):
        texts.check(np.array([], np.int32))
