"""The engine: requests, step-by-step calls, and one engine with several streams and threads."""

from __future__ import annotations

import inspect
import json
import shutil
import threading
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
from engines import GREEDY, PROMPT, assert_same_state, state
from gguf_files import convert
from places import GOLDEN

from kvcache import BatchEngine
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Settings
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.texts.kv_settings import Options

# ---------------------------------------------------------------- settings


def test_settings_are_the_keywords_of_each_engine(network):
    """One object stands for them; a keyword beside it counts more. Signatures and types name all of them."""
    settings, names = Settings(dtype="q4", block_size=8, num_blocks=40), [each.name for each in fields(Settings)]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=10)
    made = [
        [make(network, settings=settings), make(network, dtype="q4", block_size=8, num_blocks=40)]
        for make in (InferenceEngine, lambda *given, **more: PrefixCachedEngine(InferenceEngine(*given, **more), 40))
    ]
    found = [engine.generate(PROMPT, params) for pair in made for engine in pair]
    found += [PrefixCachedEngine(network, 40, settings=settings).generate(PROMPT, params)]
    found += [BatchEngine(network, settings=settings).generate_batch([PROMPT], params, progress=False)[0]]
    assert found == found[:1] * 6
    with pytest.raises(ValueError, match="settings: expected None with an engine, which has its own"):
        PrefixCachedEngine(made[0][0], 40, settings=settings)
    assert [engine.memory() for engine in made[0][:1]] == [made[0][1].memory()]
    other = InferenceEngine(network, settings=settings, dtype="f16").cache
    assert (other.key_dtype, other.block_size, other.total_blocks) == ("f16", 8, 40)
    assert set(Options.__annotations__) == set(names)
    for kind in (InferenceEngine, BatchEngine):
        assert {*names} <= {*inspect.signature(kind).parameters}
        with pytest.raises(TypeError, match="dtyp: expected an argument of the engine or one of dtype, "):
            kind(network, dtyp="q4")
        with pytest.raises(TypeError, match="settings: expected a"):
            kind(network, settings={"dtype": "q4"})


def test_a_checkpoint_takes_the_calibration_of_settings(tmp_path):
    tokens = np.arange(100, dtype=np.uint32) % 200
    settings, path = Settings("q4", calibrate=tokens), convert(GOLDEN / "llama", tmp_path / "x.gguf")
    for make in (partial(InferenceEngine.from_pretrained, GOLDEN / "llama"), partial(InferenceEngine.from_gguf, path)):
        one, other = (
            make(**options).cache.calibration
            for options in ({"settings": settings}, {"dtype": "q4", "calibrate": tokens})
        )
        np.testing.assert_array_equal(one.moments, other.moments)
        assert make(settings=settings, calibrate=False).cache.calibration is None


# ---------------------------------------------------------------- requests


def test_generate_again_gives_the_same(engine):
    first = engine.generate(PROMPT, GREEDY)
    engine.generate(PROMPT[5:], GREEDY)
    assert engine.generate(PROMPT, GREEDY) == first
    assert len(first) == 10
    assert all(type(token) is int for token in first)
    assert engine.prefill_token_count == 37 + 32 + 37
    assert engine.num_tokens == 37 + 9  # the last token was not run
    engine.check()


def test_stream_is_generate(engine):
    assert list(engine.stream(PROMPT, GREEDY)) == engine.generate(PROMPT, GREEDY)


def test_prompt_types(engine):
    expected = engine.generate(PROMPT, GREEDY)
    for prompt in (PROMPT.tolist(), tuple(PROMPT.tolist()), PROMPT.astype(np.int64), range(3, 40)):
        assert engine.generate(prompt, GREEDY) == expected


def test_max_tokens(engine):
    whole = engine.generate(PROMPT, GREEDY)
    for count in (0, 1, 2):
        params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=count)
        assert engine.generate(PROMPT, params) == whole[:count]
        assert engine.num_tokens == len(PROMPT) + max(0, count - 1)


def test_stop_tokens_end_and_are_not_returned(engine):
    whole = engine.generate(PROMPT, GREEDY)
    stop = whole[4]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, stop_token_ids=(stop, 10**9))
    assert engine.generate(PROMPT, params) == whole[: whole.index(stop)]


