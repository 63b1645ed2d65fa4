"""Random submits, cancels, deadlines and steps over a tiny pool; every text is that of the request alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from places import GOLDEN
from seeded_weights import golden_folder
from serving import Alone, Clock, penalised, prompts, repeating, same, sampled, settled
from state_networks import StateNetwork
from windowed_networks import Windowed

from kvcache import BatchEngine, OutOfMemoryError, QueueFullError
from kvcache.calibration.calibrating import measure
from kvcache.engine import Transformer
from kvcache.texts.seen_parts import SeenParts

INDEXED = Transformer.from_pretrained(golden_folder("glm_moe_dsa"))
LATENT = Transformer.from_pretrained(golden_folder("deepseek_v3"))
NETWORK = Transformer.from_pretrained(GOLDEN / "llama")
PROMPTS = prompts(0, 24, 60)
OPTIONS = {
    "f32": {"dtype": "f32"},
    "f16": {"dtype": "f16"},
    "q8": {"dtype": "q8"},
    "q4": {"dtype": "q4", "residual_length": 0},
    "groups of 12": {"dtype": "q4", "residual_length": 12},
    "groups of 64": {"dtype": "q4"},
    "a window": {"dtype": "q8"},
    "two windows": {"dtype": "f16"},
    "windows alone": {"dtype": "q8"},
    "gemma3": {"dtype": "q4", "residual_length": 0},
    "chunks": {"dtype": "q4", "residual_length": 0},
    "a state": {"dtype": "f16"},
    "a state, groups of 12": {"dtype": "q4", "residual_length": 12},
    "states alone": {},
    "several sizes": {"dtype": "q8"},
    "indexers, f16": {"dtype": "f16"},
    "indexers, q4": {"dtype": "q4"},
    "latent rows, groups of 12": {
        "dtype": "q4", "residual_length": 12, "calibrate": measure(LATENT, np.arange(70, dtype=np.uint32)),
    },
}
NETWORKS = {
    "indexers, f16": INDEXED, "indexers, q4": INDEXED,
    "a window": Windowed(NETWORK, 10), "two windows": Windowed(NETWORK, 30, 5),
    "windows alone": Transformer.from_pretrained(GOLDEN / "mistral_window"),
    "gemma3": Transformer.from_pretrained(GOLDEN / "gemma3"),
    "chunks": Windowed(NETWORK, 12, chunked=True), "a state": StateNetwork("one of each"),
    "a state, groups of 12": StateNetwork("one of each"), "states alone": StateNetwork("states alone"),
    "latent rows, groups of 12": LATENT,
    "several sizes": Transformer.from_pretrained(golden_folder("gemma4")),  # and layers that read K and V of others
}
ALONE = {kind: Alone(NETWORKS.get(kind, NETWORK), block_size=8, **options) for kind, options in OPTIONS.items()}


SEEING = [  # kinds whose texts may see parts of cached texts
    "f32", "f16", "q8", "q4", "a window", "two windows", "windows alone", "gemma3", "groups of 12", "groups of 64",
    "latent rows, groups of 12",
]


def seen(prompt, which, link):
    """Make what a text stands behind: segments, one of them twice, or edits; and its tokens that run again."""
    head, first, second = prompt(0)[: 11 + which % 2 * 6], prompt(which % 5)[:20], prompt(which % 3 + 5)[:13]
    if which % 4 == 3:
        return SeenParts.of_edit(second, [(2, 5), (22, 25)], SeenParts.of_edit(first, [(1, 3)])), first[:0]
    return SeenParts.of_segments(head, [first, second, first][: which % 4 + 1], link)


class Requests(RuleBasedStateMachine):
    """The pool holds a few of the texts; the largest, 60 tokens and 24 new ones, fits alone."""

    def __init__(self):
        super().__init__()
        self.clock, self.open, self.ended = Clock(), [], 0
        self.engine = None

    @rule(
        kind=st.sampled_from(sorted(OPTIONS)), blocks=st.integers(11, 30), running=st.integers(1, 9),
        gap=st.sampled_from([0.0, 9.0]),
    )
    def begin(self, kind, blocks, running, gap):
        if self.engine is None:
            self.kind = kind
            self.engine = BatchEngine(
                NETWORKS.get(kind, NETWORK), block_size=8, num_blocks=blocks, max_running=running, max_queue=12,
                target_gap=gap, clock=self.clock, **OPTIONS[kind],
            )

    @rule(
        which=st.integers(0, 23), seed=st.integers(0, 3), draw=st.sampled_from([sampled, repeating, penalised]),
        most=st.sampled_from([0, 1, 7, 24]),
        namespace=st.sampled_from([None, "a", ("b", 1)]), priority=st.integers(-2, 2),
        deadline=st.sampled_from([None, None, 3.0]), n=st.sampled_from([1, 1, 1, 3]),
        keep=st.sampled_from([None, None, 0.0, 2.0, 50.0, [(1, 9.0), (17, 2.0)]]),
        link=st.sampled_from([None, None, 0, 4]),
    )
    def submit(self, which, seed, draw, most, namespace, priority, deadline, n, keep, link):
        if self.engine is None:
            return
        params = draw(seed, most, logprobs=1)
        prompt, waiting, prefix = self.prompt(which), self.engine.stats().waiting, None
        if link is not None and self.kind in SEEING:
            prefix, again = seen(self.prompt, which, link)
            prompt = np.concatenate([again, prompt[:9]])
        try:
            request = self.engine.submit(
                prompt, params, namespace=namespace, priority=priority, deadline=deadline, n=n,
                keep=None if isinstance(keep, list) and len(prompt) < 17 else keep, prefix=prefix,
            )
        except QueueFullError:
            assert waiting + n > 12
            return
        except OutOfMemoryError:
            assert prefix is not None
            return
        made = [replace(params, seed=seed + i) for i in range(n)]
        self.open.append((request, prompt, made, prefix))

    def prompt(self, which):
        return PROMPTS[which] % np.uint32(NETWORKS.get(self.kind, NETWORK).config.vocab_size)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps if self.engine else 0):
            self.clock.now += 0.3
            self.engine.step()
            self.engine.check()

    @rule(data=st.data())
    def cancel(self, data):
        if self.open:
            request = data.draw(st.sampled_from(self.open))[0]
            request.cancel()
            assert request.is_finished, "no step runs, so it ends at once"

    @rule()
    def clear(self):
        if self.engine is not None:
            self.engine.clear_cache()

    @rule(which=st.integers(0, 23))
    def score(self, which):
        if self.engine is not None and self.engine.stats().waiting < 12:
            scores = self.engine.score_batch([self.prompt(which)])[0]
            assert scores.tobytes() == ALONE[self.kind].score(self.prompt(which)).tobytes()

    @invariant()
    def the_pool_is_divided(self):
        if self.engine is not None:
            stats, total = self.engine.stats(), self.engine._pool.total_blocks
            assert stats.free_blocks + stats.claimed_blocks + stats.cached_blocks == total
            assert stats.pinned_blocks <= total // 2
            self.engine.check()

    @invariant()
    def every_text_is_right(self):
        for entry in list(self.open):
            request, prompt, params, prefix = entry
            for tokens, each in zip(self.new(request), params, strict=True):
                want = ALONE[self.kind](prompt, each, prefix)
                assert tokens == want.tokens[: len(tokens)]
            if request.is_finished:
                self.open.remove(entry)
                self.finished(*entry)

    def new(self, request):
        return [sample.new_tokens for sample in request.works]

    def finished(self, request, prompt, params, prefix):
        for got, each in zip(request.completions(), params, strict=True):
            want = ALONE[self.kind](prompt, each, prefix)
            if got.finish_reason in ("cancelled", "deadline"):
                assert got.logprobs == want.logprobs[: len(got.tokens)]
            else:
                same(got, want)

    def teardown(self):
        if self.engine is None:
            return
        for _ in range(3000):
            if not self.engine.step():
                break
        self.every_text_is_right()
        assert not self.open, "a request has not ended"
        self.clock.now += 1000.0
        self.engine.step()  # the pins that are left end
        settled(self.engine)
        self.engine.clear_cache()
        assert self.engine.stats().cached_blocks == 0


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40)


def test_nothing_that_fits_alone_runs_out_of_memory():
    """Requests that each need the whole pool, at once; one that needs more fails by itself."""
    clock = Clock()
    engine = BatchEngine(NETWORK, block_size=8, num_blocks=11, clock=clock)
    asked = [(prompt, sampled(i, 88 - len(prompt), logprobs=0)) for i, prompt in enumerate(PROMPTS[:6])]
    requests = [engine.submit(*each) for each in asked]
    large = engine.submit(PROMPTS[7], sampled(0, 200))
    while engine.step():
        engine.check()
    for request, (prompt, params) in zip(requests, asked, strict=True):
        same(request.completions()[0], ALONE["f32"](prompt, params))
    assert large.finish_reason == "error"
    with pytest.raises(OutOfMemoryError):
        large.result()
    assert large.tokens == ALONE["f32"](PROMPTS[7], sampled(0, 200)).tokens[: len(large.tokens)]
    assert len(large.tokens) + len(PROMPTS[7]) > 88
    settled(engine)
    assert np.unique([len(request.tokens) for request in requests]).size > 1


@pytest.mark.parametrize("kind", ["f32", "groups of 12", "a window", "two windows"])
def test_a_prompt_as_large_as_the_pool_shares_what_fits(kind):
    """Its cached prefix ends inside a block, or in blocks that it does not use, which are held while it begins."""
    engine = BatchEngine(NETWORKS.get(kind, NETWORK), block_size=8, num_blocks=11, **OPTIONS[kind])
    text = np.arange(88, dtype=np.uint32) % 200
    for part in (88, 84, 85, 80, 87, 3, 84):
        prompt, params = np.where(np.arange(88) < part, text, 7).astype(np.uint32), sampled(part, 1, logprobs=1)
        same(engine.submit(prompt, params).completions()[0], ALONE[kind](prompt, params))
    settled(engine)
