"""Interrupts at every line of a step, and networks that fail: every other request gives what it gives alone."""

import asyncio
import gc
import traceback
from dataclasses import replace

import numpy as np
import pytest
from engines import Failing
from serving import GREEDY, Alone, Clock, prompts, repeating, run, same, sampled, settled
from state_networks import StateNetwork
from subjects.interrupts import Lines, places
from windowed_networks import Windowed

from kvcache import BatchEngine, EvictionPolicy, InvalidOperationError, SamplingParams

pytestmark = pytest.mark.one_build

ASKED = [
    (prompt, (sampled, repeating)[i % 2](i, 6 + i % 2 * 14, logprobs=1)) for i, prompt in enumerate(prompts(9, 5, 40))
]


class Served:
    """Requests in a pool that is too small for all, some of them running."""

    def __init__(self, model, **options):
        self.engine = BatchEngine(model, num_blocks=6, seed=3, clock=Clock(), **options)
        self.requests = [self.engine.submit(*each) for each in ASKED]
        self.samples = self.engine.submit(ASKED[1][0], sampled(50, 6, logprobs=1), n=2)

    def all(self):
        """Run everything: the calls that are interrupted."""
        for request in [*self.requests, self.samples]:
            request.result()

    def verify(self, alone):
        gc.collect()
        for request, each in zip(self.requests, ASKED, strict=True):
            same(request.completions()[0], alone(*each))
        for i, got in enumerate(self.samples.completions()):
            same(got, alone(ASKED[1][0], sampled(50 + i, 6, logprobs=1)))
        settled(self.engine)
        assert not self.engine._steps._pending


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["plain", "residual", "windows"])
def test_interrupted_at_every_line(network, long, kind):
    """Ctrl-C between any two lines; the next call goes on, and the texts are the same.

    The errors are kept, as a shell keeps the last one, and with them the frames of the calls that they ended: nothing
    that such a frame refers to holds a block.
    """
    network = Windowed(network, 9) if kind == "windows" else network
    options = {"dtype": "q4", "residual_length": 12} if kind == "residual" else {}
    alone = Alone(network, **options)
    served = Served(network, **options)
    served.all()
    served.verify(alone)
    served = Served(network, **options)
    with Lines() as lines:
        served.all()
    chosen = places(lines.seen, every=long)
    chosen = chosen if long else chosen[:: 24 * (1 + (kind != "plain"))]
    for stop in chosen:
        served, lines, kept = Served(network, **options), Lines(stop), []
        try:
            with lines:
                served.all()
        except KeyboardInterrupt as error:
            kept.append(error)
        served.engine.check()
        assert lines.handled_at, "the run was another one"
        try:
            served.all()
            served.verify(alone)
        except Exception as error:
            raise AssertionError(f"interrupted at {lines.handled_at}") from error


class Refusing:
    """A network that fails in each pass with a chosen token, before or after the attention of its last layer."""

    def __init__(self, network, token, after):
        self.network, self.config, self.token, self.after = network, network.config, token, after
        if hasattr(network, "attention"):
            self.attention = network.attention
        self.together = 0  # passes over several texts that failed

    def forward(self, tokens, positions, attend, logits):
        def refusing(layer, *args):
            refused = layer == self.config.num_layers - 1 and self.token in tokens
            self.together += refused and len(np.unique(positions)) < len(positions)
            if refused and not self.after:
                raise ArithmeticError("broken")
            mixed = attend(layer, *args)
            if refused:
                raise ArithmeticError("broken")
            return mixed

        return self.network.forward(tokens, positions, refusing, logits)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["plain", "residual", "windows", "evicting"])
def test_a_request_with_which_the_network_fails(network, kind, after):
    """It ends with the error, and keeps its tokens; those beside it give what they give alone."""
    network = Windowed(network, 9) if kind == "windows" else network
    options = {
        "residual": {"dtype": "q4", "residual_length": 12},
        "evicting": {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 16},
    }.get(kind, {})
    alone = Alone(network, **options)
    expected = [alone(*each) for each in ASKED]
    run_tokens = [{*map(int, prompt), *one.tokens[:-1]} for (prompt, _), one in zip(ASKED, expected, strict=True)]
    token = next(t for t in sorted(set.union(*run_tokens)) if sum(t in each for each in run_tokens) == 2)
    blocks = {} if kind == "evicting" else {"num_blocks": 12}
    model = Refusing(network, token, after)
    engine = BatchEngine(model, seed=3, clock=Clock(), **blocks, **options)
    requests = [engine.submit(*each) for each in ASKED]
    run(engine)
    for request, one, own in zip(requests, expected, run_tokens, strict=True):
        if token in own:
            with pytest.raises(ArithmeticError, match="broken"):
                request.result()
            with pytest.raises(ArithmeticError, match="broken"):
                list(request)
            assert request.tokens == one.tokens[: len(request.tokens)]
        else:
            same(request.completions()[0], one)
    assert model.together > 0
    settled(engine)


def test_the_error_of_a_request_keeps_no_frame_of_those_who_ask_for_its_result(network):
    model = Failing(network, ArithmeticError("broken"))
    request = BatchEngine(model, num_blocks=6).submit(*ASKED[0])
    model.countdown = 1
    lengths = []
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="broken") as caught:
            request.result()
        lengths.append(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert len(set(lengths)) == 1


def test_a_thread_outlives_a_network_that_fails(network):
    model = Failing(network, ArithmeticError("broken"))
    with BatchEngine(model, num_blocks=20) as engine:
        model.countdown = 3
        with pytest.raises(ArithmeticError, match="broken"):
            engine.submit(*ASKED[0]).result()
        same(engine.submit(*ASKED[0]).completions()[0], Alone(network)(*ASKED[0]))


class Own(BaseException):
    """An exception of a caller that is no `Exception`."""


EXITS = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, Own]


