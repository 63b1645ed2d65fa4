"""Formats of each layer in engines: reuse stays exact, windows and residuals follow, names of saved caches too."""

from itertools import product

import numpy as np
import pytest
from places import GOLDEN
from serving import GREEDY
from tier_stores import SECRET, ObjectStore

from kvcache import Calibration, CheckpointError, InferenceEngine, PrefixCachedEngine, SnapshotError
from kvcache.calibration.calibrating import measure
from kvcache.calibration.checking import PROMISES
from kvcache.calibration.layer_losses import formats_within
from kvcache.demo import DIRECTORY
from kvcache.engine import Transformer
from kvcache.eviction import EvictionPolicy
from kvcache.kernels.kernels import FORMATS
from kvcache.tiers import Tiers

pytestmark = pytest.mark.one_build


@pytest.fixture(scope="module")
def model():
    return InferenceEngine.from_pretrained(DIRECTORY).model


def formats(model, *names):
    return [names[layer % len(names)] for layer in range(model.config.num_layers)]


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_cached_prefix_gives_the_bits_of_a_cold_run(model, rng, calibrated):
    text = rng.integers(0, model.config.vocab_size, 300).astype(np.uint32)
    known = measure(model, text[:200]) if calibrated else False
    options = {"key_dtype": formats(model, "q8", "q4", "q2"), "value_dtype": "q4", "calibrate": known}
    whole = InferenceEngine(model, prefill_chunk=7, **options)
    expected = whole.prefill_from_pos(text, 0)
    assert whole.residual_length == 128
    assert whole.cache.key_dtype == tuple(options["key_dtype"])
    cached = PrefixCachedEngine(InferenceEngine(model, **options), 40, strict=True)
    alone = InferenceEngine(model, **options)
    np.testing.assert_array_equal(alone.prefill_from_pos(text, 0), expected)
    for head in (300, 250, 140, 299):
        prompt = np.r_[text[:head], text[: 30 if head < 300 else 0]]
        assert cached.generate(prompt, GREEDY) == alone.generate(prompt, GREEDY)
        cached.check()
    assert cached.inner.prefill_token_count < 600


def test_one_layer_alone_is_exact_where_the_others_are(model, rng):
    """Each layer has the format that is named at its place."""
    text = rng.integers(0, model.config.vocab_size, 90).astype(np.uint32)
    exact = InferenceEngine(model).score(text)
    count, far = model.config.num_layers, []
    for layer in range(count):
        keys = ["f32"] * count
        keys[layer] = "q2"
        engine = InferenceEngine(model, key_dtype=keys, residual_length=0)
        far.append(np.abs(engine.score(text) - exact).mean())
        packed = [engine.cache._store.layer_bytes[i] for i in range(count)]
        assert packed.index(min(packed)) == layer
    assert (np.array(far) > 0).all()
    np.testing.assert_array_equal(InferenceEngine(model, key_dtype=["f32"] * count).score(text), exact)


def test_layers_with_windows_keep_their_formats(rng):
    network = Transformer.from_pretrained(GOLDEN / "gemma3")
    text = rng.integers(0, network.config.vocab_size, 60).astype(np.uint32)
    dtype = formats(network, "q8", "q4")
    engine = InferenceEngine(network, dtype=dtype, max_memory_bytes="1MiB")
    windows = engine._sequence.pool.groups[1:]
    seen = {layer: name for group in windows for layer, name in _named(group.layers, group.cache)}
    whole = [layer for layer in range(len(dtype)) if layer not in seen]
    seen.update(_named(whole, engine.cache))
    assert [seen[layer] for layer in range(len(dtype))] == dtype
    assert seen
    cached = PrefixCachedEngine(InferenceEngine(network, dtype=dtype), 20, strict=True)
    for end in (60, 40, 60):
        assert cached.generate(text[:end], GREEDY) == engine.generate(text[:end], GREEDY)
    cached.check()


def _named(layers, cache):
    names = [cache.key_dtype] * len(layers) if isinstance(cache.key_dtype, str) else cache.key_dtype
    return list(zip(layers, names, strict=True))


def test_saves_and_tiers_tell_formats_of_layers_apart(model, rng, tmp_path):
    text = rng.integers(0, model.config.vocab_size, 200).astype(np.uint32)
    store = ObjectStore()

    def make(dtype, tiers=None):
        return PrefixCachedEngine(InferenceEngine(model, dtype=dtype, residual_length=0), 40, strict=True, tiers=tiers)

    one, other = formats(model, "q8", "q4"), formats(model, "q4", "q8")
    first = make(one, Tiers([store], secret=SECRET, after_uses=1))
    answer = first.generate(text, GREEDY)
    first.close()
    first.save(tmp_path / "file")
    again = make(tuple(one))
    assert again.load(tmp_path / "file") > 0
    assert again.generate(text, GREEDY) == answer
    with pytest.raises(SnapshotError):
        make(other).load(tmp_path / "file")
    for dtype, found in ((one, True), (other, False)):
        engine = make(dtype, Tiers([store], secret=SECRET, after_uses=1, head_start=5.0))
        engine.generate(text, GREEDY)
        assert (engine.inner.prefill_token_count < 100) is found
        engine.close()