def test_eos_of_the_checkpoint_stops(tmp_path, network):
    whole = InferenceEngine(network).generate(PROMPT, GREEDY)
    shutil.copytree(GOLDEN / "llama", tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [whole[3]]}))
    assert InferenceEngine.from_pretrained(tmp_path).generate(PROMPT, GREEDY) == whole[: whole.index(whole[3])]


def test_text_ends_where_positions_end(engine):
    limit = engine.config.max_position_embeddings
    prompt = np.arange(limit - 3) % 256
    params = SamplingParams(temperature=0.0, max_tokens=50)
    assert len(engine.generate(prompt, params)) == 4  # three more positions, and the token after the last of them
    assert engine.num_tokens == limit
    assert len(engine.generate(np.arange(limit) % 256, params)) == 1


def test_own_sampling_params_are_the_default(make):
    assert make(sampling_params=GREEDY).generate(PROMPT) == make().generate(PROMPT, GREEDY)


def test_seeds(make):
    params = SamplingParams(temperature=1.5, max_tokens=12)
    one, other = make(seed=1), make(seed=2)
    first, second = one.generate(PROMPT, params), one.generate(PROMPT, params)
    assert first != second  # requests have different random numbers
    assert first != other.generate(PROMPT, params)  # and so have engines
    again = make(seed=1)
    assert [again.generate(PROMPT, params), again.generate(PROMPT, params)] == [first, second]
    fixed = SamplingParams(temperature=1.5, max_tokens=12, seed=5)
    assert one.generate(PROMPT, fixed) == other.generate(PROMPT, fixed) == one.generate(PROMPT, fixed)


def test_the_seed_is_drawn_when_the_stream_is_made(make):
    """Two streams that run in the opposite order of their creation keep their seeds."""
    params = SamplingParams(temperature=1.5, max_tokens=6)
    expected = make()
    first, second = expected.generate(PROMPT, params), expected.generate(PROMPT, params)
    engine = make()
    streams = engine.stream(PROMPT, params), engine.stream(PROMPT, params)
    assert list(streams[1]) == second
    assert list(streams[0]) == first


def test_repetition_penalty_counts_the_prompt(engine):
    logits = engine.prefill_from_pos(PROMPT, 0)
    likeliest = int(np.argmax(logits))
    prompt = np.append(PROMPT, likeliest)
    engine.reset()
    favourite = int(np.argmax(engine.prefill_from_pos(prompt, 0)))
    strong = SamplingParams(temperature=0.0, repetition_penalty=1000.0, max_tokens=30)
    new = engine.generate(np.append(prompt, favourite), strong)
    assert len(set(new)) == len(new) == 30
    assert not set(new) & set(prompt.tolist())


# ---------------------------------------------------------------- step by step


def test_steps_agree_with_whole_prompts(engine):
    whole = engine.prefill_from_pos(PROMPT, 0)
    engine.reset()
    assert engine.num_tokens == 0
    engine.prefill_from_pos(PROMPT[:20], 0)
    for pos in range(20, 36):
        engine.decode_step(int(PROMPT[pos]), pos)
    last = engine.prefill_from_pos(PROMPT[36:], 36)
    np.testing.assert_allclose(last, whole, rtol=0, atol=1e-4)
    assert last.shape == (256,)
    assert last.dtype == np.float32
    assert engine.prefill_token_count == 37 + 20 + 1


@pytest.mark.parametrize("pos", [0, 1, 15, 16, 17, 32, 36])
def test_going_back(engine, pos):
    """A position before the end cuts the sequence there; the rest has no effect."""
    expected = engine.prefill_from_pos(PROMPT, 0)
    engine.prefill_from_pos(PROMPT[::-1].copy(), 37)
    np.testing.assert_allclose(engine.prefill_from_pos(PROMPT[pos:], pos), expected, rtol=0, atol=1e-4)
    assert engine.num_tokens == 37
    np.testing.assert_allclose(engine.decode_step(int(PROMPT[36]), 36), expected, rtol=0, atol=1e-4)
    engine.check()


