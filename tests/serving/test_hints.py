"""Hints: what leaves first, stays, is read ahead and is forgotten; answers have the same bits, whatever is hinted."""

import math
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from places import GOLDEN
from seeded_weights import seeded
from serving import ONE, Alone, asked, clocked, run, same, sampled, settled
from state_networks import VOCABULARY, StateNetwork
from tier_stores import SECRET, Faulty, ObjectStore
from windowed_networks import Windowed

from kvcache import BatchEngine, EvictionPolicy
from kvcache.engine import InferenceEngine, PrefixCachedEngine, Transformer
from kvcache.errors import InvalidOperationError, QueueFullError
from kvcache.serving import exposition, prefetches, steps
from kvcache.tiers import Tiers, lookups

pytestmark = pytest.mark.one_build

NETWORK = Transformer.from_pretrained(GOLDEN / "llama")
KINDS = [
    (NETWORK, {}), (Windowed(NETWORK, 10), {}), (NETWORK, {"dtype": "q4", "residual_length": 16}),
    (StateNetwork("one of each"), {}), (StateNetwork("states alone"), {}),
]
NAMES = ["all tokens", "a window", "whole groups of 16", "states among others", "states alone"]


@pytest.fixture(autouse=True)
def fetches_pay(monkeypatch):
    monkeypatch.setattr(lookups, "_SHARE", math.inf)


def text(number, length):
    """Texts of different numbers share nothing; those of one number begin alike."""
    return np.random.default_rng(number).integers(0, min(96, VOCABULARY), 400).astype(np.uint32)[:length]


def branch(number, head, length):
    """A text that leaves the one of another number behind its first `head` tokens."""
    return np.concatenate([text(number // 100, head), text(number, length)[head:]])


def engine_of(blocks=40, network=NETWORK, **options):
    return clocked(network, blocks, **options)


def cached(engine, prompt, **options):
    return engine.hint("pin", prompt, ttl=0.0, **options).tokens_found


def tiers_over(store):
    return Tiers([store], secret=SECRET, after_uses=9, head_start=0)


def arrive(engine, clock, prompt, least):
    """Step until so many tokens of a prompt are cached."""
    for _ in range(100_000):
        engine.step()
        if cached(engine, prompt) >= least and not engine._steps._scheduler.prefetches.texts:
            return
    raise AssertionError(f"{cached(engine, prompt)} tokens arrived")


@pytest.mark.parametrize(("network", "options"), KINDS, ids=NAMES)
def test_what_is_demoted_leaves_first(network, options):
    engine, _ = engine_of(40, network, **options)
    asked(engine, text(1, 96))
    asked(engine, text(2, 96))
    hinted = engine.hint("demote", text(2, 96))
    assert (hinted.action, hinted.tokens) == ("demote", 96)
    assert hinted.tokens_found >= 88
    asked(engine, text(3, 168))
    assert cached(engine, text(1, 96)) == hinted.tokens_found, "it was used before, and stays"
    assert cached(engine, text(2, 96)) < 96
    same(
        asked(engine, text(2, 100), sampled(1, logprobs=1)).completions()[0],
        Alone(network, block_size=8, **options)(text(2, 100), sampled(1, logprobs=1)),
    )
    engine.close()
    settled(engine)


@pytest.mark.parametrize(("network", "options"), KINDS, ids=NAMES)
def test_a_branch_is_released(network, options):
    """Its parent stays, and other branches do; its states and windows go with it."""
    engine, _ = engine_of(60, network, **options)
    parent, one, other = text(1, 64), branch(101, 64, 124), branch(102, 64, 124)
    asked(engine, parent)
    asked(engine, one, keep=500.0)
    blocks = engine.stats().free_blocks
    engine.hint("release", one, after=64)
    assert cached(engine, one) <= 64 + 7
    assert engine.stats().pinned_blocks == 0
    assert engine.stats().free_blocks >= blocks + 6
    asked(engine, one)
    asked(engine, other)
    engine.hint("release", other)
    assert cached(engine, one) >= 112
    assert cached(engine, other) <= 64 + 7, "what both branches have is no part of one"
    assert asked(engine, branch(103, 64, 100)).metrics.cached_tokens >= 48
    for prompt in (one, other):
        same(
            asked(engine, prompt, sampled(1, logprobs=1)).completions()[0],
            Alone(network, block_size=8, **options)(prompt, sampled(1, logprobs=1)),
        )
    if engine.keeps_states:
        states = engine._pool.with_pages[-1].cached
        engine.hint("release", one)
        engine.hint("release", other)
        assert len(states.index) <= 4
    engine.close()
    settled(engine)


def test_pins_of_texts_and_of_their_head():
    engine, clock = engine_of(80)
    one, other = branch(101, 60, 96), branch(102, 60, 96)
    asked(engine, one)
    assert engine.hint("share", one, other, ttl=30.0)[1:] == (60, 60), "another token may differ in a block"
    assert engine.stats().pinned_blocks == 7
    assert engine.hint("pin", other, ttl=60.0).tokens_found == 60
    assert engine.stats().pinned_blocks == 7, "it stays longer for the second hint"
    clock.now += 40.0
    engine.step()
    assert engine.stats().pinned_blocks == 7
    assert engine.hint("pin", text(5, 40))[1:] == (40, 0), "what is not cached is not pinned"
    assert engine.hint("pin", one, namespace="other").tokens_found == 0
    assert engine.stats().pinned_blocks == 7
    assert engine.stats().hints == 4
    page = exposition(engine.stats(), {})
    assert "# TYPE kvcache_hints_total counter\nkvcache_hints_total 4\n" in page
    assert "kvcache_prefetched_tokens_total 0\n" in page
    engine.close()
    settled(engine)


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {}), ("llama", {"dtype": "q4", "residual_length": 16}), ("gemma3", {}), ("lfm2", {})],
)
def test_a_text_comes_back_from_a_tier(name, options):
    """It is copied when a tool runs, after a single use; it is read a second before it comes, and stays until then."""
    network = Transformer.from_pretrained(seeded(name) if name == "lfm2" else GOLDEN / name)
    store, prompt = ObjectStore(), text(1, 200)
    with tiers_over(store) as tiers:
        engine, clock = engine_of(140, network, tiers=tiers, **options)
        asked(engine, prompt)
        assert not store.bucket
        engine.hint("demote", prompt)
        assert tiers.flush(60)
        assert store.bucket
        for number in range(2, 8):
            asked(engine, text(number, 240))
        assert cached(engine, prompt) < 64
        engine.hint("prefetch", prompt, resume_in=20.0, ttl=30.0)
        run(engine)
        assert cached(engine, prompt) < 64, "it is not due"
        clock.now += 19.5
        arrive(engine, clock, prompt, 192)
        assert engine.stats().prefetched_tokens >= 128
        assert engine.stats().pinned_blocks
        ran = engine.stats().prefilled_tokens
        longer = np.append(prompt, text(9, 20)).astype(np.uint32)
        request = asked(engine, longer, sampled(1, logprobs=1))
        assert request.metrics.cached_tokens >= 176
        assert engine.stats().prefilled_tokens - ran <= 40
        same(request.completions()[0], Alone(network, block_size=8, **options)(longer, sampled(1, logprobs=1)))
        clock.now += 60.0
        run(engine)
        assert engine.stats().pinned_blocks == 0
        engine.close()
        settled(engine)


