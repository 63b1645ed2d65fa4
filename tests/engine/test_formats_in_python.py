"""Storage formats in Python: q8 written twice, what is stored and named, and failures that change nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest
from engines import GREEDY, PROMPT, assert_same_state, state

from bench.support.guides import definitions
from kvcache import BatchEngine, PagedKvCache, PrefixCache, PrefixCachedEngine, simd_levels, use_simd
from kvcache.engine import InferenceEngine, Transformer
from kvcache.errors import SnapshotError
from kvcache.eviction import EvictionPolicy
from kvcache.kernels.kernels import bf16_order
from kvcache.texts.arrivals import model_name

Q8 = definitions("policies.md")["Q8"]


class Halves:
    """f16 in Python; rows do not depend on each other."""

    bits = 16

    def encode(self, rows):
        return rows.astype(np.float16)

    def decode(self, codes):
        return codes


class Other(Halves):
    name = "other"


@pytest.mark.parametrize("dim", [8, 64, 72])
def test_q8_bit_for_bit(dim):
    rng = np.random.default_rng(dim)
    rows = rng.standard_normal((2, 300, 3, dim), np.float32) * 10.0 ** rng.integers(-4, 4, (2, 300, 3, 1))
    rows += rng.standard_normal((2, 300, 3, 1)) * 3
    rows[:, 7], rows[0, 8] = 0, 1.5
    rows = rows.astype(np.float32)
    caches = [PagedKvCache(20, 16, 3, dim, dtype=dtype, rotate=False) for dtype in ("q8", Q8())]
    for cache in caches:
        cache.allocate(0, 300)
        cache.write(0, 0, *rows)
    np.testing.assert_array_equal(*(cache.read(0, 0) for cache in caches))
    assert (caches[1].key_dtype, caches[1].value_dtype) == ("f32", "f32")
    assert caches[1].total_memory_bytes == PagedKvCache(20, 16, 3, dim, dtype="f32").total_memory_bytes
    assert "key_dtype=q8 in Python, value_dtype=q8 in Python" in repr(caches[1])


def test_the_perplexity_is_that_of_q8(network):
    text = np.resize(PROMPT, 200)
    means = [InferenceEngine(network, dtype=dtype, rotate=False).score(text).mean() for dtype in ("f32", "q8", Q8())]
    assert abs(means[1] - means[2]) < 2e-4
    assert means[0] != means[2]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"residual_length": 16},
        {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 24},
        {"eviction_policy": EvictionPolicy.StreamingLLM(2, 20)},
    ],
    ids=["plain", "residual", "h2o", "streaming"],
)
def test_f16_in_python_is_f16(network, options):
    """Every kind of engine reads what the format returned. The residual beside it is f32, beside f16 f16."""
    text = np.resize(PROMPT, 100)
    for key, value in (("f16", "f16"), ("f16", "f32"), ("f32", "f16")):
        own = [Halves() if dtype == "f16" else dtype for dtype in (key, value)]
        theirs = InferenceEngine(network, key_dtype=key, value_dtype=value, **options)
        ours = InferenceEngine(network, key_dtype=own[0], value_dtype=own[1], **options)
        bound = 5e-3 if "residual_length" in options else 2e-5
        np.testing.assert_allclose(ours.score(text), theirs.score(text), rtol=0, atol=bound)
        if not options:
            for a, b in zip(ours.cache.read(1, ours.seq_id), theirs.cache.read(1, theirs.seq_id), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)
                assert (a == a.astype(np.float16)).all() or "f32" in (key, value)
        ours.check()


def test_batches_and_prefixes_are_the_plain_engine(network):
    plain = InferenceEngine(network, dtype=Halves())
    expected = plain.generate(PROMPT, GREEDY)
    batch = BatchEngine(network, dtype=Halves())
    assert batch.generate_batch([PROMPT, PROMPT], GREEDY) == [expected, expected]
    assert batch.stats().cached_tokens
    cached = PrefixCachedEngine(InferenceEngine(network, dtype=Halves()), 8)
    assert cached.generate(PROMPT, GREEDY) == cached.generate(PROMPT, GREEDY) == expected


def test_saved_caches_are_named_after_it(network, tmp_path):
    def engine(dtype):
        return PrefixCachedEngine(InferenceEngine(network, dtype=dtype), 8)

    saved = engine(Halves())
    expected = saved.generate(PROMPT, GREEDY)
    saved.save(tmp_path / "file")
    again = engine(Halves())
    assert again.load(tmp_path / "file") > 0
    assert again.generate(PROMPT, GREEDY) == expected
    for other in (Other(), "f32"):
        with pytest.raises(SnapshotError, match="Halves"):
            engine(other).load(tmp_path / "file")
    names = {
        model_name(network, 0, None, InferenceEngine(network, key_dtype=key, value_dtype=value).cache.formats)
        for key in (Halves(), Other(), "f32")
        for value in (Halves(), "f32")
    }
    assert len(names) == 6


def test_values_of_tiers_are_named_after_the_order_of_sums_in_bf16(network):
    formats = InferenceEngine(network).cache.formats
    in_bf16 = Transformer(network.config, network.weights, activations="bf16")
    names = {}
    for level in simd_levels():
        with use_simd(level):
            assert bf16_order() not in model_name(network, 0, None, formats)
            names.setdefault(bf16_order(), set()).add(model_name(in_bf16, 0, None, formats))
    assert all(len(of_order) == 1 for of_order in names.values())
    assert len(set().union(*names.values())) == len(names)


def test_inserted_blocks_are_in_the_format():
    paged = PagedKvCache(4, 4, 1, 8, dtype=Halves())
    prefixes = PrefixCache.over(paged)
    rows = np.full(32, 0.1, np.float32)
    block = prefixes.insert([1, 2, 3, 4], 0, [rows], [rows])
    paged.adopt(0, [block], 4)
    for found in paged.read(0, 0):
        assert (found == np.float32(np.float16(0.1))).all()


class Failing(Halves):
    failure = None

    def decode(self, codes):
        if isinstance(self.failure, BaseException):
            raise self.failure
        return codes if self.failure is None else self.failure


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (np.zeros((1, 2, 3), np.float32), ValueError, "decode: expected shape (5, 2, 16), got (1, 2, 3)"),
        (np.zeros((5, 2, 16), np.int32), TypeError, "decode: expected a float dtype, got int32"),
        (np.full((5, 2, 16), np.inf, np.float32), ValueError, "decode: expected finite numbers, got inf"),
        (RuntimeError("broken"), RuntimeError, "broken"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
    ids=["shape", "kind", "infinite", "raises", "interrupt"],
)
def test_failures_change_nothing(network, failure, error, message):
    own = Failing()
    engine = InferenceEngine(network, key_dtype="f32", value_dtype=own)
    engine.prefill_from_pos(PROMPT, 0)
    before, own.failure = state(engine), failure
    with pytest.raises(error, match="^" + re.escape(message)):
        engine.prefill_from_pos(PROMPT[:5], len(PROMPT))
    own.failure = None
    assert_same_state(engine, before)
    engine.prefill_from_pos(PROMPT[:5], len(PROMPT))


def test_encode_may_write_to_its_rows():
    class Writing(Halves):
        def encode(self, rows):
            rows *= 2
            return rows

    rows = np.ones((2, 4, 1, 8), np.float32)
    cache = PagedKvCache(2, 4, 1, 8, dtype=Writing())
    cache.allocate(0, 4)
    cache.write(0, 0, *rows)
    assert (rows == 1).all()
    assert (np.array(cache.read(0, 0)) == 2).all()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"bits": None}, TypeError, "bits: expected a number, got NoneType"),
        ({"bits": 0}, ValueError, "bits: expected a finite number above 0"),
        ({"name": ""}, TypeError, "name: expected a text, got ''"),
        ({"name": 3}, TypeError, "name: expected a text, got 3"),
    ],
    ids=str,
)
def test_settings_are_checked(fields, error, message):
    own = type("Own", (Halves,), fields)()
    with pytest.raises(error, match="^" + re.escape(message)):
        PagedKvCache(4, 4, 1, 8, dtype=own)


def test_classes_and_calibrations_are_refused(network):
    with pytest.raises((TypeError, ValueError), match="dtype"):
        PagedKvCache(4, 4, 1, 8, dtype=Halves)
    for layers in ([Halves(), "q4"], (Halves(), Halves())):
        with pytest.raises(TypeError, match=r"^dtype: expected names of formats for each layer, got one in Python"):
            PagedKvCache(4, 4, 1, 8, num_layers=2, dtype=layers)
    for name in ("dtype", "key_dtype", "value_dtype"):
        with pytest.raises(TypeError, match=r"^dtype: expected an object with .*, got the class Halves$"):
            InferenceEngine(network, **{name: Halves})
    with pytest.raises(ValueError, match="calibrate: expected none for keys of a format in Python, got ndarray"):
        InferenceEngine(network, dtype=Halves(), calibrate=np.resize(PROMPT, 100))
