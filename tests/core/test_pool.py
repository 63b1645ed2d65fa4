"""BlockPool against a deque and a Counter; IdMap against a dict."""

from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.core.block_pool import BlockPool
from kvcache.core.idmap import IdMap
from kvcache.errors import BlockNotFoundError, OutOfMemoryError

BLOCKS = st.lists(st.integers(-1, 9), max_size=6)


class PoolMachine(RuleBasedStateMachine):
    size = 8

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.size)
        self.free, self.refs = deque(range(self.size)), Counter()

    @rule(n=st.integers(0, 5))
    def acquire(self, n):
        if n > len(self.free):
            with pytest.raises(OutOfMemoryError):
                self.pool.acquire(n)
            return
        expected = [self.free.popleft() for _ in range(n)]
        self.refs.update(expected)
        assert self.pool.acquire(n).tolist() == expected

    @rule(blocks=BLOCKS)
    def retain(self, blocks):
        if any(self.refs[b] == 0 for b in blocks):
            with pytest.raises(BlockNotFoundError):
                self.pool.retain(blocks)
        else:
            self.pool.retain(blocks)
            self.refs.update(blocks)

    @rule(blocks=BLOCKS)
    def release(self, blocks):
        if any(self.refs[b] < count for b, count in Counter(blocks).items()):
            with pytest.raises(BlockNotFoundError):
                self.pool.release(blocks)
            return
        freed = 0
        for b in blocks:
            self.refs[b] -= 1
            if self.refs[b] == 0:
                self.free.append(b)
                freed += 1
        assert self.pool.release(blocks) == freed

    @invariant()
    def agree(self):
        self.pool.check()
        assert self.pool.num_free == len(self.free)
        assert self.pool.ref_counts().tolist() == [self.refs[b] for b in range(self.size)]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize(
    ("size", "error"), [(-1, ValueError), (2**31, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_bad_sizes(size, error):
    with pytest.raises(error, match="num_blocks"):
        BlockPool(size)


def test_ids_and_memory_are_steady():
    pool = BlockPool(16)
    size = pool.nbytes
    for _ in range(10_000):
        pool.release(pool.acquire(7))
    pool.check()
    assert pool.nbytes == size
    assert pool.peak_used == 7


KEYS = st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1), st.integers(0, 40).map(lambda i: i << 58))


@given(st.lists(st.tuples(st.sampled_from(["put", "drop", "get"]), KEYS, st.integers(0, 1000)), max_size=300))
@settings(deadline=None)
def test_map_is_a_dict(history):
    real, naive = IdMap(), {}
    for verb, key, value in history:
        if verb == "put":
            real[key] = naive[key] = value
        elif verb == "drop" and key in naive:
            del real[key], naive[key]
        else:
            assert (key in real) == (key in naive)
            if key in naive:
                assert real[key] == naive[key]
            else:
                with pytest.raises(KeyError):
                    real[key]
                with pytest.raises(KeyError):
                    del real[key]
    real.check()
    assert real.keys_list() == sorted(naive)
    assert len(real) == len(naive)


def test_map_stays_small():
    real = IdMap()
    rng = np.random.default_rng(0)
    for i in range(50_000):
        real[i] = 1
        if i >= 100:
            del real[int(i - 100)]
        if rng.random() < 0.001:
            real.check()
    assert len(real) == 100
    assert real.nbytes <= 12 * 512
    with pytest.raises(ValueError, match="row"):
        real[0] = -1