def test_going_back_in_a_full_cache(network):
    """Run the whole context, then the last token again: the default cache has room for one copied block."""
    engine = InferenceEngine(network)
    limit = engine.config.max_position_embeddings
    tokens = np.arange(limit) % 256
    expected = engine.prefill_from_pos(tokens, 0)
    again = engine.decode_step(int(tokens[-1]), limit - 1)
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-4)
    engine.check()


def test_score(engine):
    logits = np.array([engine.decode_step(token, pos) for pos, token in enumerate(PROMPT[:-1])], np.float64)
    expected = logits[np.arange(36), PROMPT[1:]] - np.log(np.exp(logits).sum(axis=1))
    count = engine.prefill_token_count
    scores = engine.score(PROMPT)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4)
    assert engine.num_tokens == 36
    assert engine.prefill_token_count == count
    assert engine.score([5]).shape == (0,)
    limit = engine.config.max_position_embeddings
    assert engine.score(np.zeros(limit + 1, int)).shape == (limit,)


def test_decode_continues_from_any_logits(engine):
    expected = engine.generate(PROMPT, GREEDY)
    engine.reset()
    engine.prefill_from_pos(PROMPT[:20], 0)
    logits = engine.prefill_from_pos(PROMPT[20:], 20)
    assert list(engine.decode(logits, GREEDY, PROMPT)) == expected


def test_begin_replaces_the_sequence(engine):
    engine.prefill_from_pos(PROMPT, 0)
    expected = engine.prefill_from_pos(PROMPT[20:25], 20)
    old = engine.seq_id

    def share(cache, seq_id):
        cache.fork(old, seq_id)
        cache.truncate(seq_id, 20)
        return 20

    assert engine.begin(share) == engine.num_tokens == 20
    np.testing.assert_allclose(engine.prefill_from_pos(PROMPT[20:25], 20), expected, rtol=0, atol=1e-4)
    engine.check()


@pytest.mark.parametrize("created", [False, True])
def test_begin_that_fails_changes_nothing(engine, created):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)

    def share(cache, seq_id):
        if created:
            cache.allocate(seq_id, 5)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        engine.begin(share)
    assert_same_state(engine, before)


def test_begin_checks_the_new_sequence(engine):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    with pytest.raises(ValueError, match="of 5 tokens, got no sequence"):
        engine.begin(lambda cache, seq_id: 5)
    with pytest.raises(ValueError, match="of 5 tokens, got 3 tokens"):
        engine.begin(lambda cache, seq_id: cache.allocate(seq_id, 3) or 5)
    assert_same_state(engine, before)


def test_version_counts_changes(engine):
    versions = [engine.version]
    for change in (
        lambda: engine.prefill_from_pos(PROMPT, 0),
        lambda: engine.decode_step(1, 37),
        lambda: engine.decode_step(1, 5),
        engine.reset,
        lambda: engine.enlarge(1),
    ):
        change()
        versions.append(engine.version)
    assert sorted(set(versions)) == versions
    with pytest.raises(ValueError, match="tokens"):
        engine.prefill_from_pos([], 0)
    assert engine.version == versions[-1]


def test_enlarge(make):
    engine = make(num_blocks=2)
    engine.reclaim = lambda error: False
    stream = engine.stream(PROMPT[:5], GREEDY)
    next(stream)
    engine.enlarge(3)
    assert (engine.cache.total_blocks, engine.num_tokens) == (5, 0)
    assert engine.reclaim is not None
    with pytest.raises(InvalidOperationError):
        next(stream)
    assert engine.generate(PROMPT, GREEDY) == make().generate(PROMPT, GREEDY)
    engine.check()
    with pytest.raises(ValueError, match="blocks"):
        engine.enlarge(-1)


def test_reseed(make):
    params = SamplingParams(temperature=1.5, max_tokens=8)
    engine = make(seed=1)
    first = engine.generate(PROMPT, params)
    engine.reseed(1)
    assert engine.generate(PROMPT, params) == first
    engine.reseed(2)
    assert engine.generate(PROMPT, params) == make(seed=2).generate(PROMPT, params)