@pytest.mark.parametrize("kind", EXITS)
def test_a_thread_outlives_code_that_exits(network, kind):
    """An exception that is no `Exception` ends the request whose code raised it, and nothing else."""

    def leaves(text, logits):
        if len(text) == 5:
            raise kind("bye")

    asked = np.arange(9), SamplingParams(temperature=0.0, max_tokens=30)
    with BatchEngine(network, num_blocks=20) as engine:
        other = engine.submit(*asked)
        bad = engine.submit([1, 2, 3], SamplingParams(max_tokens=9, logits_processor=leaves))
        with pytest.raises(RuntimeError, match=f"logits_processor: expected a result, got {kind.__name__}") as caught:
            bad.result(timeout=60)
        assert isinstance(caught.value.__cause__, kind)
        assert engine.is_running
        assert len(bad.tokens) == 2
        assert other.result(timeout=60) == Alone(network)(*asked).tokens
    settled(engine)


@pytest.mark.parametrize("kind", EXITS)
def test_a_thread_outlives_a_network_that_exits(network, kind):
    model = Failing(network, kind("bye"))
    with BatchEngine(model, num_blocks=20) as engine:
        model.countdown = 3
        with pytest.raises(RuntimeError, match=f"model.forward: expected a result, got {kind.__name__}"):
            engine.submit(*ASKED[0]).result(timeout=60)
        same(engine.submit(*ASKED[0]).completions(timeout=60)[0], Alone(network)(*ASKED[0]))


def test_an_interrupt_of_the_callers_own_thread_is_one(network):
    """Without a thread of the engine a step runs in that of the caller, where Ctrl-C may come at any place."""
    raised = []

    def interrupts(text, logits):
        if not raised:
            raised.append(1)
            raise KeyboardInterrupt

    engine = BatchEngine(network, num_blocks=20)
    request = engine.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, logits_processor=interrupts))
    with pytest.raises(KeyboardInterrupt):
        request.result()
    assert request.result() == Alone(network)(np.array([1, 2, 3]), SamplingParams(temperature=0.0, max_tokens=4)).tokens
    settled(engine)


@pytest.mark.parametrize("kind", ["plain", "state"])
def test_an_interrupt_behind_the_last_draw(network, kind):
    """Nothing more is drawn, also where the layers have lost their state and the text would run again."""
    model = StateNetwork("one of each") if kind == "state" else network
    engine, params = BatchEngine(model, num_blocks=60), replace(GREEDY, max_tokens=3)
    asked, ran, raised = [np.arange(3, 9), np.arange(4, 20)], engine._pool.ran, []

    def interrupted(text, *counts):
        if text.num_tokens == text.num_prompt + 3 and not raised:
            raised.append(1)
            raise KeyboardInterrupt
        ran(text, *counts)

    engine._pool.ran = interrupted
    requests = [engine.submit(prompt, params) for prompt in asked]
    with pytest.raises(KeyboardInterrupt):
        requests[0].result()
    for request, prompt in zip(requests, asked, strict=True):
        assert request.result() == Alone(model)(prompt.astype(np.uint32), params).tokens
    settled(engine)


def test_logits_of_another_shape(network):
    class Wrong:
        config = network.config

        def forward(self, tokens, positions, attend, logits):
            return np.zeros((3, 7), np.float32)

    engine = BatchEngine(Wrong(), num_blocks=6)
    with pytest.raises(ValueError, match=r"model.forward: expected logits of shape \(1, "):
        engine.submit(*ASKED[0]).result()
    settled(engine)


def test_a_call_that_would_wait_for_its_own_step_is_refused(network):
    """A logits processor runs inside a step; requests may be submitted there, and cancelled."""
    engine, made = BatchEngine(network, num_blocks=20, max_queue=3, max_running=1), []

    def nested(text, logits):
        if len(made) < 3:
            made.append(engine.submit([4, 5], GREEDY))
        for call in (engine.step, made[-1].result, lambda: engine.generate_batch([[1], [2]], GREEDY, progress=False)):
            with pytest.raises(InvalidOperationError, match="expected no call of this object"):
                call()
        made[0].cancel()

    outer = engine.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, logits_processor=nested))
    assert len(outer.result()) == 4
    assert [request.finish_reason for request in made] == ["cancelled", None, None]
    assert made[1].result() == made[2].result() == Alone(network)(np.array([4, 5]), GREEDY).tokens
    settled(engine)


def test_a_cache_that_another_thread_clears(network, monkeypatch):
    """Between a failed append and an eviction: then blocks are free, though none was evicted here."""
    engine = BatchEngine(network, num_blocks=6, block_size=8)
    engine.submit(np.arange(40), SamplingParams(max_tokens=1)).result()
    evict, cleared = engine._pool.block_index.pages.evict, []

    def cleared_before(count):
        if not cleared and any(work.num_new for work in engine._steps._scheduler.running):
            cleared.append(engine.clear_cache())
        return evict(count)

    monkeypatch.setattr(engine._pool.block_index.pages, "evict", cleared_before)
    asked = np.arange(8) + 60, SamplingParams(temperature=0.0, max_tokens=30)
    assert engine.submit(*asked).result() == Alone(network)(*asked).tokens
    assert cleared
    settled(engine)
