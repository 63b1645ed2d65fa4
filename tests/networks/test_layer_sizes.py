"""Sizes of each layer in configurations and files: both spellings, what is left out, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from dense_runs import run_dense
from gguf_files import ARRAY, BOOL, F32, STRING, U32, convert, entries_of, tensors_of, write
from places import in_every_build
from seeded_weights import golden_folder
from tensor_files import pack_arrays

from kvcache.engine import ModelConfig, Transformer
from kvcache.errors import CheckpointError
from kvcache.kernels.matrix import Matrix
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.fingerprint import fingerprint

pytestmark = pytest.mark.one_build

TOKENS = np.arange(40, dtype=np.uint32)


def content(name="gemma4"):
    found = json.loads((golden_folder(name) / "config.json").read_text())
    return found.get("text_config", found)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_experts", "gemma4_unified"])
def test_both_spellings(name):
    """`per_layer_config` of transformers 5, and the two keys of published files."""
    newer, older = content(name), content(name)
    del older["per_layer_config"]
    older |= {"global_head_dim": 24, "num_global_key_value_heads": 1}
    if name == "gemma4":
        older["num_global_key_value_heads"] = None
    assert ModelConfig.from_dict(older) == ModelConfig.from_dict(newer)


def test_numbers_of_layers_with_zeros():
    """transformers writes all of one width, so that they stand in their order."""
    spelled = content() | {
        "num_hidden_layers": 12, "num_kv_shared_layers": 0, "layer_types": (["sliding_attention"] * 3 +
        ["full_attention"]) * 3, "per_layer_config": {str(i): {"head_dim": 24} for i in (3, 7, 11)},
    }
    expected = ModelConfig.from_dict(spelled)
    assert [size.head_dim for size in expected.sizes] == [16, 16, 16, 24] * 3
    padded = {f"{i:02}": {"head_dim": 24} for i in (3, 7, 11)}
    assert ModelConfig.from_dict(spelled | {"per_layer_config": padded}) == expected
    for wrong in ("3", "003"):
        with pytest.raises(CheckpointError, match="per_layer_config: expected an object with numbers of 12 layers"):
            ModelConfig.from_dict(spelled | {"per_layer_config": padded | {wrong: {"head_dim": 24}}})
    for wrong in ("-3", "+3", " 3", "\u0663", "1e1", "", "9" * 5000):
        with pytest.raises(CheckpointError, match="per_layer_config: expected an object with numbers of 12 layers"):
            ModelConfig.from_dict(spelled | {"per_layer_config": {wrong: {"head_dim": 24}}})


def test_published_sizes():
    """E2B: what the model card says."""
    config = ModelConfig.from_dict(content() | {
        "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "head_dim": 256, "per_layer_config": None, "intermediate_size": 6144, "sliding_window": 512,
        "max_position_embeddings": 131072,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    })
    assert {size.kv_layer for size in config.sizes[15:]} == {13, 14}
    assert {size.intermediate_size for size in config.sizes[:15]} == {6144}
    assert {size.intermediate_size for size in config.sizes[15:]} == {12288}
    layers = zip(config.windows, config.sizes, strict=True)
    owned = [(window, size.num_kv_heads, size.head_dim) for window, size in layers if size.kv_layer is None]
    assert (owned.count((512, 1, 256)), owned.count((None, 1, 512)), len(owned)) == (12, 3, 15)
    assert (config.rotary_dim, config.window_rotary_dim) == (512, 256)
    assert np.count_nonzero(config.rope.frequencies(512)) == 64


@pytest.mark.parametrize(("changes", "message"), [
    ({"per_layer_config": {"8": {"head_dim": 24}}}, "per_layer_config: expected an object with numbers of 8 layers"),
    ({"per_layer_config": [1]}, "per_layer_config: expected an object with numbers of 8 layers"),
    ({"per_layer_config": {"1": {"sliding_window": 8}}}, "per_layer_config.1: expected an object with head_dim, "),
    ({"per_layer_config": {"1": {"head_dim": True}}}, "per_layer_config.1.head_dim: expected a positive whole number"),
    ({"per_layer_config": {"1": {"head_dim": 23}}}, "head_dim: expected an even number .*, got 23 in layer 1"),
    ({"per_layer_config": {"5": {"num_key_value_heads": 2}}}, "expected the 1 KV heads of 16 .*, got 2 of 16"),
    ({"per_layer_config": {"1": {"head_dim": 24}}}, "head_dim: expected one for all layers without a window"),
    ({"per_layer_config": {"0": {"head_dim": 24}}}, "head_dim: expected one for all layers with a window"),
    ({"per_layer_config": {"0": {"num_key_value_heads": 4}}}, "num_key_value_heads: expected a divisor of 6 attention"),
    ({"num_kv_shared_layers": 8}, "num_kv_shared_layers: expected a whole number of at least 0 up to 7, got 8"),
    ({"num_kv_shared_layers": 7}, "num_kv_shared_layers: expected a layer like 1 before layer 1, got none"),
    ({"vocab_size_per_layer_input": 95}, "vocab_size_per_layer_input: expected vocab_size, 96, got 95"),
    ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input: expected a positive whole number"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected false or 'vision', got 'all'"),
    ({"enable_moe_block": True}, "num_experts: expected a positive whole number, got nothing"),
    ({"rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5},
        "sliding_attention": {"rope_type": "default"},
    }}, "full_attention: expected a partial_rotary_factor up to 1"),
])
def test_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(content() | changes)


def test_the_last_layer_has_no_window():
    """As transformers sets it; without `layer_types` each sixth layer has none."""
    changes = {"layer_types": None, "per_layer_config": None, "num_kv_shared_layers": 0}
    config = ModelConfig.from_dict(content() | changes)
    assert [window is None for window in config.windows] == [False] * 5 + [True, False, True]


def test_tensors_of_layers_that_share(tmp_path):
    """Published files have K and V of these layers too: they are left out; other tensors are not."""
    shutil.copytree(golden_folder("gemma4"), tmp_path / "x")
    checkpoint = Checkpoint(golden_folder("gemma4"))
    arrays = {name: checkpoint.read(name) for name in checkpoint._files}
    for part, shape in (("k_proj", (16, 48)), ("v_proj", (16, 48)), ("k_norm", (16,))):
        arrays[f"model.layers.5.self_attn.{part}.weight"] = np.ones(shape, np.float32)
    (tmp_path / "x" / "model.safetensors").write_bytes(pack_arrays(arrays))
    expected = run_dense(Transformer.from_pretrained(golden_folder("gemma4"), weights="f32"), TOKENS)
    assert run_dense(Transformer.from_pretrained(tmp_path / "x"), TOKENS).tobytes() == expected.tobytes()
    arrays["model.layers.5.self_attn.v_norm.weight"] = np.ones(16, np.float32)
    (tmp_path / "x" / "model.safetensors").write_bytes(pack_arrays(arrays))
    with pytest.raises(CheckpointError, match=r"expected no others, got the tensors model.layers.5.self_attn.v_norm"):
        Transformer.from_pretrained(tmp_path / "x")


@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize("name", in_every_build(["gemma4", "gemma4_experts"]))
def test_packed_weights(name, weights):
    """Norms, factors, the router and what projects inputs stay; logits are near those of all bits."""
    exact, packed = (Transformer.from_pretrained(golden_folder(name), weights=kind) for kind in ("f32", weights))
    expected, found = run_dense(exact, TOKENS), run_dense(packed, TOKENS)
    error = np.sqrt(np.mean((found - expected) ** 2)) / expected.std()
    assert 0 < error < {"q8": 0.2, "q4": 0.9}[weights]
    assert packed.weights.nbytes < exact.weights.nbytes


class TestGguf:
    """Files with the networks of texts among others, and entries that do not fit."""

    def file(self, tmp_path, changes=(), more=()):
        folder = golden_folder("gemma4")
        config = ModelConfig.from_pretrained(folder)
        letters, entries = entries_of(config, json.loads((folder / "config.json").read_text()))
        entries = {key: value for key, value in (entries | dict(changes)).items() if value is not None}
        return write(tmp_path / "x.gguf", letters, entries, tensors_of(folder, config) | dict(more))

    def test_other_networks_in_the_file(self, tmp_path):
        """As ollama writes it: tensors and entries of images and sounds, several ends of a text, K and V unread."""
        part = np.ones((4, 4), np.float32)
        path = self.file(
            tmp_path,
            {"gemma4.vision.block_count": (U32, 3), "tokenizer.ggml.eos_token_ids": (ARRAY, [1, 7], U32)},
            {"v.blk.0.attn_q.weight": part, "a.conv.weight": part, "mm.input_projection.weight": part,
             "blk.6.attn_k.weight": part},
        )
        found = Transformer.from_pretrained(path)
        assert found.config.eos_token_ids == (1, 7)
        expected = run_dense(Transformer.from_pretrained(golden_folder("gemma4"), weights="f32"), TOKENS)
        np.testing.assert_allclose(run_dense(found, TOKENS), expected, rtol=0, atol=2e-5)
        with pytest.raises(CheckpointError, match=r"expected no others, got the tensors x\.weight"):
            Transformer.from_pretrained(self.file(tmp_path, (), {"x.weight": part}))

    @pytest.mark.parametrize(("changes", "message"), [
        ({"attention.sliding_window_pattern": (ARRAY, [True] * 7, BOOL)}, "pattern: expected a bool for each of 8"),
        ({"attention.sliding_window_pattern": None}, "sliding_window_pattern: expected a bool for each of 8 layers"),
        ({"attention.head_count_kv": (ARRAY, [1] * 7, U32)}, "head_count_kv: expected a whole number for each of 8"),
        ({"feed_forward_length": (ARRAY, [72] * 8, U32)}, "expected shape"),
        ({"attention.key_length_swa": None}, "attention.key_length_swa: expected a number, got nothing"),
        ({"attention.value_length": (U32, 16)}, "value_length: expected 24 as in attention.key_length, got 16"),
        ({"rope.dimension_count_swa": (U32, 8)}, "dimension_count_swa: expected 16 as in attention.key_length_swa"),
        ({"rope.scaling.type": (STRING, "linear"), "rope.scaling.factor": (F32, 2.0)}, "scaling.type: expected none"),
        ({"attention.shared_kv_layers": (U32, 8)}, "num_kv_shared_layers: expected a whole number .* up to 7, got 8"),
        ({"embedding_length_per_layer_input": (U32, 4)}, "per_layer_token_embd.weight: expected shape"),
    ])
    def test_refused(self, tmp_path, changes, message):
        named = {f"gemma4.{key}": value for key, value in changes.items()}
        with pytest.raises(CheckpointError, match=message):
            Transformer.from_pretrained(self.file(tmp_path, named))

    def test_divisors_of_other_networks_have_a_bound(self, tmp_path):
        path = convert(golden_folder("llama_llama3_bf16"), tmp_path / "y.gguf")
        assert max(Transformer.from_pretrained(path).config.rope.divisors) < 10


@pytest.mark.parametrize("part", ["table", "projection", "norm"])
def test_the_fingerprint_covers_the_inputs_of_layers(part):
    model = Transformer.from_pretrained(golden_folder("gemma4"))
    other = Transformer.from_pretrained(golden_folder("gemma4"))
    inputs = other.weights.inputs
    weight = getattr(inputs, part)
    if part == "norm":
        changed = weight + np.float32(1)
    else:
        changed = Matrix(*weight.shape, weight.format)
        changed.put(0, weight.to_float32() + np.float32(0.5))
    other.weights = replace(other.weights, inputs=replace(inputs, **{part: changed}))
    assert fingerprint(other) != fingerprint(model) == fingerprint(Transformer.from_pretrained(golden_folder("gemma4")))


def test_heads_and_bounds_by_layer():
    """Heads, bounds and MTP layers of Laguna, Step and K-EXAONE; of Step as published and as transformers saves it."""
    laguna = ModelConfig.from_dict(content("laguna"))
    assert [size.num_heads for size in laguna.sizes] == [6, 9, 3, 9, 6]
    step = content("step3p5")
    found = ModelConfig.from_dict(step)
    assert [size.num_heads for size in found.sizes] == [4, 6, 4, 6]
    assert found.limits == ((0, 0), (0, 0), (0, 0), (0, 0.3))
    assert (found.next_layer.like, found.next_layer.mlp, found.next_layer.is_raw) == (3, "mlp", True)
    saved = {key: value for key, value in step.items() if key not in (
        "attention_other_setting", "moe_layers_enum", "partial_rotary_factors", "rope_theta",
    )} | {
        "num_sliding_attention_heads": 6, "mlp_layer_types": ["dense", "sparse"] * 2,
        "layer_types": step["layer_types"][:4], "mtp_layer_types": ["sliding_attention"],
        "mtp_mlp_layer_types": ["dense"], "rope_parameters": {
            "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "sliding_attention": {},
        },
    }
    assert ModelConfig.from_dict(saved) == found
    assert ModelConfig.from_dict(step | {"moe_layers_enum": [1, 3]}) == found
    assert ModelConfig.from_dict(step | {"moe_layers_enum": "1, 3, 4"}).next_layer.mlp == "experts"
    one = saved | {"per_layer_config": {"0": {"num_attention_heads": 2}}}
    assert [size.num_heads for size in ModelConfig.from_dict(one).sizes] == [2, 6, 4, 6]
    exaone = content("exaone_moe") | {"num_nextn_predict_layers": 1}
    for kind, like in ((None, 4), ("sliding_attention", 4), ("full_attention", 3)):
        listed = {} if kind is None else {"mtp_layer_types": [kind]}
        config = ModelConfig.from_dict(exaone | listed).with_draft_layer()
        assert (config.next_layer.like, config.rotated[-1], config.mlps[-1]) == (like, like == 4, "mlp")


def test_heads_and_bounds_that_are_refused():
    for name, changes, message in (
        ("laguna", {"num_attention_heads_per_layer": [6, 9]},
         "num_attention_heads_per_layer: expected a positive number for each of 5 layers, got [6, 9]"),
        ("laguna", {"num_attention_heads_per_layer": [6, 9, 4, 9, 6]},
         "num_key_value_heads: expected a divisor of 4 attention heads, got 3 in layer 2"),
        ("laguna", {"gating": False}, "gating: expected true, per-head or per-element, got False"),
        ("laguna", {"moe_apply_router_weight_on_input": True},
         "moe_apply_router_weight_on_input: expected false, got true"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias: expected false with experts, got true"),
        ("step3p5", {"swiglu_limits": [1, 2]},
         "swiglu_limits: expected a number from 0 on or null for each of 4 layers, got [1, 2]"),
        ("step3p5", {"swiglu_limits_shared": [1, 2, -1, 0]},
         "swiglu_limits_shared: expected a number from 0 on or null for each of 4 layers, got [1, 2, -1, 0]"),
        ("step3p5", {"moe_layers_enum": "1,x"}, "moe_layers_enum: expected numbers of layers, got '1,x'"),
        ("step3p5", {"attention_other_setting": 3}, "attention_other_setting: expected an object, got 3"),
        ("step3p5", {"attention_other_setting": {"num_attention_groups": 1}},
         "attention_other_setting.num_attention_groups: expected 2, got 1"),
        ("step3p5", {"per_layer_config": {"9": {"num_attention_heads": 2}}},
         "per_layer_config: expected query heads by numbers of layers, got {'9': {'num_attention_heads': 2}}"),
        ("step3p5", {"layer_types": ["full_attention"]},
         "layer_types: expected full_attention or sliding_attention for each of 4 layers, got ['full_attention']"),
        ("step3p5", {"rope_theta": [1e4, 2e4, 3e4, 2e4]},
         "rope_theta: expected one number for all layers of a kind, got [10000.0, 20000.0, 30000.0, 20000.0]"),
        ("step3p5", {"rope_theta": [1e4]}, "rope_theta: expected a number for each of 4 layers, got [10000.0]"),
        ("step3p5", {"rope_scaling": [1]}, "rope_scaling: expected an object, got [1]"),
        ("step3p5", {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate: expected true, got false"),
        ("step3p5", {"mtp_mlp_layer_types": ["mlp"]},
         "mtp_mlp_layer_types: expected a list of dense or sparse, got ['mlp']"),
    ):
        with pytest.raises(CheckpointError) as error:
            ModelConfig.from_dict(content(name) | changes)
        assert str(error.value) == message
