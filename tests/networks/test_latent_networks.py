"""Latent attention in networks: what is refused, MTP layers, and reuse in every engine."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from dense_runs import run_dense
from gguf_files import BOOL, U32
from latent_gguf import as_converted, convert
from seeded_weights import seeded, tensors_of, write
from serving import Clock

from kvcache import BatchEngine, Calibration, CheckpointError, InferenceEngine, PrefixCachedEngine
from kvcache.calibration.calibrating import measure
from kvcache.calibration.layer_losses import measure_losses
from kvcache.calibration.passes import new_cache, run_piece
from kvcache.engine import SamplingParams, Transformer
from kvcache.errors import SnapshotError
from kvcache.eviction import EvictionPolicy
from kvcache.kernels.kernels import FORMATS
from kvcache.networks.config import ModelConfig
from kvcache.policies import SnapKV

pytestmark = pytest.mark.one_build

DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=12, repetition_penalty=1.0)


def config_of(name, **changes):
    config = json.loads((seeded(name) / "config.json").read_text())
    return ModelConfig.from_dict({key: value for key, value in (config | changes).items() if value != "absent"})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: expected greedy or group_limited_greedy, got 'noa"),
        ("deepseek_v2_groups", {"topk_group": 5}, "topk_group: expected a positive whole number up to 4, got 5"),
        ("deepseek_v3", {"n_group": 3}, "n_group: expected a divisor of 8 experts, got 3"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok: expected a positive whole number up to 4, g"),
        ("deepseek_v3", {"qk_rope_head_dim": 31}, "qk_rope_head_dim: expected an even number"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "layer_types: expected indexed_attention for each o"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank: expected a size, of the rows that indexers take, got n"),
        ("deepseek_v32", {"index_head_dim": 8}, r"index_head_dim: expected 16 \(qk_rope_head_dim\) to 512, got 8"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk: expected a positive whole number, got 0"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 4}, "indexer_types: expected full, then full or shared for eac"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FFS"}, "index_topk_pattern: expected full, the"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected dense or sparse for each of 3"),
        ("glm4_moe_lite", {"mlp_layer_types": [[]] * 3}, "mlp_layer_types: expected dense or sparse for each of 3"),
        ("glm4_moe_lite", {"rope_interleave": "yes"}, "rope_interleave: expected true or false, got 'yes'"),
    ],
)
def test_what_is_refused(name, changes, message):
    with pytest.raises(CheckpointError, match=rf"^{message}"):
        config_of(name, **changes)


def test_sizes():
    config = config_of("glm4_moe_lite", mlp_layer_types="absent")
    assert (config.num_kv_heads, config.head_dim, config.latent.latent, config.rotary_dim) == (1, 56, 40, 16)
    assert config.mlps == ("mlp", "experts", "experts")
    assert config_of("glm4_moe_lite", mlp_layer_types=["dense", "sparse", "dense"]).mlps == ("mlp", "experts", "mlp")
    factor = 0.1 * 0.8 * np.log(8) + 1
    assert config_of("deepseek_v3").attention_scale == pytest.approx(56**-0.5 * factor**2)


def test_mtp_layers_are_left_out(tmp_path):
    folder = tmp_path / "network"
    shutil.copytree(seeded("glm4_moe_lite"), folder)
    tensors = tensors_of(json.loads((folder / "weights.json").read_text()))
    tensors["model.layers.3.eh_proj.weight"] = tensors["model.layers.0.mlp.gate_proj.weight"]
    write(folder / "model.safetensors", tensors)
    engines = [InferenceEngine.from_pretrained(each) for each in (seeded("glm4_moe_lite"), folder)]
    assert engines[0].generate(range(20), DRAWN) == engines[1].generate(range(20), DRAWN)


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [("KimiK25ForConditionalGeneration", "layers"), ("Kimi_K25ForConditionalGeneration", "blocks")],
)
def test_a_tower_of_kimi(tmp_path, architecture, layers):
    """The text network of Kimi K2.5, as its files name it and as transformers does: that of DeepSeek-V3."""
    texts = json.loads((seeded("deepseek_v3") / "config.json").read_text()) | {"model_type": "kimi_k2"}
    whole = {"architectures": [architecture], "model_type": "kimi_k25", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": texts}))
    tensors = tensors_of(json.loads((seeded("deepseek_v3") / "weights.json").read_text()))
    some = tensors["model.norm.weight"]
    others = ["mm_projector.proj.0", "model.mm_projector.pre_norm"]
    others += ["vision_tower.patch_embed", "vision_tower.encoder.blocks.7.wo"]
    images = {f"{name}.weight": some for name in others}
    texts = {f"language_model.{name.replace('layers', layers)}": each for name, each in tensors.items()}
    write(tmp_path / "model.safetensors", texts | images)
    ids = np.arange(40, dtype=np.uint32)
    models = [Transformer.from_pretrained(folder) for folder in (seeded("deepseek_v3"), tmp_path)]
    np.testing.assert_array_equal(*(run_dense(model, ids) for model in models))


@pytest.mark.parametrize(
    "name", [
        "deepseek_v3", "deepseek_v2", "mistral4", "youtu", "deepseek_v2_biases", "deepseek_v3_biases", "deepseek_v32",
        "glm_moe_dsa",
    ],
)
def test_files_of_gguf_are_the_same_network(name, tmp_path):
    folder = as_converted(seeded(name), tmp_path / "folder")
    ids = np.random.default_rng(0).integers(0, 96, 70).astype(np.uint32)
    path = convert(folder, tmp_path / "x.gguf")
    found, wanted = (run_dense(Transformer.from_pretrained(each), ids) for each in (path, folder))
    assert np.abs(found - wanted).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("deepseek_v3", {"attention__key_length_mla": None}, "key_length_mla: expected more than 32, of a file with"),
        ("deepseek_v3", {"attention__key_length": (U32, 64)}, "attention.key_length: expected 96"),
        ("deepseek_v3", {"attention__kv_lora_rank": None}, "attention.kv_lora_rank: expected a number, got"),
        ("deepseek_v3", {"expert_gating_func": (U32, 3)}, "expert_gating_func: expected 1 or 2, got 3"),
        ("deepseek_v2", {"expert_weights_norm": (BOOL, True)}, "expert_weights_norm: expected false for a choice"),
        ("mistral4", {"expert_count": None}, "expert_count: expected experts, got nothing"),
        ("deepseek_v2", {"expert_count": None}, "dense_block_count: expected all 3 layers without experts, got 1"),
        ("deepseek_v2", {"nextn_predict_layers": (U32, 9)}, "nextn_predict_layers: expected a number below 3, got 9"),
    ],
)
def test_files_of_gguf_that_are_refused(name, entries, message, tmp_path):
    path = convert(seeded(name), tmp_path / "x.gguf", **entries)
    with pytest.raises(CheckpointError, match=message):
        Transformer.from_pretrained(path)


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("deepseek_v2", "f16"), ("deepseek_v3", "q4"), ("deepseek_v3", "calibrated"), ("glm4_moe_lite", "calibrated"),
        ("deepseek_v32", "f32"), ("deepseek_v32", "q4"), ("glm_moe_dsa", "q8"), ("kimi_linear", "q4"),
        ("bailing_hybrid", "f16"),
    ],
)
def test_every_engine_gives_the_tokens_of_a_text_alone(name, storage, tmp_path, known):
    """A residual of 16 has groups that end within prompts, and a pool of few blocks preempts."""
    model, rng = Transformer.from_pretrained(seeded(name)), np.random.default_rng(0)
    options = {"dtype": storage}
    if storage == "calibrated":
        options = {"dtype": "q4", "calibrate": known(name), "residual_length": 16}
    first, second, third = (rng.integers(0, 96, count).tolist() for count in (50, 21, 7))
    prompts = [first, first + second, second, first + third]
    alone = [InferenceEngine(model, **options).generate(prompt, DRAWN) for prompt in prompts]
    assert InferenceEngine(model, prefill_chunk=9, **options).generate(prompts[1], DRAWN) == alone[1]

    def cached():
        return PrefixCachedEngine(InferenceEngine(model, **options), 40)

    engine, again = cached(), cached()
    assert [engine.generate(prompt, DRAWN) for prompt in prompts] == alone
    assert engine.complete(prompts[1], DRAWN).cached_tokens >= 64
    engine.save(tmp_path / "saved")
    assert again.load(tmp_path / "saved")
    for prompt, want in zip(prompts, alone, strict=True):
        result = again.complete(prompt, DRAWN)
        assert result.tokens == want
    batch = BatchEngine(model, num_blocks=7, clock=Clock(), **options)
    requests = [batch.submit(prompt, DRAWN) for prompt in prompts]
    while batch.step():
        pass
    assert [list(request.tokens) for request in requests] == alone
    assert batch.stats().preemptions > 0
    batch.check()
    if storage == "calibrated":
        with pytest.raises(SnapshotError, match="expected model"):
            PrefixCachedEngine(InferenceEngine(model, dtype="q4", residual_length=16), 40).load(tmp_path / "saved")


def test_a_calibration_has_what_errors_of_rows_cost(known):
    """Means of the rows of a text, and moments that steer errors away from what queries and V see."""
    model, text = Transformer.from_pretrained(seeded("glm4_moe_lite")), np.random.default_rng(5).integers(0, 96, 150)
    found, rows, queries = known("glm4_moe_lite"), [], []

    def note(layer, queried, keys):
        rows.append(keys[16:, 0].astype(np.float64)), queries.append(queried[16:].astype(np.float64))

    cache = new_cache(model, 150, dtype="f32")
    cache.allocate(0, 0)
    run_piece(model, cache, text.astype(np.uint32), 0, "none", 150, note)
    assert cache.latent == (40, 16)
    for layer, (keys, queried) in enumerate(zip(rows, queries, strict=True)):
        np.testing.assert_allclose(found.centres[layer, 0], keys.mean(0), atol=1e-5)
        spread = keys[:, :40].var(axis=0).sum()
        want = spread * model.attention[layer].scale ** 2 * np.einsum("nhd,nhe->de", queried, queried)
        want = want / queried.shape[0] / queried.shape[1] + np.diag([1.0] * 40 + [0.0] * 16)
        np.testing.assert_allclose(found.moments[layer, 0], want, rtol=1e-4, atol=1e-5)


def test_less_is_lost_with_a_calibration(known):
    model, text = Transformer.from_pretrained(seeded("deepseek_v3")), np.random.default_rng(7).integers(0, 96, 200)
    exact, errors = InferenceEngine(model).score(text), []
    for each, length in ((False, 0), (known("deepseek_v3"), 0), (known("deepseek_v3"), None)):
        engine = InferenceEngine(model, dtype="q4", calibrate=each, residual_length=length)
        errors.append(np.abs(engine.score(text) - exact).mean())
    assert errors[2] < 0.8 * errors[1] < 0.7 * errors[0]
    assert (engine.residual_length, engine.cache.first_tokens) == (64, 16)
    assert InferenceEngine(model, dtype="q4").residual_length == 64


def test_a_budget_of_bits_is_one_of_rows(known):
    """Each layer has one format, which takes its bits and a scale; the largest loss gets most of them."""
    model, found = Transformer.from_pretrained(seeded("deepseek_v3")), known("deepseek_v3")
    losses = measure_losses(model, found, np.random.default_rng(5).integers(0, 96, 150).astype(np.uint32))
    assert (losses[:, 0] > 0).all()
    assert not losses[:, 1].any()
    for count, want in ((7.0, 8), (3.1, 3)):
        whole = Calibration(found.centres, found.moments, np.array([[1.0, 9], [8, 9], [2, 9]]))
        cache = InferenceEngine(model, dtype=f"auto:{count}", calibrate=whole).cache
        assert cache.key_dtype == cache.value_dtype
        names = [cache.key_dtype] * 3 if isinstance(cache.key_dtype, str) else cache.key_dtype
        assert max(FORMATS[name].bits for name in names) == FORMATS[names[1]].bits == want
        assert sum(FORMATS[name].bits + 32 / 96 for name in names) <= 3 * count


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Calibrations of networks by a text of 150 tokens."""
    found = {}

    def of(name):
        if name not in found:
            text = np.random.default_rng(5).integers(0, 96, 150).astype(np.uint32)
            found[name] = measure(Transformer.from_pretrained(seeded(name)), text)
        return found[name]

    return of


