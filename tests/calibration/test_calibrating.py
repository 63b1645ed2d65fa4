"""Calibrations of engines: measured, kept in the user's cache folder, and exact reuse of prefixes with them."""

import json
from itertools import pairwise

import numpy as np
import pytest
from oracles.kernels import attend
from places import GOLDEN
from windowed_networks import Windowed

from kvcache import BatchEngine, Calibration, InferenceEngine, PrefixCachedEngine, SamplingParams, SnapshotError
from kvcache.calibration.calibrating import measure, text_or_calibration
from kvcache.demo import DIRECTORY
from kvcache.engine import Settings, Transformer

pytestmark = pytest.mark.one_build

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def model():
    return InferenceEngine.from_pretrained(DIRECTORY).model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvcache"


def test_means_and_moments_are_those_of_the_text_but_its_first_tokens(model, rng):
    tokens = rng.integers(0, model.config.vocab_size, 300).astype(np.uint32)
    found, config = measure(model, tokens), model.config
    rows = []

    def one(layer, queries, keys, values):
        rows.append((queries.astype(np.float64), keys.astype(np.float64)))
        return attend(queries, keys, values, config.head_dim**-0.5)[0].astype(np.float32)

    model.forward(tokens, np.arange(300), one, "none")
    group = config.num_heads // config.num_kv_heads
    for layer, (queries, keys) in enumerate(rows):
        np.testing.assert_allclose(found.centres[layer], keys[16:].mean(axis=0), atol=1e-3)
        for head in range(config.num_kv_heads):
            some = queries[16:, head * group : (head + 1) * group].reshape(-1, config.head_dim)
            np.testing.assert_allclose(found.moments[layer, head], some.T @ some / 284, rtol=1e-3, atol=1e-2)


@pytest.mark.exhaustive
def test_a_calibration_is_kept_in_the_users_folder(folder, tmp_path, caplog):
    (tmp_path / "text").write_text("def walk(path):\n    return path\n" * 40)
    own = {"dtype": "q4", "calibrate": str(tmp_path / "text")}
    first = InferenceEngine.from_pretrained(DIRECTORY, **own)
    (path,) = folder.glob("*.calibration")
    known = Calibration.load(path)
    assert first.cache.calibration.fingerprint == known.fingerprint
    # The file is what counts from now on; a damaged one is measured again.
    other = Calibration(known.centres + 1, known.moments)
    other.save(path)
    again = InferenceEngine.from_pretrained(DIRECTORY, **own)
    assert again.cache.calibration.fingerprint == other.fingerprint
    path.write_bytes(path.read_bytes()[:-9])
    again = InferenceEngine.from_pretrained(DIRECTORY, **own)
    assert again.cache.calibration.fingerprint == known.fingerprint == Calibration.load(path).fingerprint
    assert "measuring again" in caplog.text
    # Paths of calibrations, and the text of the library.
    other.save(tmp_path / "saved")
    loaded = InferenceEngine.from_pretrained(DIRECTORY, dtype="q4", calibrate=tmp_path / "saved")
    assert loaded.cache.calibration.fingerprint == other.fingerprint
    InferenceEngine.from_pretrained(DIRECTORY, dtype="q8", calibrate="auto")
    assert len(list(folder.glob("*.calibration"))) == 2


@pytest.mark.parametrize(("dtype", "length"), [("q8", None), ("q4", None), ("q2", None), ("q4", 0)])
def test_a_cached_prefix_gives_the_bits_of_a_cold_run(model, rng, dtype, length):
    text = rng.integers(0, model.config.vocab_size, 300).astype(np.uint32)
    known = measure(model, rng.integers(0, model.config.vocab_size, 200).astype(np.uint32))
    logits = []
    options = {"dtype": dtype, "calibrate": known, "residual_length": length}
    for chunk in (512, 7, 64):
        engine = InferenceEngine(model, prefill_chunk=chunk, **options)
        assert engine.residual_length == (0 if length == 0 else {"q8": 64, "q4": 64, "q2": 128}[dtype])
        logits.append(engine.prefill_from_pos(text, 0))
        engine.check()
        np.testing.assert_array_equal(logits[-1], logits[0])
    cached = PrefixCachedEngine(InferenceEngine(model, **options), 40, strict=True)
    alone = InferenceEngine(model, **options)
    for head in (300, 250, 200, 10, 40, 299):
        prompt = np.r_[text[:head], text[: 30 if head < 300 else 0]]
        before = cached.inner.prefill_token_count
        assert cached.generate(prompt, GREEDY) == alone.generate(prompt, GREEDY)
        np.testing.assert_array_equal(
            cached.inner.decode_step(5, cached.inner.num_tokens), alone.decode_step(5, alone.num_tokens)
        )
        if 200 <= head < 300:
            assert cached.inner.prefill_token_count - before < 200
        cached.check()


