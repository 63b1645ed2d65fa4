"""The residual: each query reads its own group unpacked, and all other tokens as the cache packs them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.kernels import attention

import kvcache
from kvcache import Calibration
from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine
from kvcache.eviction import EvictionPolicy

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 2
TOKENS = 1000


class Echo:
    """Not a real network: Q, K and V depend only on layer and position; it records the results of attention."""

    config = SimpleNamespace(
        num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, vocab_size=8,
        max_position_embeddings=TOKENS,
    )

    def __init__(self):
        rng = np.random.default_rng(3)
        self.queries = rng.standard_normal((LAYERS, TOKENS, HEADS, DIM), np.float32)
        self.keys, self.values = rng.standard_normal((2, LAYERS, TOKENS, KV_HEADS, DIM), np.float32)
        self.fail_at = None
        self.told = {}

    def forward(self, tokens, positions, attend, logits):
        for layer in range(LAYERS):
            if layer == self.fail_at:
                raise InterruptedError("as planned")
            rows = self.queries[layer, positions], self.keys[layer, positions], self.values[layer, positions]
            for pos, row in zip(positions, attend(layer, *rows), strict=True):
                self.told[layer, int(pos)] = row
        return np.zeros(({"last": 1, "all": len(tokens), "none": 0}[logits], 8), np.float32)


def assert_all_answers_right(network, engine, full, firsts=()):
    """Compare all results; `full[p]` is the first token that the query at p reads unpacked, with `firsts[p]` others."""
    for layer in range(LAYERS):
        packed = engine.cache.read(layer, engine.seq_id)
        for pos, first in enumerate(full):
            keys, values = (rows[: pos + 1].astype(np.float64) for rows in packed)
            for part in (slice(first, pos + 1), slice(0, firsts[pos] if len(firsts) else 0)):
                keys[part] = network.keys[layer, part].astype(np.float16)
                values[part] = network.values[layer, part].astype(np.float16)
            want = attention(network.queries[layer, pos][None], keys, values, DIM**-0.5)[0][0]
            error = np.abs(network.told[layer, pos] - want).max() / np.abs(want).max()
            assert error < 0.01, (layer, pos, first, error)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(1, 40)),
        st.tuples(st.just("fail"), st.integers(1, 40)),
        st.tuples(st.just("back"), st.integers(1, 30)),
        st.tuples(st.just("share"), st.integers(1, 30)),
    ),
    min_size=1,
    max_size=8,
)


def calibration():
    rng = np.random.default_rng(5)
    turns = rng.standard_normal((LAYERS, KV_HEADS, DIM, DIM)).astype(np.float32)
    moments = turns @ turns.swapaxes(2, 3)
    return Calibration(rng.standard_normal((LAYERS, KV_HEADS, DIM)), (moments + moments.swapaxes(2, 3)) / 2)


@given(length=st.sampled_from([0, 1, 4, 16, 17, 64]), chunk=st.sampled_from([1, 5, 64]), steps=STEPS, calibrated=...)
def test_any_history(length, chunk, steps, calibrated: bool):
    """Runs, failures, steps back and shared prefixes: every result agrees with float64 over the expected rows."""
    network, most = Echo(), min(16, length or 16) if calibrated else 0
    engine = InferenceEngine(
        network, dtype="q4", residual_length=length, prefill_chunk=chunk, num_blocks=64,
        calibrate=calibration() if calibrated else False,
    )
    full, start = [], 0  # `full` of each query; the start of the newest group
    held, firsts = True, []  # whether the first tokens are there unpacked; how many each query reads so
    for what, count in steps:
        pos = len(full)
        if pos + count > 400:
            break
        if what == "back" and pos:
            pos -= min(count, pos)
            if held and pos < most:
                start = 0
            elif not length or pos <= start or pos // length != start // length:
                start = pos  # the unpacked rows there are dropped
            held = held and (pos >= most or start == 0)
        if what == "share":  # a cached prefix has the same tokens, all packed
            old = engine.seq_id
            kept = min(count, pos)
            engine.begin(lambda cache, fresh, old=old, kept=kept: share(cache, old, fresh, kept))
            pos = start = kept
            held = kept == 0
            del full[kept:], firsts[kept:]
        held = held or pos == 0
        if what == "fail":
            told, version = dict(network.told), engine.version
            network.fail_at = count % LAYERS
            with pytest.raises(InterruptedError):
                engine.prefill_from_pos([0] * count, pos)
            network.fail_at, network.told = None, told
            assert engine.num_tokens == len(full)
            assert engine.version == version
        else:
            engine.prefill_from_pos([0] * count, pos)
            full[pos:] = [max(start, p - p % length) if length else p + 1 for p in range(pos, pos + count)]
            firsts[pos:] = [min(most, p + 1) * held for p in range(pos, pos + count)]
            start = full[-1]
        engine.check()
    assert_all_answers_right(network, engine, full, firsts)


def share(cache, old, fresh, kept):
    cache.fork(old, fresh)
    cache.truncate(fresh, kept)
    return kept


def test_a_failure_after_a_step_back_brings_the_group_back():
    network = Echo()
    engine = InferenceEngine(network, dtype="q2", residual_length=16, prefill_chunk=8)
    engine.prefill_from_pos([0] * 30, 0)
    network.fail_at, told = 1, dict(network.told)
    for pos in (20, 5, 30):
        for count in (3, 25):
            with pytest.raises(InterruptedError):
                engine.prefill_from_pos([0] * count, pos)
    network.fail_at, network.told = None, told
    engine.check()
    engine.prefill_from_pos([0], 30)
    assert_all_answers_right(network, engine, [p - p % 16 for p in range(31)])


def test_default_lengths():
    def length(**options):
        return InferenceEngine(Echo(), **options).residual_length

    assert length() == length(dtype="f16") == length(dtype="q8") == 0
    assert length(dtype="q6") == length(dtype="q5") == length(dtype="q3") == length(dtype="q8", value_dtype="q4") == 64
    assert length(dtype="q2") == length(dtype="q8", value_dtype="q2") == 128
    assert length(dtype="q2", residual_length=0) == 0
    assert length(dtype="f32", residual_length=7) == 7
    assert length(dtype="q4", eviction_policy=EvictionPolicy.SlidingWindow(60, 4), kv_budget=64) == 0


@pytest.mark.parametrize("wrong", [-1, 257])
def test_lengths_that_are_none(wrong):
    with pytest.raises(ValueError, match=f"residual_length: expected an int [<>]= .*, got {wrong}"):
        InferenceEngine(Echo(), residual_length=wrong)
    with pytest.raises(TypeError, match="residual_length"):
        InferenceEngine(Echo(), residual_length=1.5)


def test_pieces_without_bound_take_no_memory():
    engine = InferenceEngine(Echo(), dtype="q4", prefill_chunk=1 << 50)
    engine.prefill_from_pos([0] * 300, 0)
    engine.check()


def test_f32_sides_stay_exact():
    network = Echo()
    network.keys *= 1e6  # beyond f16
    engine = InferenceEngine(network, key_dtype="f32", value_dtype="q4", prefill_chunk=16)
    engine.prefill_from_pos([0] * 100, 0)
    with pytest.raises(ValueError, match="f16 can hold"):
        InferenceEngine(network, dtype="f16", residual_length=16).prefill_from_pos([0] * 3, 0)


def calls_of_a_step(dtype, length):
    """Python calls of `kvcache` in a decode step behind 20 tokens."""
    engine = InferenceEngine(Echo(), dtype=dtype, residual_length=length, num_blocks=64)
    engine.prefill_from_pos([1] * 20, 0)
    engine.decode_step(1, 20)
    found, package = Counter(), str(Path(kvcache.__file__).parent)

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    engine.decode_step(1, 21)
    sys.setprofile(None)
    return found


def test_a_step_makes_as_many_calls_as_without_a_residual():
    assert calls_of_a_step("q4", 16) == calls_of_a_step("f16", 0)


@pytest.mark.parametrize("dtype", ["f16", "q4"])
def test_a_step_of_the_demo_makes_at_most_150_calls(dtype):
    """All of them, NumPy's too."""
    engine = InferenceEngine.from_pretrained(DIRECTORY, dtype=dtype)
    engine.prefill_from_pos(list(range(100, 200)), 0)
    engine.decode_step(5, 100)
    events = []
    sys.setprofile(lambda _, event, __: events.append(event))
    engine.decode_step(5, 101)
    sys.setprofile(None)
    assert events.count("call") <= 150
