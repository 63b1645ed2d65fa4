"""PrefixCachedEngine when a caller, the network or a stream fails: the cache stays right."""

import logging

import numpy as np
import pytest
from prefix_engines import GREEDY, SHORT, prompt, settled

from kvcache import OutOfMemoryError
from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.errors import InvalidOperationError


@pytest.fixture
def cached(network):
    return PrefixCachedEngine(InferenceEngine(network), 64)


def test_an_empty_prompt_is_answered_with_nothing(cached):
    assert cached.generate([], SHORT) == []
    assert list(cached.stream([], SHORT)) == []
    assert cached.cache_stats().lookup_tokens == 0


def test_a_callers_mistake_raises(cached):
    for call, error in (
        (lambda: cached.generate([1, 2, 5000], SHORT), ValueError),
        (lambda: cached.generate([1.5], SHORT), TypeError),
        (lambda: cached.generate(prompt(1, 5000), SHORT), ValueError),
        (lambda: cached.generate([1], {"temperature": 0}), TypeError),
        (lambda: PrefixCachedEngine(cached.inner, -1), ValueError),
        (lambda: PrefixCachedEngine(object(), 4), TypeError),
    ):
        with pytest.raises(error, match="expected"):
            call()
    settled(cached)


class Failing:
    """A network that fails in its n-th call."""

    def __init__(self, network, error=None):
        self.network, self.config = network, network.config
        self.error, self.left = error or RuntimeError("the network broke"), -1

    def forward(self, tokens, positions, attend, logits):
        self.left -= 1
        if self.left == 0:
            attend(0, *self._half(len(tokens)))  # some layers have run already
            raise self.error
        return self.network.forward(tokens, positions, attend, logits)

    def _half(self, n):
        c = self.config
        shapes = ((n, c.num_heads, c.head_dim), (n, c.num_kv_heads, c.head_dim), (n, c.num_kv_heads, c.head_dim))
        return [np.zeros(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("error", [RuntimeError("broke"), OutOfMemoryError(1, 0), KeyboardInterrupt()])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_internal_failure_leaves_the_cache_right(network, caplog, error, call):
    model = Failing(network, error)
    cached = PrefixCachedEngine(InferenceEngine(model, prefill_chunk=32), 64)
    tokens = prompt(1, 40)
    expected = InferenceEngine(network).generate(tokens, SHORT)
    cached.generate(tokens[:20], SHORT)
    model.left = call  # in the prefill, or in the decoding
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            cached.generate(tokens, SHORT)
    else:
        with caplog.at_level(logging.WARNING, logger="kvcache"):
            assert cached.generate(tokens, SHORT) == []
        assert "Traceback" in caplog.text
    settled(cached)
    model.left = -1
    assert cached.generate(tokens, SHORT) == expected
    settled(cached)


def test_strict_raises_internal_failures(network):
    model = Failing(network)
    cached = PrefixCachedEngine(InferenceEngine(model), 64, strict=True)
    model.left = 1
    with pytest.raises(RuntimeError, match="broke"):
        cached.generate(prompt(1, 40), SHORT)
    settled(cached)


def test_a_stream_that_is_dropped_releases_what_it_pinned(cached):
    tokens = prompt(1, 40)
    expected = cached.generate(tokens, GREEDY)
    stream = cached.stream(tokens, GREEDY)
    assert [next(stream), next(stream)] == expected[:2]
    del stream
    settled(cached)
    assert list(cached.stream(tokens, GREEDY)) == expected


def test_a_stream_ends_when_another_request_takes_the_engine(cached):
    stream = cached.stream(prompt(1, 40), GREEDY)
    next(stream)
    with pytest.raises(InvalidOperationError, match="stream"):
        cached.generate(prompt(2, 20), SHORT)
    cached.inner.reset()
    other = cached.generate(prompt(2, 20), SHORT)
    with pytest.raises(InvalidOperationError, match="another call"):
        list(stream)
    del stream
    settled(cached)
    assert cached.generate(prompt(2, 20), SHORT) == other
