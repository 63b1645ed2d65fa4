"""The saved prefix cache of an engine: the same answers with less prefill, and only for the same model."""

import dataclasses
from collections import namedtuple

import numpy as np
import pytest
from format_pairs import NEIGHBOURS
from places import GOLDEN, MODELS, in_every_build
from saved_caches import set_bits
from seeded_weights import golden_folder
from tier_stores import SECRET, ObjectStore

from kvcache import BatchEngine, Calibration, PagedKvCache, PrefixCache, SnapshotError
from kvcache.calibration import layer_losses
from kvcache.calibration.calibrating import measure
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer
from kvcache.kernels import kernels
from kvcache.networks.fingerprint import fingerprint
from kvcache.tiers import Tiers

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=64)
SHORT = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=4)


def engine(model, blocks=64, **options):
    return PrefixCachedEngine(InferenceEngine(model, **options), blocks, strict=True)


def prompt(seed, n):
    return np.random.default_rng(seed).integers(0, 250, n).astype(np.uint32)


@pytest.mark.parametrize("name", in_every_build(MODELS))
def test_the_answers_of_every_model(tmp_path, name):
    model = Transformer.from_pretrained(GOLDEN / name)
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        golden = dict(arrays)
    saved = engine(model)
    for length in (200, 33):
        saved.generate(golden[f"prompt_{length}"], GREEDY)
    saved.save(tmp_path / "cache")
    loaded = engine(model)
    assert loaded.load(tmp_path / "cache") == saved.cache_stats().cached_blocks == loaded.cache_stats().cached_blocks
    before = saved.inner.prefill_token_count
    for length in (200, 33, 17):
        for cached in (saved, loaded):
            assert cached.generate(golden[f"prompt_{length}"], GREEDY) == golden[f"greedy_{length}"].tolist()
            cached.check()
    assert loaded.inner.prefill_token_count == saved.inner.prefill_token_count - before < 200


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("pair", NEIGHBOURS, ids="-".join)
def test_every_block_comes_back_bit_for_bit(tmp_path, network, pair, rotate):
    options = {"key_dtype": pair[0], "value_dtype": pair[1], "rotate": rotate}
    saved, loaded = engine(network, **options), engine(network, **options)
    for seed in range(3):
        tokens = np.concatenate([prompt(9, 40), prompt(seed, 25)])
        saved.generate(tokens, SHORT, namespace=seed % 2)
    saved.save(tmp_path / "cache")
    loaded.load(tmp_path / "cache")
    for seed in range(3):
        tokens = np.concatenate([prompt(9, 40), prompt(seed, 25)])
        caches = [x.prefix_cache.cache for x in (saved, loaded)]
        with caches[0].open_session(tokens, seed % 2) as one, caches[1].open_session(tokens, seed % 2) as other:
            assert one.num_tokens == other.num_tokens == 64
            for layer in range(network.config.num_layers):
                raw = [x._store.raw(layer)[y.block_indices] for x, y in zip(caches, (one, other), strict=True)]
                np.testing.assert_array_equal(*raw)
        assert saved.generate(tokens, SHORT, namespace=seed % 2) == loaded.generate(tokens, SHORT, namespace=seed % 2)
        loaded.check()


def test_another_models_file_is_refused_by_name(tmp_path, network):
    other = Transformer.from_pretrained(GOLDEN / "qwen3_tied")
    saved = engine(network)
    saved.generate(prompt(0, 40), SHORT)
    saved.save(tmp_path / "cache")
    loaded = engine(other)
    with pytest.raises(SnapshotError) as caught:
        loaded.load(tmp_path / "cache")
    assert f"model '{fingerprint(other)}', got '{fingerprint(network)}'" in str(caught.value)
    assert "Qwen3ForCausalLM" in fingerprint(other)
    assert "LlamaForCausalLM" in fingerprint(network)
    assert loaded.cache_stats().cached_blocks == 0


