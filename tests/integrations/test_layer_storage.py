"""Formats of layers, formats in Python and calibrations in `PagedCache`, and what cannot be had there."""

import re

import numpy as np
import pytest
import torch
from hf_models import make_model

from kvcache import Calibration, EvictionPolicy, PagedKvCache, SnapshotError
from kvcache.calibration.calibrating import measure
from kvcache.calibration.layer_losses import formats_within
from kvcache.engine import Transformer
from kvcache.integrations.transformers import PagedCache, PrefixStore, calibrate

pytestmark = pytest.mark.one_build
IDS = np.random.default_rng(4).integers(3, 61, 100)


class Sixteenths:
    """A format in Python."""

    bits, name = 8.0, "sixteenths"

    def encode(self, rows):
        return np.rint(rows * 16)

    def decode(self, codes):
        return codes / 16


@pytest.fixture(scope="module")
def model():
    made = make_model("llama", head_dim=16)
    made.set_attn_implementation("kvcache")
    return made


@pytest.fixture(scope="module")
def known(model):
    return calibrate(model, torch.from_numpy(IDS), losses=True)


def run(model, cache, ids=IDS):
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None], cache=cache).logits[0]


def stored(cache, layer, tokens=100):
    """K and V of a layer as blocks hold them."""
    rows = cache.layers[layer].rows
    return rows.paged.read(cache.layers[layer].slot, int(rows.ids[0]))


def test_a_calibration_is_that_of_an_engine(model, known, tmp_path):
    model.save_pretrained(tmp_path)
    other = measure(Transformer.from_pretrained(tmp_path, activations="exact"), IDS.astype(np.uint32))
    np.testing.assert_allclose(known.centres, other.centres, rtol=0, atol=1e-4)
    np.testing.assert_allclose(known.moments, other.moments, rtol=1e-3, atol=1e-4)
    assert known.losses.shape == (4, 2)
    assert (known.losses > 0).any()
    assert getattr(model.config, "_attn_implementation") == "kvcache"  # noqa: B009
    assert calibrate(model, IDS.tolist()).losses is None


def test_keys_are_rounded_by_the_calibration(model, known):
    """As a `PagedKvCache` of the same keys rounds them; values stay."""
    exact, plain, calibrated = (
        PagedCache(model.config, dtype, calibrate=each) for dtype, each in (("f32", None), ("q4", None), ("q4", known))
    )
    for cache in (exact, plain, calibrated):
        run(model, cache)
    keys, values = stored(exact, 0)  # the first layer is the same in all
    twin = PagedKvCache(7, 16, 2, 16, dtype="q4", calibration=known.of_layers([0]).without_centres([0]))
    twin.allocate(0, 100)
    twin.write(0, 0, keys, values)
    np.testing.assert_array_equal(stored(calibrated, 0)[0], twin.read(0, 0)[0])
    np.testing.assert_array_equal(stored(calibrated, 0)[1], stored(plain, 0)[1])
    assert (stored(calibrated, 0)[0] != stored(plain, 0)[0]).any()


@pytest.mark.parametrize("policy", [False, True])
def test_formats_of_each_layer(model, known, policy):
    """Each layer has its own, whether layers share blocks or not; a budget of bits chooses them."""
    options = {"eviction_policy": EvictionPolicy.SlidingWindow(98, 2)} if policy else {}
    chosen = formats_within(known.losses, 16, 5.5)
    assert len({*chosen[0], *chosen[1]}) > 1
    by_name = PagedCache(model.config, key_dtype=chosen[0], value_dtype=chosen[1], calibrate=known, **options)
    by_bits = PagedCache(model.config, "auto:5.5", calibrate=known, **options)
    assert torch.equal(run(model, by_name), run(model, by_bits))
    for layer in range(4):
        rows, slot = by_bits.layers[layer].rows, by_bits.layers[layer].slot
        held = [getattr(rows.paged, f"{side}_dtype") for side in ("key", "value")]
        assert [each if isinstance(each, str) else each[slot] for each in held] == [chosen[0][layer], chosen[1][layer]]
    by_bits.check()


def test_layers_may_run_in_any_order(model):
    """A layer's format is its own, whichever layer comes first."""
    cache = PagedCache(model.config, ["q8", "f32", "f16", "q4"])
    for layer in (3, 1, 0, 2):
        cache.layers[layer].update(*torch.ones(2, 1, 2, 5, 16))
    assert [cache.layers[layer].slot for layer in range(4)] == [0, 1, 2, 3]


def test_a_format_in_python(model):
    cache, exact = PagedCache(model.config, Sixteenths()), PagedCache(model.config, "f32")
    run(model, cache)
    run(model, exact)
    for mine, theirs in zip(stored(cache, 0), stored(exact, 0), strict=True):
        np.testing.assert_array_equal(mine, np.rint(theirs * 16) / 16)
    assert str(cache) == "PagedCache(sixteenths, 1 rows of 100 tokens)"


def test_prefixes_under_a_calibration(model, known, tmp_path):
    """A kept prefix gives the bits of a cold run; another calibration does not load the file."""
    store = PrefixStore(model.config, "q4", calibrate=known)
    ids = torch.from_numpy(IDS)[None]
    cold = run(model, PagedCache(model.config, "q4", calibrate=known))
    with torch.no_grad():
        cache = store.cache_for(ids)
        model(ids, cache=cache)
        store.keep(cache, ids)
        cache = store.cache_for(ids)
        assert cache.get_seq_length() == 96
        assert torch.equal(model(ids[:, 96:], cache=cache).logits[0], cold[96:])
    store.save(tmp_path / "kept", "m")
    assert PrefixStore(model.config, "q4", calibrate=known).load(tmp_path / "kept", "m") == 6
    with pytest.raises(SnapshotError, match="calibrated"):
        PrefixStore(model.config, "q4").load(tmp_path / "kept", "m")


def refusals(known):
    small = Calibration(known.centres[:2], known.moments[:2])
    return [
        ({"dtype": "auto:4.0"}, ValueError, "calibrate: expected a Calibration with losses for dtype 'auto:4."),
        ({"calibrate": "auto"}, TypeError, "calibrate: expected a Calibration (kvcache.integrations.transform"),
        ({"calibrate": 3}, TypeError, "calibrate: expected a Calibration, got int"),
        ({"calibrate": small}, ValueError, "calibrate: expected one of (4, 2, 16) layers, heads and channels,"),
        ({"dtype": ["q8"]}, ValueError, "dtype: expected one format, or one for each of 4 layers with K and V"),
        ({"key_dtype": ["q8"]}, ValueError, "key_dtype: expected one format, or one for each of 4 layers"),
        ({"dtype": "auto:4", "key_dtype": "q8", "calibrate": known}, ValueError, "key_dtype: expected None, a"),
        ({"dtype": Sixteenths(), "calibrate": known}, ValueError, "calibrate: expected none for keys of a for"),
        ({"dtype": Sixteenths}, TypeError, "dtype: expected an object with `encode` and `decode`, got the class"),
        ({"dtype": torch.float16}, ValueError, "dtype: expected one of f32, f16, q8, q6, q5, q4, q3, q2, got torc"),
    ]


@pytest.mark.parametrize("number", range(10))
def test_refusals(model, known, number):
    settings, error, message = refusals(known)[number]
    with pytest.raises(error, match="^" + re.escape(message)):
        PagedCache(model.config, **settings)


def test_models_that_are_not_measured():
    for name in ("gpt_oss", "mistral", "gemma2"):
        with pytest.raises(ValueError, match=r"^model: expected (layers with full|attention without)"):
            calibrate(make_model(name), IDS)
