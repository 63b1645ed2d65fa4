"""Texts with states: what runs again, what is kept, failures, and the bits of the plain twin throughout."""

import gc

import numpy as np
import pytest
from serving import Alone, Clock, repeating, run, same, sampled, settled
from state_networks import FULL, KINDS, VOCABULARY, StateNetwork

from kvcache import BatchEngine, EvictionPolicy, InferenceEngine, InvalidOperationError, PrefixCachedEngine
from kvcache.engine import SamplingParams
from kvcache.texts.kinds.state import page_bytes

NONE = SamplingParams(max_tokens=0)
FOUR = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)
RECURRENT = [kind for kind in KINDS if any(isinstance(each, int) for each in KINDS[kind])]


def prompt(seed, n):
    return np.random.default_rng(seed).integers(0, VOCABULARY, n).astype(np.uint32)


def cached(kind="one of each", blocks=200, model=None, **options):
    engine = InferenceEngine(model or StateNetwork(kind), **{"prefill_chunk": 24, "num_blocks": 40} | options)
    return PrefixCachedEngine(engine, blocks, strict=True)


def ran(engine, tokens, alone=None, params=FOUR):
    """The tokens of a prompt that run; the answer is that of the prompt alone."""
    found = engine.complete(tokens, params)
    if alone is not None:
        same(found, alone(tokens, params))
    gc.collect()
    engine.check()
    return len(tokens) - found.cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_alone_in_a_batch_and_after_a_hit_a_text_has_the_same_bits(kind):
    model = StateNetwork(kind)
    alone, engine, one = Alone(model), BatchEngine(model, draft=("ngram", model), clock=Clock()), cached(model=model)
    asked = [(np.r_[prompt(0, 40 + i), prompt(i, 9)], repeating(i, 12, logprobs=1)) for i in range(6)]
    for _ in range(2):
        requests = [engine.submit(*each) for each in asked]
        run(engine)
        for request, each in zip(requests, asked, strict=True):
            same(request.completions()[0], alone(*each))
            same(one.complete(*each), alone(*each))
    assert all(request.completions()[0].cached_tokens > 40 for request in requests)
    assert engine.stats().draft_tokens > engine.stats().accepted_tokens > 0
    settled(engine)
    one.check()


@pytest.mark.parametrize("kind", RECURRENT)
def test_an_answer_continues_where_it_ended(kind):
    """The next turn has the prompt and the answer, of which the last token has not run; 33 is the end of no block."""
    engine, alone = cached(kind), Alone(StateNetwork(kind))
    text = prompt(0, 33)
    assert ran(engine, text, alone) == 33
    for turn in range(1, 5):
        answer = engine.complete(text, FOUR).tokens
        text = np.r_[text, np.array(answer, np.uint32), prompt(turn, 20 + turn)]
        window = 0 if FULL in KINDS[kind] and not any(getattr(each, "window", None) for each in KINDS[kind]) else 16
        assert 21 + turn <= ran(engine, text, alone) <= 21 + turn + window


def test_the_same_prompt_runs_its_end_alone():
    engine, text = cached(), prompt(0, 100)
    assert ran(engine, text) == 100
    assert ran(engine, text) == 4
    assert ran(engine, np.r_[text[:96], prompt(1, 30)]) == 30


def test_a_place_where_texts_part_is_kept_for_the_third():
    """The first text runs whole, the second from the state 64 tokens apart, and keeps that of the place itself."""
    engine, alone, system = cached(), Alone(StateNetwork("one of each")), prompt(0, 90)
    new = [ran(engine, np.r_[system, prompt(seed, 30)], alone, NONE) for seed in range(1, 5)]
    assert new == [120, 120 - 64, 40, 40]
    stats = engine.cache_stats()
    assert stats.miss_reasons["state"] == 3
    assert "window" not in stats.miss_reasons
    assert stats.hit_tokens == 64 + 2 * 80


@pytest.mark.parametrize("place", [17, 64, 79, 99])
def test_texts_part_where_they_are_expected_to(place):
    engine = BatchEngine(StateNetwork("one of each"))
    first, second = prompt(0, 100), np.r_[prompt(0, place), prompt(1, 50)]
    for tokens, cached_tokens in ((first, 0), (second, place)):
        request = engine.submit(tokens, sampled(0, 40))
        for work in request.works:
            work.parts_at = (place,)
        run(engine)
        assert request.completions()[0].cached_tokens == cached_tokens
    settled(engine)