def test_another_format_is_refused(tmp_path, network):
    saved = engine(network)
    saved.generate(prompt(0, 40), SHORT)
    saved.save(tmp_path / "cache")
    for options, message in (
        ({"dtype": "f16"}, "expected key_dtype f16, got f32"),
        ({"value_dtype": "q4", "residual_length": 0}, "expected value_dtype q4, got f32"),
        ({"block_size": 32}, "expected page_tokens 32, got 16"),
    ):
        with pytest.raises(SnapshotError, match=message):
            engine(network, **options).load(tmp_path / "cache")


def test_a_file_of_a_budget_with_fewer_formats_to_choose_from(tmp_path, network, monkeypatch):
    """Its formats keep the budget; an engine that is made with them reads it, whatever a budget chooses now."""
    text, path = prompt(0, 40), tmp_path / "cache"
    known = measure(network, prompt(3, 120))
    known = Calibration(known.centres, known.moments, np.array([[3.0, 2], [1, 2]], np.float32))
    with monkeypatch.context() as older:
        older.delitem(layer_losses._SHARES, "q5")
        saved = engine(network, dtype="auto:6.5", calibrate=known)
    want = saved.generate(text, SHORT)
    saved.save(path)
    now, found = engine(network, dtype="auto:6.5", calibrate=known), PrefixCache.saved_formats(path)
    for name, dtype in found.items():
        assert tuple(dtype) == tuple(getattr(saved.inner.cache, name))
    assert saved.inner.cache.key_dtype != now.inner.cache.key_dtype
    assert "q5" in now.inner.cache.key_dtype
    with pytest.raises(SnapshotError, match=r"cache: expected formats (q\d ?){2} / .*, got .*`PrefixCache.saved_fo"):
        now.load(path)
    one, many = engine(network, **found, calibrate=known), BatchEngine(network, **found, calibrate=known)
    for loaded in (one, many):
        assert loaded.load(path) == saved.cache_stats().cached_blocks
    assert (one.generate(text, SHORT), many.submit(text, SHORT).result()) == (want, want)
    assert one.cache_stats().hit_tokens == many.cache_stats().hit_tokens > 0
    for options in ({}, {"key_dtype": "q8", "value_dtype": "q5"}):  # which is the same for all layers
        other = engine(network, **options, calibrate=known if options else False)
        other.generate(text, SHORT)
        other.save(path := tmp_path / f"{other.inner.cache.key_dtype}_cache")
        assert PrefixCache.saved_formats(path) == {"key_dtype": "f32", "value_dtype": "f32"} | options
    with pytest.raises(SnapshotError, match=r"cache: expected formats q.*, got one for all layers"):
        now.load(path)
    windows = [PrefixCache.over(PagedKvCache(4, 16, 2, 8, num_layers=2, dtype=["q8", "q4"])) for _ in range(2)]
    windows[0].save(path)
    assert PrefixCache.saved_formats(path) == {"key_dtype": ["q8", "q4"], "value_dtype": ["q8", "q4"]}
    windows[0].save(path, beside=windows[1:])
    with pytest.raises(SnapshotError, match="cache: expected layers of one kind, got several"):
        PrefixCache.saved_formats(path)


def test_rows_that_an_engine_would_not_compute_are_refused(tmp_path, network):
    """Which tokens queries read in f16 changes K and V of all layers but the first, and so does another version."""
    saved = engine(network, dtype="q4", residual_length=16)
    saved.generate(prompt(0, 40), SHORT)
    saved.save(tmp_path / "cache")
    for length in (0, 32):
        with pytest.raises(SnapshotError, match=r"expected model .*, got .*, residual_length 16'"):
            engine(network, dtype="q4", residual_length=length).load(tmp_path / "cache")
    same = engine(network, dtype="q4", residual_length=16)
    set_bits(tmp_path / "cache", 1)
    with pytest.raises(SnapshotError, match=f"expected bits of version {kernels.BITS_VERSION}, got version 1"):
        same.load(tmp_path / "cache")
    assert same.load(tmp_path / "cache", exact=False) == 2
    assert not same.cache_stats().exact


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_file_has_the_same_bytes_at_every_level(tmp_path, name):
    model, files = Transformer.from_pretrained(GOLDEN / name), set()
    for dtype in ("f32", "q4"):
        for level in kernels.simd_levels():
            with kernels.use_simd(level):
                saved = engine(model, dtype=dtype)
                saved.generate(prompt(1, 150), SHORT)
                saved.save(tmp_path / level)
                files.add((tmp_path / level).read_bytes())
        assert len(files) == 1
        files.clear()