def test_layers_that_take_the_choice_of_an_earlier_one():
    """A list, letters, or every so manyth layer from one on."""
    def own(**changes):
        return config_of("glm_moe_dsa", num_hidden_layers=6, mlp_layer_types="absent", layer_types="absent",
                         **{"indexer_types": None} | changes).index.own

    assert own() == (True,) * 6
    assert own(indexer_types=["full", "shared"] * 3) == (True, False) * 3
    assert own(index_topk_pattern="FFSSSF") == (True, True, False, False, False, True)
    assert own(index_topk_freq=3) == (True, True, False, False, True, False)
    assert own(index_topk_freq=2, index_skip_topk_offset=3) == (True, True, True, False, True, False)


def test_settings_that_indexers_exclude():
    """By name; in files and tiers the format of their keys is a part of what rows mean."""
    model, text = Transformer.from_pretrained(seeded("deepseek_v32")), np.arange(80, dtype=np.uint32)
    for name, options in (
        ("eviction_policy", {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 16}),
        ("sparse_tokens", {"sparse_tokens": 16}),
        ("calibrate", {"calibrate": text}), ("residual_length", {"residual_length": 16}),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected .* with layers whose indexers choose tokens, got"):
            InferenceEngine(model, dtype="q4", **options)
    with pytest.raises(ValueError, match=r"^policy: expected none with layers whose indexers choose tokens"):
        InferenceEngine(model, dtype="q4").compress(text, SnapKV())


def test_settings_that_do_not_fit_are_refused():
    model = Transformer.from_pretrained(seeded("deepseek_v3"))
    with pytest.raises(ValueError, match=r"^eviction_policy: expected .* layers whose V is a part of K"):
        InferenceEngine(model, dtype="q4", eviction_policy=EvictionPolicy.StreamingLLM(4, 12))
    with pytest.raises(ValueError, match=r"^value_dtype: expected q8, as of keys, with latent, got q4"):
        InferenceEngine(model, key_dtype="q8", value_dtype="q4")
    with pytest.raises(ValueError, match=r"^calibrate: expected one of \(3, 1, 96\) layers, heads and channels, got"):
        InferenceEngine(model, dtype="q4", calibrate=Calibration(np.zeros((3, 4, 96))))