def test_going_back_runs_again_from_the_nearest_state():
    model = StateNetwork("one of each")
    engine, plain = InferenceEngine(model, prefill_chunk=16), Alone(model).texts
    text = prompt(0, 80)
    engine.prefill_from_pos(text[:60], 0)
    for pos, stop in ((60, 70), (33, 50), (50, 51), (0, 20), (20, 80), (79, 80)):
        before = sum(each.rows for each in model.recurrences if each)
        logits = engine.prefill_from_pos(text[pos:stop], pos)
        rows = sum(each.rows for each in model.recurrences if each) - before
        assert rows == 2 * (stop - pos if pos in (60, 50, 20, 0) else stop)
        plain.begin()
        assert logits.tobytes() == plain.run(text[:stop])[-1].tobytes()
        engine.check()


def test_a_cached_state_is_the_nearest_one():
    engine, text = cached(), prompt(0, 150)
    ran(engine, text, params=NONE)
    plain = Alone(StateNetwork("one of each")).texts
    model = engine.inner.model
    before = model.recurrences[0].rows
    logits = engine.inner.prefill_from_pos(text[140:145], 140)
    assert model.recurrences[0].rows - before == 145 - 128
    assert logits.tobytes() == plain.run(text[:145])[-1].tobytes()
    engine.check()


def test_blocks_without_a_state_are_refused():
    engine = InferenceEngine(StateNetwork("one of each"))
    engine.prefill_from_pos(prompt(0, 20), 0)
    blocks = engine.cache.block_table([engine.seq_id]).block_ids
    with pytest.raises(InvalidOperationError, match="the state after 20 tokens"):
        engine.begin(lambda cache, seq: cache.adopt(seq, blocks, 20) or 20)
    assert engine.num_tokens == 20
    engine.check()


@pytest.mark.parametrize("options", [
    {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 20}, {"calibrate": prompt(0, 50), "dtype": "q4"},
])
def test_what_a_state_excludes_is_refused_by_name(options):
    with pytest.raises(ValueError, match="layers that keep a state"):
        InferenceEngine(StateNetwork("one of each"), **options)


@pytest.mark.parametrize("countdown", [0, 5, 37, 90, 111])
def test_a_failing_call_leaves_the_text_as_it_was(countdown):
    model = StateNetwork("one of each")
    engine, text = InferenceEngine(model, prefill_chunk=16), prompt(0, 90)
    plain = Alone(StateNetwork("one of each")).texts
    engine.prefill_from_pos(text[:30], 0)
    model.recurrences[0].countdown = countdown
    try:
        engine.prefill_from_pos(text[30:80], 30)
    except InterruptedError:
        assert engine.num_tokens == 30
    model.recurrences[0].countdown = -1
    engine.check()
    logits = engine.prefill_from_pos(text[30:90], 30)
    assert logits.tobytes() == plain.run(text)[-1].tobytes()
    engine.check()


def test_texts_whose_pass_failed_run_again():
    """A pass of several fails, and takes their states; they run one by one, and no bit of their answers changes."""
    model, alone = StateNetwork("one of each"), Alone(StateNetwork("one of each"))
    asked = [(np.r_[prompt(0, 30 + i), prompt(i, 9)], repeating(i, 12, logprobs=1)) for i in range(4)]
    recurrence, failures = model.recurrences[0], []
    run_rows = recurrence.run

    def fail_once(rows, slots, index, lens):
        found = run_rows(rows, slots, index, lens)
        if failures and len(index) > 1:
            raise failures.pop()
        return found

    recurrence.run = fail_once
    for steps in range(0, 30, 3):
        engine = BatchEngine(model, num_blocks=60)
        requests = [engine.submit(*each) for each in asked]
        for _ in range(steps):
            engine.step()
        failures[:] = [InterruptedError("as planned")]
        run(engine)
        for request, each in zip(requests, asked, strict=True):
            same(request.completions()[0], alone(*each))
        settled(engine)
        assert not failures or steps > 12


def test_a_text_at_fault_fails_alone():
    """It fails whenever it runs; the others run again from their starts, beside it and after it."""
    model, alone = StateNetwork("one of each"), Alone(StateNetwork("one of each"))
    forward, bad = model.forward, 249

    def failing(tokens, *arguments, **options):
        logits = forward(tokens, *arguments, **options)
        if bad in tokens:
            raise InterruptedError("as planned")
        return logits

    model.forward = failing
    engine = BatchEngine(model, num_blocks=60)
    asked = [(prompt(i, 30) % 249, sampled(i, 6, logprobs=1)) for i in range(3)]
    requests = [engine.submit(*each) for each in asked]
    engine.step()
    wrong = engine.submit(np.r_[prompt(7, 9) % 249, [bad]], sampled(0, 3))
    run(engine)
    assert wrong.finish_reason == "error"
    for request, (tokens, params) in zip(requests, asked, strict=True):
        assert bad not in alone(tokens, params).tokens
        same(request.completions()[0], alone(tokens, params))
    settled(engine)