@pytest.mark.parametrize("batch", [False, True])
def test_nothing_of_other_bits_goes_to_tiers(tmp_path, batch):
    """Neither blocks that are evicted, nor those of a prompt or of its window; what the tier has is found still."""
    model, store, tokens = Transformer.from_pretrained(GOLDEN / "gemma3"), ObjectStore(), prompt(1, 200)
    saved = engine(model)
    saved.generate(tokens, SHORT)
    saved.save(tmp_path / "cache")
    for version, exact in ((kernels.BITS_VERSION, True), (0, False)):
        set_bits(tmp_path / "cache", version)
        with Tiers([store], secret=SECRET, after_uses=1, head_start=60) as tiers:
            if batch:
                loaded = BatchEngine(model, dtype="f32", tiers=tiers)
            else:
                loaded = PrefixCachedEngine(InferenceEngine(model), 64, tiers=tiers)
            assert loaded.load(tmp_path / "cache", exact=False) > 0
            for text in (tokens, prompt(2, 200)):
                loaded.complete(text, SHORT) if not batch else loaded.submit(text, SHORT).completions()
            loaded.clear_cache()
            assert tiers.flush(60)
            assert loaded.cache_stats().exact == exact
            assert bool(store.bucket) == exact
            assert all(each.stats().exact == exact for each in loaded._pool.prefixes)
            store.bucket.clear()


def test_what_a_fingerprint_sees(network):
    """Any option that K and V depend on, any shape, and any changed weight."""
    names = {fingerprint(network)}
    assert fingerprint(Transformer.from_pretrained(GOLDEN / "llama")) in names
    config = network.config
    for change in (
        {"rms_norm_eps": 2 * config.rms_norm_eps},
        {"max_position_embeddings": config.max_position_embeddings + 1},
        {"rope": dataclasses.replace(config.rope, theta=2 * config.rope.theta)},
    ):
        names.add(fingerprint(Transformer(dataclasses.replace(network.config, **change), network.weights)))
    same = dataclasses.replace(network.config, eos_token_ids=(7,))
    assert fingerprint(Transformer(same, network.weights)) in names
    weights = network.weights
    layer = weights.layers[1]
    for part in (layer, layer.mlps[0]):
        for field in dataclasses.fields(part):
            array = getattr(part, field.name)
            if array is not None and field.name != "mlps":
                moved = dataclasses.replace(part, **{field.name: array * np.float32(1.001)})
                moved = moved if part is layer else dataclasses.replace(layer, mlps=(moved,))
                layers = (weights.layers[0], moved, *weights.layers[2:])
                names.add(fingerprint(Transformer(network.config, dataclasses.replace(weights, layers=layers))))
    for name in ("embedding", "norm", "head"):
        moved = dataclasses.replace(weights, **{name: getattr(weights, name) * np.float32(1.001)})
        names.add(fingerprint(Transformer(network.config, moved)))
    arrays = sum(array is not None for array in layer.arrays())
    assert len(names) == 1 + 3 + arrays + 3


NAMES = {  # saved caches and tiers have them
    "llama": "LlamaForCausalLM-2x64-ab01ca9fdaf64b404fe0336489a8452a",
    "gemma4": "Gemma4ForCausalLM-8x48-9174a3638f29916eb4df9b216141efce",
    "qwen3_next": "Qwen3NextForCausalLM-3x48-3cb2adbb804f02f72a14967a759aa70c",
}