def test_a_thread_reads_ahead():
    """Nothing runs, and no request asks for the text."""
    store, prompt = ObjectStore(), text(1, 260)
    with tiers_over(store) as tiers, BatchEngine(NETWORK, block_size=8, num_blocks=40, tiers=tiers) as engine:
        engine.submit(prompt, ONE).result()
        engine.hint("demote", prompt)
        assert tiers.flush(60)
        engine.clear_cache()
        engine.hint("prefetch", prompt)
        arrived = engine._steps._scheduler.prefetches
        for _ in range(6000):
            if arrived.read_tokens and not arrived.texts:
                break
            threading.Event().wait(0.01)
        assert arrived.read_tokens == 256
        request = engine.submit(np.append(prompt, 5), ONE)
        request.result()
        assert request.metrics.cached_tokens == 256
    settled(engine)


def test_an_engine_of_one_text():
    store, prompt = ObjectStore(), text(1, 260)
    with tiers_over(store) as tiers:
        engine = PrefixCachedEngine(InferenceEngine(NETWORK, block_size=16), 64, tiers=tiers)
        engine.generate(prompt, ONE)
        engine.hint("demote", prompt)
        assert tiers.flush(60)
        assert len(store.bucket) == 4
        assert engine.hint("release", prompt)[1:] == (260, 256)
        assert engine.hint("prefetch", prompt)[1:] == (260, 0)
        assert engine.hint("prefetch", prompt).tokens_found == 256
        assert engine.complete(prompt, ONE).cached_tokens == 256
        with pytest.raises(ValueError, match="action: expected demote, prefetch or release of this engine, got 'pin'"):
            engine.hint("pin", prompt)
        engine.check()


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        (("keep", [1]), {}, ValueError, "action: expected one of demote, pin, prefetch, release, share, got 'keep'"),
        ((7, [1]), {}, ValueError, "action: expected one of .*, got 7"),
        (("pin",), {}, ValueError, "prompts: expected 1 to 64 for pin, got 0"),
        (("share", [1]), {}, ValueError, "prompts: expected 2 to 64 for share, got 1"),
        (("pin", []), {}, ValueError, "tokens: expected at least one, got none"),
        (("pin", [-1]), {}, ValueError, "tokens: expected"),
        (("pin", [1]), {"ttl": -1.0}, ValueError, "ttl: expected"),
        (("pin", [1]), {"ttl": "5m"}, TypeError, "ttl: expected"),
        (("pin", [1]), {"after": 3}, ValueError, "after: expected none for pin, got 3"),
        (("demote", [1]), {"after": 2**40}, ValueError, "after: expected an int <="),
        (("release", [1]), {"ttl": 3.0}, ValueError, "ttl: expected none for release, got 3.0"),
        (("prefetch", [1]), {"resume_in": math.nan}, ValueError, "resume_in: expected"),
        (("pin", [1]), {"namespace": []}, TypeError, "namespace: expected a hash"),
    ],
)
def test_arguments(arguments, options, kind, message):
    engine, _ = engine_of()
    with pytest.raises(kind, match=message):
        engine.hint(*arguments, **options)
    assert engine.stats().hints == 0