def test_preempted_texts_go_on_where_they_stopped():
    model, alone = StateNetwork("one of each"), Alone(StateNetwork("one of each"), block_size=8)
    engine = BatchEngine(model, block_size=8, num_blocks=30, clock=Clock())
    asked = [(prompt(i, 60), sampled(i, 60, logprobs=1)) for i in range(4)]
    requests = [engine.submit(*each) for each in asked]
    run(engine)
    for request, each in zip(requests, asked, strict=True):
        same(request.completions()[0], alone(*each))
    assert engine.stats().preemptions > 0
    settled(engine)


def test_samples_have_states_of_their_own():
    model, alone = StateNetwork("one of each"), Alone(StateNetwork("one of each"))
    engine = BatchEngine(model, max_running=3)
    request = engine.submit(prompt(0, 50), sampled(5, 20, logprobs=1), n=5)
    run(engine)
    for i, found in enumerate(request.completions()):
        same(found, alone(prompt(0, 50), sampled(5 + i, 20, logprobs=1)))
    settled(engine)


@pytest.mark.parametrize("limit", [0, 1, 3, 40])
def test_a_budget_of_states_is_kept(limit):
    """Cached bytes stay within it; the states that save most stay."""
    model = StateNetwork("one of each")
    probe = BatchEngine(model, max_state_bytes=0)
    assert probe._pool.groups[-1].cached is None
    size = page_bytes(probe._settings.recurrences)
    engine, alone = BatchEngine(model, max_state_bytes=limit * size), Alone(model)
    for i in range(12):
        tokens, params = np.r_[prompt(i % 3, 70), prompt(i, 20)], sampled(i, 4, logprobs=1)
        request = engine.submit(tokens, params)
        run(engine)
        same(request.completions()[0], alone(tokens, params))
        assert sum(each.memory_bytes for each in engine._pool.groups[-1].prefixes) <= limit * size
    settled(engine)


def test_settings_of_states_that_cannot_be_honoured_are_refused():
    model = StateNetwork("one of each")
    with pytest.raises(ValueError, match="max_state_bytes: expected 0 or at least"):
        BatchEngine(model, max_state_bytes=10)
    with pytest.raises(ValueError, match="max_state_bytes: expected None for a network without a state"):
        BatchEngine(StateNetwork("neither"), max_state_bytes=1 << 20)
    with pytest.raises(ValueError, match="max_memory_bytes"):
        BatchEngine(model, max_memory_bytes=100)


@pytest.mark.parametrize("kind", ["one of each", "states alone"])
@pytest.mark.parametrize("limit", ["64KiB", "1MiB"])
def test_a_limit_of_memory_counts_states(kind, limit):
    engine = BatchEngine(StateNetwork(kind), max_memory_bytes=limit)
    assert engine.memory()["kv"] <= int(limit[:-3]) * (1024 if "K" in limit else 1 << 20)
    request = engine.submit(prompt(0, 60), sampled(0, 10))
    run(engine)
    assert request.finish_reason in ("length", "stop")


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_saved_cache_has_its_states(kind, tmp_path):
    engine, alone, text = cached(kind), Alone(StateNetwork(kind)), prompt(8, 150)
    ran(engine, text, alone)
    ran(engine, prompt(9, 70), alone)
    engine.save(tmp_path / "cache", "network")
    fresh = cached(kind)
    assert fresh.load(tmp_path / "cache", "network") == len(engine.prefix_cache.cache)
    for tokens in (text, prompt(9, 70), np.r_[text, prompt(10, 20)]):
        assert ran(fresh, tokens, alone) == ran(engine, tokens, alone)
    batch = BatchEngine(StateNetwork(kind))
    batch.load(tmp_path / "cache", "network")
    request = batch.submit(text, FOUR)
    run(batch)
    same(request.completions()[0], alone(text, FOUR))
    assert request.completions()[0].cached_tokens > 120 or kind == "behind a window"  # of which it keeps less
    batch.clear_cache()
    batch.check()
    request = batch.submit(text, FOUR)
    run(batch)
    assert request.completions()[0].cached_tokens == 0
    settled(batch)


def test_a_damaged_state_is_forgotten(tmp_path):
    """A file of which each page is damaged in turn: no answer changes."""
    engine, alone, text = cached(), Alone(StateNetwork("one of each")), prompt(8, 70)
    ran(engine, text, alone)
    engine.save(tmp_path / "cache", "network")
    data = (tmp_path / "cache").read_bytes()
    states = engine._pool.groups[-1].cached
    found = []
    for states_bytes in (states.read(np.array([block])) for block in states.index.block_ids()):
        row = np.concatenate(states_bytes).tobytes()[:40]
        assert data.count(row) == 1
        at = data.index(row)
        (tmp_path / "damaged").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        fresh = cached()
        fresh.load(tmp_path / "damaged", "network")
        found.append(ran(fresh, text, alone))
    assert len(found) > 1
    assert max(found) > min(found) == 4


