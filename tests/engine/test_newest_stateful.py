"""A prefix-cached engine with a residual, under any requests: attention returns the same as without a cache.

K and V depend on the whole text up to their token and on its namespace (recording_network.py). So rows of another
text, and packed rows in place of unpacked ones, are detected at once. There are few blocks and few groups.
"""

import gc
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from recording_network import DIM, KV_HEADS, LAYERS, TOKENS, VOCABULARY, RecordingNetwork, same_outputs

from kvcache import Calibration
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams

FOUR = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=4)
SOURCES = np.random.default_rng(0).integers(0, VOCABULARY, (5, 150)).astype(np.uint32)

CALIBRATION = Calibration(np.random.default_rng(1).standard_normal((LAYERS, KV_HEADS, DIM)))

OWNERS = st.sampled_from([None, "a", ("a", 1)])
# The head of one of two texts, then a part of another text.
PROMPTS = st.builds(
    lambda which, head, tail, more: np.concatenate([SOURCES[which][:head], SOURCES[tail][:more]]),
    st.integers(0, 1), st.integers(0, 150), st.integers(2, 4), st.integers(1, 40),
)


class Requests(RuleBasedStateMachine):
    """Requests that end, are abandoned or fail; saved files."""

    @initialize(
        length=st.sampled_from([2, 7, 12, 16, 17, 48, 64]), blocks=st.sampled_from([1, 6, 40, 600]),
        calibrated=st.booleans(),
    )
    def start(self, length, blocks, calibrated):
        self.options = {"dtype": "q2", "residual_length": length, "prefill_chunk": 24, "num_blocks": 40}
        self.options["calibrate"] = CALIBRATION if calibrated else False
        self.blocks = blocks
        self.cached = self.fresh()
        self.alone = InferenceEngine(RecordingNetwork(), **self.options)

    def fresh(self):
        return PrefixCachedEngine(InferenceEngine(RecordingNetwork(), **self.options), self.blocks, strict=True)

    def expect(self, tokens, owner):
        """Set the text and namespace that run now, and the results without a cache."""
        for engine in (self.cached.inner, self.alone):
            engine.model.expect(tokens, owner)
        self.alone.generate(tokens, FOUR)

    def compare(self):
        same_outputs(self.cached.inner.model, self.alone.model, atol=2e-5)

    @rule(tokens=PROMPTS, owner=OWNERS)
    def generate(self, tokens, owner):
        self.expect(tokens, owner)
        assert self.cached.generate(tokens, FOUR, namespace=owner) == [0] * 4
        self.compare()
        assert (LAYERS - 1, len(tokens) - 1) in self.cached.inner.model.outputs

    @rule(tokens=PROMPTS, owner=OWNERS)
    def generate_twice(self, tokens, owner):
        """The second request runs at most the group in which the cached blocks end and the tokens after it."""
        self.generate(tokens, owner)
        before = self.cached.inner.prefill_token_count
        self.generate(tokens, owner)
        if self.blocks == 600:
            end, length = min(len(tokens) // 16 * 16, len(tokens) - 1), self.options["residual_length"]
            assert self.cached.inner.prefill_token_count - before <= len(tokens) - end // length * length

    @rule(tokens=PROMPTS, owner=OWNERS, count=st.integers(0, 4))
    def leave(self, tokens, owner, count):
        self.expect(tokens, owner)
        stream = self.cached.stream(tokens, FOUR, namespace=owner)
        for _ in range(count):
            next(stream)
        stream.close()
        self.compare()

    @rule(tokens=PROMPTS, owner=OWNERS, countdown=st.integers(0, 20))
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

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache"
            self.cached.save(path, "recording")
            loaded = self.fresh()
            assert loaded.load(path, "recording") == len(self.cached.prefix_cache.cache)
            assert len(loaded.newest.cache) == len(self.cached.newest.cache)
        self.cached = loaded

    @rule()
    def forget(self):
        self.cached.clear_cache()
        assert len(self.cached.newest.cache) == 0

    @invariant()
    def settled(self):
        if not hasattr(self, "cached"):
            return
        gc.collect(0)
        self.cached.check()
        for cache in (self.cached.prefix_cache.cache, self.cached.newest.cache):
            assert cache.pinned_blocks == 0
            assert cache.references().sum() == len(cache) <= cache.capacity
        assert self.cached.inner.num_tokens <= TOKENS


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
