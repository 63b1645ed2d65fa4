"""Requests to a prefix-cached engine over a recording network, as a state machine: attention is that of a run alone.

K and V depend on the whole text up to their token and on its namespace (recording_network.py), so a row of another
text is detected at once.
"""

import gc
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from recording_network import TOKENS, VOCABULARY, same_outputs
from windowed_networks import FOUR

from kvcache.engine import InferenceEngine, PrefixCachedEngine

SETTINGS = settings(max_examples=30, stateful_step_count=20, deadline=None)
SOURCES = np.random.default_rng(0).integers(0, VOCABULARY, (5, 200)).astype(np.uint32)
OWNERS = st.sampled_from([None, "a", ("a", 1)])
# The head of one of two texts, then a part of another text.
PROMPTS = st.builds(
    lambda which, head, tail, more: np.concatenate([SOURCES[which][:head], SOURCES[tail][:more]]),
    st.integers(0, 1), st.integers(0, 200), st.integers(2, 4), st.integers(1, 60),
)


class RecordedRequests(RuleBasedStateMachine):
    """Requests that end, are abandoned or fail; evictions; saved files. A subclass calls `begin` when it starts."""

    tolerance = 0.0  # of the results of attention

    def begin(self, network, blocks, **options):
        """`network` makes one; the cache has `blocks` blocks, and the engine the options."""
        self.network, self.blocks, self.options = network, blocks, {"prefill_chunk": 24, **options}
        self.cached, self.evicted = self.fresh(), False
        self.alone = InferenceEngine(network(), **self.options)

    def fresh(self):
        return PrefixCachedEngine(InferenceEngine(self.network(), **self.options), self.blocks, strict=True)

    @property
    def beside(self):
        """The caches beside that of the blocks."""
        return self.cached._pool.prefixes[1:]

    def most_run(self, count):
        """The most of `count` tokens that run where the text was cached with room."""
        raise NotImplementedError

    def expect(self, tokens, owner):
        """Set the text and namespace that run now, and the results without a cache."""
        for engine in (self.cached.inner, self.alone):
            engine.model.expect(tokens, owner)
        self.alone.generate(tokens, FOUR)

    def compare(self):
        same_outputs(self.cached.inner.model, self.alone.model, atol=self.tolerance)

    @rule(tokens=PROMPTS, owner=OWNERS)
    def generate(self, tokens, owner):
        self.expect(tokens, owner)
        assert self.cached.generate(tokens, FOUR, namespace=owner) == [0] * 4
        self.compare()
        assert (self.cached.inner.config.num_layers - 1, len(tokens) - 1) in self.cached.inner.model.outputs

    @rule(tokens=PROMPTS, owner=OWNERS)
    def generate_twice(self, tokens, owner):
        self.generate(tokens, owner)
        before = self.cached.inner.prefill_token_count
        self.generate(tokens, owner)
        if self.blocks == 600 and not self.evicted:
            assert self.cached.inner.prefill_token_count - before <= self.most_run(len(tokens))

    @rule(tokens=PROMPTS, owner=OWNERS, count=st.integers(0, 4))
    def leave(self, tokens, owner, count):
        self.expect(tokens, owner)
        stream = self.cached.stream(tokens, FOUR, namespace=owner)
        for _ in range(count):
            next(stream)
        stream.close()
        self.compare()

    @rule(tokens=PROMPTS, owner=OWNERS, countdown=st.integers(0, 30))
    def fail(self, tokens, owner, countdown):
        self.expect(tokens, owner)
        model = self.cached.inner.model
        model.countdown = countdown
        try:
            self.cached.generate(tokens, FOUR, namespace=owner)
        except InterruptedError:
            assert self.cached.inner.num_tokens == 0
        model.countdown = -1
        self.compare()

    @rule(which=st.integers(0, 2), count=st.integers(1, 30))
    def evict(self, which, count):
        """Texts lose blocks, or what is cached beside them, and keep the other."""
        caches = [self.cached.prefix_cache.cache, *self.beside]
        self.evicted |= caches[which % len(caches)].evict(count) > 0

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache"
            self.cached.save(path, "recording")
            loaded, sizes = self.fresh(), list(map(len, self.beside))
            assert loaded.load(path, "recording") == len(self.cached.prefix_cache.cache)
        self.cached = loaded
        assert list(map(len, self.beside)) == sizes

    @rule()
    def forget(self):
        self.cached.clear_cache()
        assert not any(map(len, self.beside))

    @invariant()
    def settled(self):
        if not hasattr(self, "cached"):
            return
        gc.collect(0)
        self.cached.check()
        for cache in (self.cached.prefix_cache.cache, *self.beside):
            assert cache.pinned_blocks == 0
            assert cache.references().sum() == len(cache) <= cache.capacity
        stats = self.cached.cache_stats()
        assert 0 <= stats.hit_tokens <= stats.lookup_tokens
        assert self.cached.inner.num_tokens <= TOKENS