def test_formats_that_lose_more_than_they_promise_are_told(model, folder, rng, caplog, monkeypatch):
    text = rng.integers(0, model.config.vocab_size, 700).astype(np.uint32)
    InferenceEngine(model, dtype="q4", calibrate=text)
    assert not caplog.records
    engine = InferenceEngine(model, dtype="q2", calibrate=text)
    exact, packed = (
        np.array([each.prefill_from_pos(text[188:][a:z], a) for a, z in pairwise([0, *range(257, 513, 5)])], np.float64)
        for each in (InferenceEngine(model), engine)
    )
    for rows in (exact, packed):
        rows -= rows.max(axis=1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    (found,) = (
        value
        for name, value in json.loads(next(folder.glob("*.checks")).read_text()).items()
        if " q2 / q2 128 16" in name
    )
    assert found == pytest.approx((np.exp(exact) * (exact - packed)).sum(axis=1).mean(), rel=0.3)
    monkeypatch.setattr("kvcache.calibration.checking.PROMISES", {"q2": 0.0})
    monkeypatch.setattr("kvcache.calibration.checking._FLOOR", found / 2)
    # What is kept is not measured again; another residual is.
    monkeypatch.setattr("kvcache.calibration.checking.divergence", lambda *_: 9.0)
    InferenceEngine(model, dtype="q2", calibrate=text)
    assert f"q2 / q2 lose more than they promise on this network: a KL divergence of {found:.2g}" in caplog.text
    BatchEngine(model, dtype="q2", calibrate=text, residual_length=0)
    assert "a KL divergence of 9, expected at most" in caplog.text
    assert len(caplog.records) == 2
    # A calibration that is given has no text to check with; a short text is none.
    InferenceEngine(model, dtype="q2", calibrate=engine.cache.calibration)
    InferenceEngine(model, dtype="q2", calibrate=text[:400])
    assert len(caplog.records) == 2


def test_a_saved_cache_names_the_calibration(model, rng, tmp_path):
    text = rng.integers(0, model.config.vocab_size, 200).astype(np.uint32)
    known = measure(model, text)

    def make(calibrate):
        return PrefixCachedEngine(InferenceEngine(model, dtype="q4", calibrate=calibrate), 40, strict=True)

    first, second = make(known), make(known)
    answer = first.generate(text, GREEDY)
    first.save(tmp_path / "file")
    assert second.load(tmp_path / "file") > 0
    assert second.generate(text, GREEDY) == answer
    assert second.inner.prefill_token_count < 100
    for other in (False, measure(model, text[:100])):
        with pytest.raises(SnapshotError, match="expected model"):
            make(other).load(tmp_path / "file")


def test_what_calibrate_takes(model, folder, rng):
    text = rng.integers(0, model.config.vocab_size, 100)
    assert InferenceEngine(model, calibrate=text, dtype="f16").cache.calibration is None  # it needs none
    assert not folder.exists()
    engine = InferenceEngine(model, calibrate=text, dtype="q4", residual_length=0)
    assert engine.cache.calibration.centres.any()
    assert engine.residual_length == 0
    assert len(list(folder.iterdir())) == 1
    for wrong in ("auto", True):
        with pytest.raises(TypeError, match=r"^calibrate: expected False, a Calibration or tokens, got"):
            InferenceEngine(model, calibrate=wrong, dtype="q4")
    for dtype in ("f32", "q4"):
        for wrong in (7, ["a"], [model.config.vocab_size], object()):
            with pytest.raises((TypeError, ValueError), match=r"^calibrate: expected"):
                InferenceEngine(model, settings=Settings(calibrate=wrong, dtype=dtype))
    with pytest.raises(ValueError, match=r"^calibrate: expected a text of at least 64 tokens and positions, got 10"):
        InferenceEngine(model, calibrate=text[:10], dtype="q4")
    with pytest.raises(TypeError, match=r'^calibrate: expected False, "auto", a path, a Calibration or tokens, got'):
        text_or_calibration(True, None)
    with pytest.raises(ValueError, match=r"^calibrate: expected one of"):
        InferenceEngine(model, calibrate=Calibration(np.zeros((1, 2, 8))), dtype="q4")


@pytest.mark.parametrize("name", ["llama_biases", "qwen2"])
def test_what_biases_add_to_keys_is_centred_without_a_calibration(name, rng):
    """Keys of biases that hide all else are rounded with less error, in an engine and in a batch alike."""
    network = Transformer.from_pretrained(GOLDEN / name)
    config = network.config
    text, plain = rng.integers(0, config.vocab_size, 120).astype(np.uint32), []
    first = config.num_heads * config.head_dim
    for scale in (0.0, 1.0):
        for layer in network.weights.layers:
            bias = np.zeros_like(layer.qkv_bias)
            slow = bias[first : first + config.num_kv_heads * config.head_dim].reshape(-1, 2, config.head_dim // 2)
            slow[:, :, -1] = 60 * scale
            object.__setattr__(layer, "qkv_bias", bias)
        exact = InferenceEngine(network).score(text)
        engine = InferenceEngine(network, dtype="q4", residual_length=0)
        plain.append(np.abs(engine.score(text) - exact).mean())
        centres = engine.cache.calibration
        assert (centres is None) == (scale == 0)
    assert np.abs(centres.centres).max() > 40
    assert centres.moments is None
    zeros = Calibration(np.zeros(centres.shape))
    none = InferenceEngine(network, dtype="q4", residual_length=0, calibrate=zeros).score(text)
    assert plain[1] < 0.7 * np.abs(none - exact).mean()
    assert InferenceEngine(network, dtype="f16").cache.calibration is None
    with BatchEngine(network, dtype="q4") as batch:
        alone = InferenceEngine(network, dtype="q4").generate(text, GREEDY)
        assert batch.submit(text, GREEDY).result(60) == alone


@pytest.mark.parametrize("sizes", [(40,), (24, 70)], ids=["beside layers that keep all", "windows alone"])
def test_keys_of_layers_with_a_window_are_rounded_with_feedback_and_not_centred(model, rng, sizes):
    """Their first tokens are packed too. Each cache has the calibration of its layers, in an engine and in batches."""
    network = Windowed(model, *sizes)
    text = rng.integers(0, model.config.vocab_size, 300).astype(np.uint32)
    engines = [
        InferenceEngine(network, dtype="q2", calibrate=known, residual_length=0, prefill_chunk=64)
        for known in (text, False)
    ]
    exact = InferenceEngine(network, dtype="f32", prefill_chunk=64)
    caches = [engines[0].cache, *(group.cache for group in engines[0]._sequence.pool.groups[1:])]
    layers = sorted(layer for group in engines[0]._sequence.pool.groups[1:] for layer in group.layers)
    known = [cache.calibration for cache in caches if cache.num_layers]
    assert sum(each.shape[0] for each in known) == model.config.num_layers
    assert len(layers) >= model.config.num_layers - 1
    assert not any(each.centres.any() for each in known)
    assert engines[1].cache.calibration is None
    whole = measure(network, text)
    for group in engines[0]._sequence.pool.groups[1:]:
        np.testing.assert_array_equal(group.cache.calibration.moments, whole.moments[list(group.layers)])
    fresh = rng.integers(0, model.config.vocab_size, 200).astype(np.uint32)
    rows = []  # keys of the first layer, which are those of every format
    for engine in (exact, *engines):
        engine.prefill_from_pos(fresh[:20], 0)
        (cache,) = [engine.cache] if len(sizes) == 1 else [engine._sequence.pool.groups[1].cache]
        rows.append(cache.read(0, cache.sequence_ids()[0])[0])
    near, far = (np.einsum("nhd,hde,nhe->", e, whole.moments[0], e) for e in (each - rows[0] for each in rows[1:]))
    assert near < 0.8 * far
    with pytest.raises(ValueError, match=r"^dtype: expected formats with layers that have a window"):
        InferenceEngine(network, dtype="auto:4.0", calibrate=text)


def test_prefixes_with_windows_are_exact_and_saves_name_the_calibration(model, rng, tmp_path):
    network = Windowed(model, 24, 70)
    text = rng.integers(0, model.config.vocab_size, 300).astype(np.uint32)

    def make(known):
        return PrefixCachedEngine(InferenceEngine(network, dtype="q4", calibrate=known, residual_length=0), 40)

    one, prompt = make(text), text[:150]
    first = one.generate(prompt, GREEDY)
    assert list(one.generate(prompt, GREEDY)) == list(first)
    one.save(tmp_path / "file", model="a name")
    make(text).load(tmp_path / "file", model="a name")
    with pytest.raises(SnapshotError, match="expected model"):
        make(False).load(tmp_path / "file", model="a name")
