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

from kvcache import BatchEngine, CheckpointError, InferenceEngine, PrefixCachedEngine
from kvcache.engine import SamplingParams, Transformer
from kvcache.eviction import EvictionPolicy
from kvcache.networks.config import ModelConfig

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]

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
        ("deepseek_v3", {"qk_rope_head_dim": 31}, "qk_rope_head_dim: expected an even number"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected dense or sparse for each of 3"),
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


@pytest.mark.parametrize("architecture", ["KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"])
def test_a_tower_of_kimi(tmp_path, architecture):
    """The text network of Kimi K2.5, named as its files name it: that of DeepSeek-V3."""
    texts = json.loads((seeded("deepseek_v3") / "config.json").read_text()) | {"model_type": "kimi_k2"}
    whole = {"architectures": [architecture], "model_type": "kimi_k25", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": texts}))
    tensors = tensors_of(json.loads((seeded("deepseek_v3") / "weights.json").read_text()))
    some = tensors["model.norm.weight"]
    images = {f"{name}.weight": some for name in ("vision_tower.patch_embed", "mm_projector.proj.0")}
    write(tmp_path / "model.safetensors", {f"language_model.{name}": each for name, each in tensors.items()} | images)
    ids = np.arange(40, dtype=np.uint32)
    models = [Transformer.from_pretrained(folder) for folder in (seeded("deepseek_v3"), tmp_path)]
    np.testing.assert_array_equal(*(run_dense(model, ids) for model in models))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "mistral4", "youtu"])
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


@pytest.mark.parametrize("dtype", ["f16", "q4"])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_every_engine_gives_the_tokens_of_a_text_alone(name, dtype, tmp_path):
    model, rng = Transformer.from_pretrained(seeded(name)), np.random.default_rng(0)
    first, second, third = (rng.integers(0, 96, count).tolist() for count in (50, 21, 7))
    prompts = [first, first + second, second, first + third]
    alone = [InferenceEngine(model, dtype=dtype).generate(prompt, DRAWN) for prompt in prompts]

    def cached():
        return PrefixCachedEngine(InferenceEngine(model, dtype=dtype), 40)

    engine, again = cached(), cached()
    assert [engine.generate(prompt, DRAWN) for prompt in prompts] == alone
    engine.save(tmp_path / "saved")
    assert again.load(tmp_path / "saved")
    for prompt, want in zip(prompts, alone, strict=True):
        result = again.complete(prompt, DRAWN)
        assert result.tokens == want
    batch = BatchEngine(model, num_blocks=14, dtype=dtype)
    requests = [batch.submit(prompt, DRAWN) for prompt in prompts]
    while batch.step():
        pass
    assert [list(request.tokens) for request in requests] == alone
    batch.check()


def test_settings_that_do_not_fit_are_refused():
    model = Transformer.from_pretrained(seeded("deepseek_v3"))
    for name, value in (
        ("calibrate", "auto"), ("residual_length", 16), ("eviction_policy", EvictionPolicy.StreamingLLM(4, 12)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected .* layers whose V is a part of K"):
            InferenceEngine(model, dtype="q4", **{name: value})
    with pytest.raises(ValueError, match=r"^value_dtype: expected q8, as of keys, with latent, got q4"):
        InferenceEngine(model, key_dtype="q8", value_dtype="q4")
