"""Invalid arguments, failing networks, exhausted memory: an engine is unchanged afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from engines import GREEDY, PROMPT, Failing, assert_same_state, state

from kvcache.engine import InferenceEngine, SamplingParams
from kvcache.errors import OutOfMemoryError

pytestmark = pytest.mark.one_build

# ---------------------------------------------------------------- invalid arguments


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], ValueError),
        ([1, 256], ValueError),
        ([1, -1], ValueError),
        ([2**40], ValueError),
        ([[1, 2]], TypeError),
        (np.ones((2, 2), int), ValueError),
        ([1.0], TypeError),
        ([True], TypeError),
        ("text", (TypeError, ValueError)),
        (None, (TypeError, ValueError)),
        ([1] * 514, ValueError),
    ],
    ids=repr,
)
def test_bad_prompts_change_nothing(engine, prompt, error):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    calls = engine.generate, engine.stream, engine.score, lambda tokens: engine.prefill_from_pos(tokens, 0)
    for call in calls:
        with pytest.raises(error):
            call(prompt)
        assert_same_state(engine, before)


def test_bad_positions_change_nothing(engine):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    for pos, error in ((38, ValueError), (-1, ValueError), (1.0, TypeError), (None, TypeError)):
        with pytest.raises(error, match="pos"):
            engine.prefill_from_pos([1], pos)
        with pytest.raises(error, match="pos"):
            engine.decode_step(1, pos)
    with pytest.raises(ValueError, match=r"max_position_embeddings \(512\), got 500 tokens from position 37"):
        engine.prefill_from_pos([1] * 500, 37)
    with pytest.raises(ValueError, match="from 0 to 255, got 256"):
        engine.decode_step(256, 37)
    assert_same_state(engine, before)


def test_bad_params_change_nothing(engine):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    for call in (engine.generate, engine.stream):
        with pytest.raises(TypeError, match="params: expected a SamplingParams, got dict"):
            call(PROMPT, {"temperature": 0})
    assert_same_state(engine, before)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"seed": -1}, ValueError),
        ({"seed": 0.5}, TypeError),
        ({"prefill_chunk": 0}, ValueError),
        ({"block_size": 0}, ValueError),
        ({"num_blocks": 0}, ValueError),
        ({"num_blocks": 1.5}, TypeError),
        ({"sampling_params": 3}, TypeError),
        ({"dtype": "f8"}, ValueError),
        ({"eviction": "LRU"}, TypeError),
    ],
    ids=str,
)
def test_bad_options(network, options, error):
    with pytest.raises(error):
        InferenceEngine(network, **options)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [OutOfMemoryError(1, 0), RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("pos", [0, 5, 16, 37])
@pytest.mark.parametrize("attends", [1, 2, 3, 7])
def test_failure_in_the_middle_of_prefill(make, network, error, pos, attends):
    model = Failing(network, error)
    engine = make(model, prefill_chunk=7)
    engine.prefill_from_pos(PROMPT, 0)
    expected = engine.prefill_from_pos(PROMPT, 37)
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    model.countdown = attends
    with pytest.raises(type(error)):
        engine.prefill_from_pos(PROMPT, pos)
    assert_same_state(engine, before)
    np.testing.assert_allclose(engine.prefill_from_pos(PROMPT, 37), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pos", [5, 32, 37])
def test_failure_in_a_step(make, network, pos):
    model = Failing(network, RuntimeError("broken"))
    engine = make(model)
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    model.countdown = 2
    with pytest.raises(RuntimeError, match="broken"):
        engine.decode_step(1, pos)
    assert_same_state(engine, before)


def test_failure_in_generate_and_score_leaves_an_empty_sequence(make, network):
    model = Failing(network, RuntimeError("broken"))
    engine = make(model, prefill_chunk=16)
    expected = engine.generate(PROMPT, GREEDY)
    for call, attends in ((engine.generate, 3), (engine.generate, 15), (engine.score, 3)):
        engine.generate(PROMPT, GREEDY)
        model.countdown = attends
        with pytest.raises(RuntimeError, match="broken"):
            call(PROMPT)
        assert engine.num_tokens == 0
        engine.check()
        assert engine.generate(PROMPT, GREEDY) == expected


def test_failure_in_a_stream_keeps_the_delivered_tokens(make, network):
    model = Failing(network, RuntimeError("broken"))
    engine = make(model)
    expected = engine.generate(PROMPT, GREEDY)
    model.countdown = 2 + 2 * 3 + 1  # two layers: the prompt, three steps, and one layer more
    delivered = []
    with pytest.raises(RuntimeError, match="broken"):
        delivered.extend(engine.stream(PROMPT, GREEDY))
    assert delivered == expected[:4]
    assert engine.num_tokens == 37 + 3
    logits = engine.decode_step(delivered[-1], engine.num_tokens)
    assert int(np.argmax(logits)) == expected[4]


def test_prompt_beyond_memory_is_refused_before_work(make, network):
    model = Failing(network, AssertionError("the network was run"))
    engine = make(model, num_blocks=4, prefill_chunk=16)
    engine.prefill_from_pos(PROMPT[:20], 0)
    before = state(engine)
    model.countdown = 1
    with pytest.raises(OutOfMemoryError) as raised:
        engine.prefill_from_pos([1] * 100, 20)
    assert (raised.value.requested, raised.value.available) == (6, 2)
    assert_same_state(engine, before)


def test_memory_runs_out_while_decoding(make):
    engine = make(num_blocks=3)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    delivered = []
    with pytest.raises(OutOfMemoryError):
        delivered.extend(engine.stream(PROMPT, params))
    assert engine.num_tokens == 48
    assert len(delivered) == 12  # eleven of them are in the cache
    engine.check()
    assert len(engine.generate(PROMPT, GREEDY)) == 10


def test_reclaim_makes_room(make):
    engine = make(num_blocks=4)
    engine.cache.allocate(7, 40)
    with pytest.raises(OutOfMemoryError):
        engine.generate(PROMPT, GREEDY)
    asked = []

    def reclaim(error):
        asked.append((error.requested, error.available))
        if len(asked) == 1:
            engine.cache.free(7)
        return len(asked) == 1

    engine.reclaim = reclaim
    assert len(engine.generate(PROMPT, GREEDY)) == 10
    assert asked == [(3, 1)]
    with pytest.raises(OutOfMemoryError):
        engine.generate([1] * 100, GREEDY)
    assert len(asked) == 2


def test_wrong_logits_are_named(make, network):
    model = SimpleNamespace(config=network.config, forward=lambda *args: network.forward(*args)[0])
    with pytest.raises(ValueError, match=r"expected logits of shape \(1, 256\), got \(256,\)"):
        make(model).generate(PROMPT)


def test_logits_with_nan(make, network):
    def forward(*args):
        return network.forward(*args) * np.float32(np.nan)

    engine = make(SimpleNamespace(config=network.config, forward=forward))
    with pytest.raises(ValueError, match="finite maximum"):
        engine.generate(PROMPT)
    assert engine.num_tokens == 0
