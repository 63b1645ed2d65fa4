"""A prefix-cached engine over windows, under any requests: attention has the bits of a run without a cache.

K and V depend on the whole text up to their token and on its namespace (recording_network.py), so a row of another
text is detected at once. There are few blocks and few pages of windows.
"""

import gc
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from recording_network import TOKENS, VOCABULARY, same_outputs
from windowed_networks import FOUR, KINDS, network

from kvcache.engine import InferenceEngine, PrefixCachedEngine

SOURCES = np.random.default_rng(0).integers(0, VOCABULARY, (5, 200)).astype(np.uint32)
OWNERS = st.sampled_from([None, "a", ("a", 1)])
# The head of one of two texts, then a part of another text.
PROMPTS = st.builds(
    lambda which, head, tail, more: np.concatenate([SOURCES[which][:head], SOURCES[tail][:more]]),
    st.integers(0, 1), st.integers(0, 200), st.integers(2, 4), st.integers(1, 60),
)


class Requests(RuleBasedStateMachine):
    """Requests that end, are abandoned or fail; evictions; saved files."""

    @initialize(
        kind=st.sampled_from(sorted(KINDS)), dtype=st.sampled_from(["f32", "q8", "q2"]),
        blocks=st.sampled_from([1, 8, 40, 600]), block_size=st.sampled_from([4, 16]),
    )
    def start(self, kind, dtype, blocks, block_size):
        self.kind, self.blocks, self.evicted = kind, blocks, False
        self.options = {
            "dtype": dtype, "residual_length": 0, "prefill_chunk": 24, "num_blocks": 640 // block_size,
            "block_size": block_size,
        }
        self.cached = self.fresh()
        self.alone = InferenceEngine(network(kind), **self.options)

    def fresh(self):
        return PrefixCachedEngine(InferenceEngine(network(self.kind), **self.options), self.blocks, strict=True)

    def expect(self, tokens, owner):
        for engine in (self.cached.inner, self.alone):
            engine.model.expect(tokens, owner)
        self.alone.generate(tokens, FOUR)

    def compare(self):
        same_outputs(self.cached.inner.model, self.alone.model)

    @rule(tokens=PROMPTS, owner=OWNERS)
    def generate(self, tokens, owner):
        self.expect(tokens, owner)
        assert self.cached.generate(tokens, FOUR, namespace=owner) == [0] * 4
        self.compare()
        assert (self.cached.inner.config.num_layers - 1, len(tokens) - 1) in self.cached.inner.model.outputs

    @rule(tokens=PROMPTS, owner=OWNERS)
    def generate_twice(self, tokens, owner):
        """With room and without evictions, the second request runs the tokens after the last full block alone."""
        self.generate(tokens, owner)
        before = self.cached.inner.prefill_token_count
        self.generate(tokens, owner)
        if self.blocks == 600 and not self.evicted:
            size = self.options["block_size"]
            assert self.cached.inner.prefill_token_count - before <= len(tokens) - (len(tokens) - 1) // size * size

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
        """Blocks or pages leave, so that texts have the one without the other."""
        caches = [self.cached.prefix_cache.cache, *self.cached._pool.prefixes[1:]]
        self.evicted |= caches[which % len(caches)].evict(count) > 0

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache"
            self.cached.save(path, "recording")
            loaded = self.fresh()
            assert loaded.load(path, "recording") == len(self.cached.prefix_cache.cache)
            for ours, theirs in zip(loaded._pool.prefixes[1:], self.cached._pool.prefixes[1:], strict=True):
                assert len(ours) == len(theirs)
        self.cached = loaded

    @rule()
    def forget(self):
        self.cached.clear_cache()
        assert all(len(cache) == 0 for cache in self.cached._pool.prefixes[1:])

    @invariant()
    def settled(self):
        if not hasattr(self, "cached"):
            return
        gc.collect(0)
        self.cached.check()
        for cache in (self.cached.prefix_cache.cache, *self.cached._pool.prefixes[1:]):
            assert cache.pinned_blocks == 0
            assert cache.references().sum() == len(cache) <= cache.capacity
        stats = self.cached.cache_stats()
        assert 0 <= stats.hit_tokens <= stats.lookup_tokens
        assert self.cached.inner.num_tokens <= TOKENS


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