SHARES = {"q2": 1.0, "q3": 0.22, "q4": 0.045, "q5": 0.045 / 4.27, "q6": 0.045 / 17.64, "q8": 0.045 / 289}
BITS = {"q2": 2.5, "q3": 3.5, "q4": 4.5, "q5": 5.5, "q6": 6.5, "q8": 8.5}  # at head_dim 64


def test_every_quantised_format_has_its_share_and_promise():
    quantised = [line.name for line in sorted(FORMATS.values(), key=lambda line: line.bits) if line.quantised]
    assert sorted(SHARES, key=SHARES.get, reverse=True) == quantised
    assert sorted(PROMISES, key=PROMISES.get, reverse=True) == quantised


@pytest.mark.parametrize("bits", [2.5, 2.9, 3.5, 4.0, 5.3, 8.5])
def test_bits_go_where_they_take_most_off_the_loss(rng, bits):
    """Within one step of one layer of the least loss that any choice has: brute force over two layers."""
    for _ in range(20):
        losses = rng.exponential(1.0, (2, 2)).astype(np.float32) ** 2
        keys, values = formats_within(losses, 64, bits)
        chosen = [keys[0], values[0], keys[1], values[1]]
        assert sum(BITS[name] for name in chosen) <= 4 * bits
        flat = losses.ravel()

        def lost(names, flat=flat):
            return sum(loss * SHARES[name] for loss, name in zip(flat, names, strict=True))

        best = {}
        for names in product(BITS, repeat=4):
            spent = sum(BITS[name] for name in names)
            best[spent] = min(best.get(spent, np.inf), lost(names))
        assert lost(chosen) >= min(loss for spent, loss in best.items() if spent <= 4 * bits) - 1e-9
        assert lost(chosen) <= min(loss for spent, loss in best.items() if spent <= max(10, 4 * bits - 4)) + 1e-9


def test_a_budget_of_bits(model, rng, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = rng.integers(0, model.config.vocab_size, 200).astype(np.uint32)
    rows = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim
    for bits in (3.0, 4.0, 5.0):
        engine = InferenceEngine(model, dtype=f"auto:{bits}", calibrate=text)
        cache = engine.cache
        assert bits - 0.4 < 8 * cache.block_memory_bytes / cache.block_size / rows <= bits
        known = cache.calibration
    # What is lost in a layer is what an engine loses whose other layers are not packed.
    part, count = text, model.config.num_layers

    def log_probabilities(keys):
        own = InferenceEngine(model, key_dtype=keys, value_dtype="f16", calibrate=known, residual_length=64)
        scores = np.array([own.decode_step(token, i) for i, token in enumerate(part)], np.float64)[16:]
        return scores - np.log(np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) - (
            scores.max(axis=1, keepdims=True)
        )

    exact = log_probabilities(["f16"] * count)
    for layer in (0, count - 1):
        keys = ["f16"] * count
        keys[layer] = "q2"
        lost = (np.exp(exact) * (exact - log_probabilities(keys))).sum(axis=1).mean()
        np.testing.assert_allclose(known.losses[layer, 0], lost, rtol=0.02, atol=1e-6)
    # They are kept: the file has them, and a calibration by tokens that had none gets them.
    (path,) = (tmp_path / "kvcache").iterdir()
    np.testing.assert_array_equal(Calibration.load(path).losses, known.losses)
    assert Calibration.load(path).fingerprint == Calibration(known.centres, known.moments).fingerprint
    for calibrate in (False, Calibration(known.centres, known.moments)):
        with pytest.raises(ValueError, match=r"^calibrate: expected one with"):
            InferenceEngine(model, dtype="auto:4.0", calibrate=calibrate)
    limits = r"^dtype: expected \d\S* \(q2\) to \d\S* bits"
    for wrong, message in (("auto:2", limits), ("auto:40", limits), ("auto:x", "^dtype: expected a")):
        with pytest.raises(ValueError, match=message):
            InferenceEngine(model, dtype=wrong, calibrate=known)
    with pytest.raises(ValueError, match=r"^key_dtype: expected None"):
        InferenceEngine(model, dtype="auto:4.0", key_dtype="q4", calibrate=known)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="expected its checksum"):
        Calibration.load(path)


def test_arguments(model):
    count = model.config.num_layers
    with pytest.raises(ValueError, match=rf"^key_dtype: expected one format, or one for each of {count} layers, got"):
        InferenceEngine(model, key_dtype=["q4"])
    policy = EvictionPolicy.SlidingWindow(60, 4)
    with pytest.raises(ValueError, match=r"^dtype: expected one format with an eviction_policy, got "):
        InferenceEngine(model, dtype=["q4"] * count, eviction_policy=policy, kv_budget=64)