def test_engines_that_take_none(monkeypatch):
    evicting = BatchEngine(NETWORK, eviction_policy=EvictionPolicy.H2O(), kv_budget=64)
    with pytest.raises(ValueError, match="hint: expected none with an eviction_policy, got 'pin'"):
        evicting.hint("pin", [1])
    monkeypatch.setattr(prefetches, "_OF_ONE", 2)
    monkeypatch.setattr(prefetches, "_MOST", 3)
    engine, _ = engine_of()
    for owner in ("a", ("a", "salt"), "b"):
        engine.hint("prefetch", text(1, 20), namespace=owner, resume_in=50.0)
    for owner in (("a", 2), "c"):
        with pytest.raises(QueueFullError, match=r"queue full: [23] hints wait;"):
            engine.hint("prefetch", text(1, 20), namespace=owner, resume_in=50.0)
    monkeypatch.setattr(prefetches, "_MOST_TOKENS", 80)
    with pytest.raises(QueueFullError):
        engine.hint("prefetch", text(1, 21), namespace="d", resume_in=50.0)
    monkeypatch.setattr(steps, "_MOST_HINTS", 1)
    with engine._steps.lock:  # as a step holds it
        engine.hint("pin", text(1, 20))
        with pytest.raises(QueueFullError, match="queue full: 1 hints wait;"):
            engine.hint("pin", text(1, 20))
        assert engine.stats().hints == 3
    assert engine.stats().hints == 4
    engine.close()
    with pytest.raises(InvalidOperationError):
        engine.hint("pin", [1])


class Hinting(RuleBasedStateMachine):
    """Hints at random beside requests, in a pool that is short, over a tier that fails: no answer has other bits."""

    alone = Alone(NETWORK, block_size=8)

    def __init__(self):
        super().__init__()
        self.tiers = Tiers([Faulty(ObjectStore(), 3, 0.2)], secret=SECRET, after_uses=2, head_start=0)
        self.engine, self.clock = engine_of(24, tiers=self.tiers)
        self.open = []

    @rule(
        number=st.integers(1, 3), length=st.integers(1, 130), seed=st.integers(0, 3),
        keep=st.sampled_from([None, 9.0]),
    )
    def ask(self, number, length, seed, keep):
        prompt, params = branch(100 + number, 40, max(41, length)), sampled(seed, 3, logprobs=1)
        self.open.append((self.engine.submit(prompt, params, keep=keep), prompt, params))

    @rule(
        action=st.sampled_from(["demote", "pin", "prefetch", "release", "share"]), number=st.integers(1, 3),
        length=st.integers(1, 130), after=st.sampled_from([None, 0, 33]), soon=st.sampled_from([None, 0.0, 5.0]),
    )
    def hint(self, action, number, length, after, soon):
        prompts = [branch(100 + number, 40, max(41, length))]
        prompts += [branch(101, 40, 60)] if action == "share" else []
        options = {"after": after} if action in ("demote", "release") else {}
        options |= {"resume_in": soon} if action == "prefetch" else {"ttl": soon} if action in ("pin", "share") else {}
        hinted = self.engine.hint(action, *prompts, **options)
        assert 0 <= hinted.tokens_found <= hinted.tokens

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def answers(self):
        run(self.engine, check=False)
        for request, prompt, params in self.open:
            same(request.completions()[0], self.alone(prompt, params))
        self.open.clear()

    @invariant()
    def holds(self):
        self.engine.check()

    def teardown(self):
        self.answers()
        self.engine.close()
        settled(self.engine)
        self.tiers.close()


TestHinting = Hinting.TestCase
TestHinting.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