# ---------------------------------------------------------------- one engine, several streams and threads


def test_an_interrupted_stream_raises(engine):
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    engine.prefill_from_pos(PROMPT[5:], 0)
    before = state(engine)
    with pytest.raises(InvalidOperationError, match="another call"):
        next(stream)
    assert_same_state(engine, before)


def test_a_second_stream_of_a_thread_is_refused_and_the_first_continues(engine):
    expected = engine.generate(PROMPT, GREEDY)
    stream = engine.stream(PROMPT, GREEDY)
    got = [next(stream)]
    for begin in (lambda: engine.generate(PROMPT[5:], GREEDY), lambda: next(engine.stream(PROMPT[5:], GREEDY))):
        with pytest.raises(InvalidOperationError, match="stream"):
            begin()
    assert got + list(stream) == expected
    assert engine.generate(PROMPT, GREEDY) == expected


def test_a_stream_whose_sequence_changed_gives_its_turn_back(engine):
    expected = engine.generate(PROMPT, GREEDY)
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    engine.reset()
    assert engine.generate(PROMPT, GREEDY) == expected
    with pytest.raises(InvalidOperationError, match="another call"):
        next(stream)


def test_streams_of_other_threads_wait_for_their_turn(engine):
    prompts = [PROMPT[i:] for i in range(5)]
    expected = [engine.generate(prompt, GREEDY) for prompt in prompts]
    found, failed = [[] for _ in prompts], []

    def work(i):
        try:
            for _ in range(5):
                found[i].append(list(engine.stream(prompts[i], GREEDY)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert found == [[text] * 5 for text in expected]


@pytest.mark.parametrize("end", ["close", "drop", "exhaust", "fail"])
def test_other_threads_wait_until_a_stream_ends(engine, end):
    stream = engine.stream(PROMPT, GREEDY)
    first, done = next(stream), []
    other = threading.Thread(target=lambda: (engine.reset(), done.append(engine.generate(PROMPT, GREEDY))))
    other.start()
    other.join(0.05)
    assert not done
    if end == "close":
        stream.close()
    elif end == "drop":
        del stream
    elif end == "exhaust":
        rest = list(stream)
    else:
        with pytest.raises(KeyError):
            stream.throw(KeyError("of the caller"))
    other.join(30)
    assert done
    assert done[0][0] == first
    assert end != "exhaust" or [first, *rest] == done[0]


def test_a_stream_may_continue_in_another_thread(engine):
    expected = engine.generate(PROMPT, GREEDY)
    stream = engine.stream(PROMPT, GREEDY)
    got = [next(stream)]
    thread = threading.Thread(target=lambda: got.extend(stream))
    thread.start()
    thread.join()
    assert got == expected
    assert engine.generate(PROMPT, GREEDY) == expected


def test_a_prompt_above_half_of_the_pool_runs_again_from_its_start(network):
    engine = InferenceEngine(network, num_blocks=4, block_size=16)
    tokens = np.tile(PROMPT, 2)
    first = engine.prefill_from_pos(tokens[:52], 0)
    for start in (0, 20, 51):
        again = engine.prefill_from_pos(tokens[start:52], start)
        np.testing.assert_allclose(again, first, rtol=0, atol=1e-4)
        engine.check()
    before = state(engine)
    with pytest.raises(OutOfMemoryError):
        engine.prefill_from_pos(tokens[:65], 0)
    assert_same_state(engine, before)


def test_another_step_interrupts_a_stream(engine):
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    engine.decode_step(1, 37)
    with pytest.raises(InvalidOperationError):
        next(stream)


def test_abandoned_stream(engine):
    expected = engine.generate(PROMPT, GREEDY)
    next(engine.stream(PROMPT, GREEDY))
    assert engine.generate(PROMPT, GREEDY) == expected


def test_threads_share_an_engine(engine):
    prompts = [PROMPT[i:] for i in range(4)]
    expected = [engine.generate(prompt, GREEDY) for prompt in prompts]
    found = [None] * 4

    def work(i):
        for _ in range(5):
            found[i] = engine.generate(prompts[i], GREEDY)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    engine.check()