def test_namespaces_share_no_states():
    engine, text = cached(), prompt(6, 100)
    for namespace, new in (("a", 100), ("b", 100), ("a", 4)):
        assert 100 - engine.complete(text, FOUR, namespace=namespace).cached_tokens == new


def test_forgetting_a_namespace():
    """Its states or blocks go, however many lead into one another; those of others stay."""
    engine = cached()
    for seed in range(4):
        for namespace in ("a", ("b", 1)):
            engine.complete(np.r_[prompt(0, 40), prompt(seed, 40)], NONE, namespace=namespace)
    index = engine.prefix_cache.cache
    before = index.namespace_tokens()
    index.forget("a")
    index.forget("nobody")
    assert index.namespace_tokens() == {("b", 1): before["b", 1]}
    engine.check()


@pytest.mark.parametrize("seed", range(3))
def test_random_conversations(seed):
    """Turns of several conversations, some rewritten, in few blocks and states: each answer is that of a cold run."""
    rng, kind = np.random.default_rng(seed), RECURRENT[seed % len(RECURRENT)]
    options = [{"dtype": "f32"}, {"dtype": "q4", "residual_length": 16}, {"dtype": "q8"}][seed]
    if kind == "behind a window":
        options = {"dtype": "f16"}
    model = StateNetwork(kind)
    engine = cached(kind, int(rng.integers(5, 40)), model, **options)
    alone, texts = Alone(StateNetwork(kind), **options), [prompt(100, 40) for _ in range(4)]
    for _ in range(25):
        which = int(rng.integers(4))
        cut = len(texts[which]) if rng.random() < 0.7 else int(rng.integers(1, len(texts[which]) + 1))
        text = np.r_[texts[which][:cut], prompt(int(rng.integers(1000)), int(rng.integers(1, 40)))][:380]
        params = repeating(int(rng.integers(4)), int(rng.integers(1, 9)), logprobs=1)
        found = engine.complete(text, params)
        same(found, alone(text, params))
        texts[which] = np.r_[text, np.array(found.tokens, np.uint32)][:340]
        engine.check()


def test_a_pinned_state_stays():
    """A prefix that is kept for a time has its state, whatever else comes within a budget of three states."""
    model = StateNetwork("one of each")
    size = page_bytes(BatchEngine(model)._settings.recurrences)
    engine, alone = BatchEngine(model, num_blocks=60, max_state_bytes=3 * size), Alone(model)
    kept = prompt(0, 64)
    engine.submit(np.r_[kept, prompt(1, 10)], sampled(0, 3), keep=[(64, 3600.0)])
    run(engine)
    for seed in range(2, 9):
        tokens, params = prompt(seed, 80), sampled(seed, 5, logprobs=1)
        request = engine.submit(tokens, params)
        run(engine)
        same(request.completions()[0], alone(tokens, params))
    request = engine.submit(np.r_[kept, prompt(10, 30)], FOUR)
    run(engine)
    assert request.completions()[0].cached_tokens == 64
    same(request.completions()[0], alone(np.r_[kept, prompt(10, 30)], FOUR))
    engine.clear_cache()
    engine.check()


def test_evictions_tell_tokens_of_texts_alone():
    told = []
    engine = BatchEngine(StateNetwork("one of each"), num_blocks=8, on_eviction=told.append)
    for seed in range(6):
        engine.submit(prompt(seed, 40), sampled(seed, 6))
        run(engine)
    assert told
    assert all(each.tokens.max() < VOCABULARY for each in told)
    assert all(0 < each.num_tokens <= len(each.tokens) for each in told)
    assert any(each.num_tokens % 16 for each in told)


def test_pins_end_with_full_blocks():
    """A prompt of whole blocks has its state four tokens before its end, where a pin cannot end."""
    engine = BatchEngine(StateNetwork("one of each"))
    for seed, length, place in ((0, 64, 64), (1, 70, 64), (2, 80, 80), (3, 41, 20)):
        engine.submit(prompt(seed, length), sampled(0, 3), keep=[(place, 3600.0)], parts_at=[place - 1])
        run(engine)
        pins = engine._steps._scheduler.pins.all
        assert all(pin.stop % 16 == 0 for pin in pins)
    assert [pin.stop for pin in pins] == [64, 64, 64, 32]