def test_a_new_field_with_a_default_changes_no_name(network):
    """A field of the configuration, or of its parts; another value, or a field without a default, changes it."""
    for name, expected in NAMES.items():
        found = fingerprint(Transformer.from_pretrained(golden_folder(name)))
        assert found == expected, "the name has changed: a new field needs a default, and a default must stay"

    def wider(part, *default, **given):
        """A copy of a part of a configuration with a field more."""
        added = [("added", int, *(dataclasses.field(default=each) for each in default))]
        kind = dataclasses.make_dataclass("Wider", added, bases=(type(part),), frozen=True, kw_only=True)
        return kind(**{each.name: getattr(part, each.name) for each in dataclasses.fields(part)} | given)

    def name_of(config):
        return fingerprint(Transformer(config, network.weights))

    config, rope, name = network.config, network.config.rope, fingerprint(network)
    assert name_of(wider(config, 0)) == name_of(dataclasses.replace(config, rope=wider(rope, 0))) == name
    others = [wider(config, 0, added=1), wider(config, added=0)]
    others.append(dataclasses.replace(config, rope=wider(rope, 0, added=1)))
    one = config.sizes[0]
    sizes_of = namedtuple("Wider", [*one._fields, "added"], defaults=[*one._field_defaults.values(), 0])
    for added in (0, 1):
        sizes = tuple(sizes_of(*each, added) for each in config.sizes)
        assert (name_of(dataclasses.replace(config, sizes=sizes)) == name) == (added == 0)
    assert len({name, *map(name_of, others)}) == 4


def test_a_fingerprint_does_not_depend_on_memory_order(network):
    """The hash of a large matrix covers pieces from all its parts."""
    weights = network.weights
    large = np.random.default_rng(0).standard_normal((300, 200), np.float32)
    names = set()
    for order in "CF":
        head = np.asarray(large, order=order)
        names.add(fingerprint(Transformer(network.config, dataclasses.replace(weights, head=head))))
    assert len(names) == 1
    for at in ((0, 0), (-1, -1)):
        moved = large.copy()
        moved[at] += 1
        names.add(fingerprint(Transformer(network.config, dataclasses.replace(weights, head=moved))))
    assert len(names) == 3


class Other:
    """A network that follows the protocol and is no `Transformer`."""

    def __init__(self, network):
        self.config, self.forward = network.config, network.forward


def test_a_network_without_a_fingerprint_needs_a_name(tmp_path, network):
    saved = engine(Other(network))
    want = saved.generate(prompt(0, 40), SHORT)
    for call in (saved.save, saved.load):
        with pytest.raises(TypeError, match="model: expected a Transformer, or a name for another model, got Other"):
            call(tmp_path / "cache")
    saved.save(tmp_path / "cache", model="mine")
    loaded = engine(Other(network))
    with pytest.raises(SnapshotError, match=r"expected model 'yours', got 'mine'"):
        loaded.load(tmp_path / "cache", model="yours")
    assert loaded.load(tmp_path / "cache", model="mine") == 2
    assert loaded.generate(prompt(0, 40), SHORT) == want


def test_damage_costs_work_and_no_token(tmp_path, network):
    path = tmp_path / "cache"
    tokens = prompt(0, 200)
    saved = engine(network)
    want = saved.generate(tokens, SHORT)
    saved.save(path)
    good = path.read_bytes()
    block = saved.inner.cache.block_memory_bytes
    for page in range(12):
        data = bytearray(good)
        data[len(data) - (12 - page) * block + 100 * page] ^= 4
        path.write_bytes(data)
        loaded = engine(network)
        assert loaded.load(path) == 12
        assert loaded.generate(tokens, SHORT) == want
        assert loaded.inner.prefill_token_count == 200 - 16 * page
        loaded.check()
        assert loaded.cache_stats().cached_blocks == 12  # computed and cached again
        assert loaded.generate(tokens, SHORT) == want
        assert loaded.inner.prefill_token_count == 200 - 16 * page + 8


def test_a_smaller_engine_takes_the_newest_blocks(tmp_path, network):
    saved = engine(network)
    for seed in range(4):
        saved.generate(prompt(seed, 48), SamplingParams(max_tokens=0))
    saved.save(tmp_path / "cache")
    for blocks in (0, 1, 3, 7, 12):
        loaded = engine(network, blocks)
        assert loaded.load(tmp_path / "cache") == blocks
        loaded.check()
        left = blocks
        for seed in reversed(range(4)):
            assert loaded.prefix_cache.cache.lookup(prompt(seed, 48))[0] == 16 * min(3, left)
            left = max(0, left - 3)
        loaded.check()
