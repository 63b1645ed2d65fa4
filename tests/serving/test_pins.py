"""Pins: prefixes that stay cached for their time, within their limits, and that give way to requests."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from places import GOLDEN
from serving import GREEDY, ONE, Alone, asked, clocked, run, same, sampled, settled
from state_networks import VOCABULARY, StateNetwork
from windowed_networks import Windowed

from kvcache import BatchEngine, EvictionPolicy, SamplingParams
from kvcache.engine import Transformer
from kvcache.serving import exposition, pins

pytestmark = pytest.mark.one_build

NETWORK = Transformer.from_pretrained(GOLDEN / "llama")
WARM = SamplingParams(temperature=0.0, max_tokens=0)


def text(number, length):
    """Texts of different numbers share nothing; those of one number begin alike."""
    return np.random.default_rng(number).integers(0, min(250, VOCABULARY), 200).astype(np.uint32)[:length]


def engine_of(blocks=40, network=NETWORK, **options):
    return clocked(network, blocks, **options)


def crowd(engine, first, count=6):
    """Requests that leave nothing else cached."""
    for number in range(first, first + count):
        asked(engine, text(number, 120))


@pytest.mark.parametrize(
    ("network", "options", "blocks"),
    [
        (NETWORK, {}, 10), (Windowed(NETWORK, 10), {}, 10), (NETWORK, {"dtype": "q4", "residual_length": 12}, 9),
        (StateNetwork("one of each"), {}, 10), (StateNetwork("states alone"), {}, 10),
    ],
    ids=["all tokens", "a window", "whole groups of 12", "states among others", "states alone"],
)
def test_a_pinned_prompt_stays_cached(network, options, blocks):
    engine, clock = engine_of(60, network, **options)
    warmed = asked(engine, text(1, 84), WARM, keep=100.0)
    assert (warmed.tokens, warmed.finish_reason, warmed.metrics.prompt_tokens) == ([], "length", 84)
    assert engine.stats().prefilled_tokens == 84
    assert engine.stats().pinned_blocks == engine.stats().claimed_blocks == blocks
    asked(engine, text(2, 84))
    crowd(engine, 10)
    found, lost = asked(engine, text(1, 90)), asked(engine, text(2, 90))
    assert found.metrics.cached_tokens >= 8 * blocks
    assert lost.metrics.cached_tokens == 0
    same(found.completions()[0], Alone(network, block_size=8, **options)(text(1, 90), ONE))
    clock.now += 200.0
    engine.step()
    assert engine.stats().pinned_blocks == 0
    settled(engine)


def test_each_use_renews_a_pin():
    engine, clock = engine_of()
    asked(engine, text(1, 64), keep=10.0)
    for _ in range(3):
        clock.now += 9.0
        asked(engine, text(1, 70))
        assert engine.stats().pinned_blocks == 8
    clock.now += 9.0
    asked(engine, text(1, 50))  # which is shorter
    clock.now += 2.0
    engine.step()
    assert engine.stats().pinned_blocks == 0


def test_a_later_pin_of_the_same_text_extends_it_and_never_shortens_it():
    engine, clock = engine_of(80)
    asked(engine, text(1, 64), keep=100.0)
    asked(engine, text(1, 64), keep=5.0)
    clock.now += 50.0
    engine.step()
    assert engine.stats().pinned_blocks == 8
    asked(engine, text(1, 96), keep=100.0)  # it has the first one
    assert engine.stats().pinned_blocks == 12
    asked(engine, text(1, 32), keep=1.0)
    assert engine.stats().pinned_blocks == 12


def test_parts_of_a_prompt():
    """A block in which a part ends stays whole, if the prompt fills it."""
    engine, clock = engine_of(80)
    asked(engine, text(1, 100), keep=[(50, 100.0), (99, 10.0)])
    assert engine.stats().pinned_blocks == 7 + 12
    clock.now += 20.0
    engine.step()
    assert engine.stats().pinned_blocks == 7
    asked(engine, text(2, 7), keep=10.0)
    assert engine.stats().pinned_blocks == 7, "a prompt of less than a block"


def test_limits():
    """A quarter for a namespace and a half for all: what is beyond is cut at its end."""
    engine, _ = engine_of(40)
    asked(engine, text(1, 120), namespace="a", keep=100.0)
    assert engine.namespace_stats()["a"].pinned_tokens == 80
    asked(engine, text(2, 40), namespace="a", keep=100.0)
    assert engine.namespace_stats()["a"].pinned_tokens == 80
    asked(engine, text(3, 64), namespace="b", keep=100.0)
    asked(engine, text(4, 64), namespace="c", keep=100.0)
    spaces = engine.namespace_stats()
    assert [spaces[name].pinned_tokens for name in "abc"] == [80, 64, 16]
    assert engine.stats().pinned_blocks == 20
    page = exposition(engine.stats(), spaces)
    assert "# TYPE kvcache_pinned_blocks gauge\nkvcache_pinned_blocks 20\n" in page
    assert 'kvcache_namespace_pinned_tokens{namespace="b"} 64\n' in page


@pytest.mark.parametrize("space", [lambda i: "a", lambda i: ("a", f"salt {i}")], ids=["one name", "salts of a key"])
def test_limits_of_one_owner(space, monkeypatch):
    """A key has one share of memory and of the number of pins, whatever salts it sends: others find room."""
    monkeypatch.setattr(pins, "_MOST", 8)
    engine, _ = engine_of(200)
    for number in range(8):
        asked(engine, text(number, 16), WARM, namespace=space(number), keep=100.0)
    assert engine.stats().pinned_blocks == 2 * 4
    asked(engine, text(20, 16), WARM, namespace="b", keep=100.0)
    assert engine.namespace_stats()["b"].pinned_tokens == 16
    monkeypatch.setattr(pins, "_MOST", 100)
    for number in range(30, 38):
        asked(engine, text(number, 80), WARM, namespace=space(number), keep=100.0)
    assert engine.stats().pinned_blocks == 200 // 4 + 2
    asked(engine, text(40, 80), WARM, namespace=("b", "salt"), keep=100.0)
    assert engine.namespace_stats()["b", "salt"].pinned_tokens == 80


def test_pins_give_way_to_a_request_that_would_not_run_otherwise():
    """The one that ends first leaves first, and no more than are needed; none ends for guesses."""
    engine, _ = engine_of(20)
    asked(engine, text(1, 40), namespace="a", keep=300.0)
    asked(engine, text(2, 40), namespace="b", keep=100.0)
    assert engine.stats().pinned_blocks == 10
    large = asked(engine, text(3, 100), sampled(1, 8))
    assert large.finish_reason == "length"
    assert (engine.stats().pinned_blocks, engine.stats().preemptions) == (5, 0)
    assert engine.namespace_stats()["a"].pinned_tokens == 40
    whole = asked(engine, text(4, 150), sampled(2, 10))
    same(whole.completions()[0], Alone(NETWORK, block_size=8)(text(4, 150), sampled(2, 10)))
    assert engine.stats().pinned_blocks == 0
    settled(engine)


def test_a_request_that_grows_takes_pins_before_it_is_preempted():
    engine, _ = engine_of(20, draft=None)
    asked(engine, text(1, 40), namespace="a", keep=300.0)
    requests = [engine.submit(text(number, 40), sampled(number, 24)) for number in (5, 6)]
    run(engine)
    assert (engine.stats().pinned_blocks, engine.stats().preemptions) == (0, 0)
    for request in requests:
        assert request.finish_reason == "length"


def test_clear_and_close():
    engine, _ = engine_of()
    asked(engine, text(1, 64), keep=100.0)
    engine.clear_cache()
    assert (engine.stats().claimed_blocks, engine.stats().cached_blocks) == (0, 0)
    asked(engine, text(1, 64), keep=100.0)
    engine.close()
    settled(engine)


def test_an_interrupt_keeps_pins(monkeypatch):
    engine, clock = engine_of()
    asked(engine, text(1, 64), keep=100.0)
    request = engine.submit(text(1, 80), GREEDY, keep=50.0)
    forward = NETWORK.forward
    monkeypatch.setattr(NETWORK, "forward", lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.setattr(NETWORK, "forward", forward)
    engine.check()
    run(engine)
    same(request.completions()[0], Alone(NETWORK, block_size=8)(text(1, 80), GREEDY))
    assert engine.namespace_stats()[None].pinned_tokens == 80
    clock.now += 1000.0
    engine.step()
    settled(engine)


@pytest.mark.parametrize(
    ("keep", "kind", "message"),
    [
        (-1.0, ValueError, "keep: expected"), (float("nan"), ValueError, "keep: expected"),
        ("9", TypeError, "keep: expected seconds, or pairs of tokens and seconds, got '9'"),
        ([5], TypeError, "keep: expected seconds, or pairs"), ([(0, 1.0)], ValueError, "keep: expected"),
        ([(21, 1.0)], ValueError, r"keep: expected .*20, got 21"), ([(1.5, 1.0)], TypeError, "keep: expected"),
    ],
)
def test_arguments(keep, kind, message):
    engine, _ = engine_of()
    with pytest.raises(kind, match=message):
        engine.submit(text(1, 20), keep=keep)
    assert engine.stats().waiting == 0
    evicting = BatchEngine(NETWORK, eviction_policy=EvictionPolicy.H2O(), kv_budget=64)
    with pytest.raises(ValueError, match=r"keep: expected none with an eviction_policy, got 1\.0"):
        evicting.submit([1, 2], keep=1.0)


class Pinning(RuleBasedStateMachine):
    """Pins of few texts in a pool that has room for all that runs at a time: their times and their limits alone count.

    The twin is a list of `(namespace, tokens, until, seconds)`.
    """

    def __init__(self):
        super().__init__()
        self.engine, self.clock = engine_of(60)
        self.twin = []

    @rule(
        number=st.integers(0, 2), length=st.integers(1, 60), space=st.sampled_from("ab"),
        keep=st.sampled_from([None, 5.0, 20.0]),
    )
    def ask(self, number, length, space, keep):
        prompt, now = text(number, length), self.clock.now
        request = asked(self.engine, prompt, WARM if keep else ONE, namespace=space, keep=keep)
        best = 0
        for i, (owner, tokens, until, seconds) in enumerate(self.twin):
            if owner == space and len(tokens) <= length and (tokens == prompt[: len(tokens)]).all():
                best = max(best, len(tokens))
                self.twin[i] = owner, tokens, max(until, now + seconds), seconds
        assert request.metrics.cached_tokens >= min(best, (length - 1) // 8 * 8)
        if keep and length >= 8:
            self.pin(space, prompt, now + keep, keep)

    def pin(self, space, prompt, until, seconds):
        full = len(prompt) // 8 * 8
        begun = [p for p in self.twin if p[0] == space and len(p[1]) <= full and (p[1] == prompt[: len(p[1])]).all()]
        within = [p for p in begun if p[2] <= until]
        covering = [
            p for p in self.twin
            if p[0] == space and p[2] >= until and len(p[1]) >= full and (p[1][:full] == prompt[:full]).all()
        ]
        rest = [p for p in self.twin if not any(p is each for each in within)]
        used, mine = sum(len(p[1]) for p in rest), sum(len(p[1]) for p in rest if p[0] == space)
        room = max(0, min(15 * 8 - mine, 30 * 8 - used))
        stop = min(full, room)
        if covering or stop < max([1, *(len(p[1]) for p in within)]):
            return
        self.twin = [*rest, (space, prompt[:stop], until, seconds)]

    @rule(seconds=st.sampled_from([1.0, 4.0, 30.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.engine.step()
        self.twin = [p for p in self.twin if p[2] > self.clock.now]

    @rule(number=st.integers(10, 20))
    def others_come(self, number):
        crowd(self.engine, number, 1)

    @precondition(lambda self: self.twin)
    @rule()
    def clear(self):
        self.engine.clear_cache()
        self.twin = []

    @invariant()
    def the_pins_are_those_of_the_twin(self):
        for space in "ab":
            found = self.engine.namespace_stats().get(space)
            want = sum(len(p[1]) for p in self.twin if p[0] == space)
            assert (0 if found is None else found.pinned_tokens) == want
        assert self.engine.stats().pinned_blocks == sum(len(p[1]) for p in self.twin) // 8
        self.engine.check()


TestPinning = Pinning.TestCase
TestPinning.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
