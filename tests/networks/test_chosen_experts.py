"""Networks of usual attention whose experts are chosen with a bias: their keys as published files have them."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from bailing import twins
from dense_runs import run_dense
from gguf_files import U32, convert
from seeded_weights import seeded
from tensor_files import pack_arrays

from kvcache.engine import ModelConfig, Transformer
from kvcache.errors import CheckpointError
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.gguf import GgufCheckpoint

pytestmark = pytest.mark.one_build

TOKENS = np.arange(7, 27).astype(np.uint32)


def config_of(name):
    return json.loads((seeded(name) / "config.json").read_text())


def test_keys_of_minimax():
    """Published files say how many channels turn by `rotary_dim`."""
    given = config_of("minimax_m2")
    want = ModelConfig.from_dict(given)
    assert (want.rotary_dim, want.qk_norm) == (12, "all")
    theta = given.pop("rope_parameters")["rope_theta"]
    published = given | {"rope_theta": theta, "rotary_dim": 12, "scoring_func": "sigmoid", "use_qk_norm": True}
    assert ModelConfig.from_dict(published) == want
    assert ModelConfig.from_dict(given | {"rope_theta": theta}).rotary_dim == 24


def test_layers_of_qwen2_moe():
    """Without a list every second of the first layers has a window; the last ones have none."""
    given = {key: value for key, value in config_of("qwen2_moe").items() if key != "layer_types"}
    found = ModelConfig.from_dict(given | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "max_window_layers": 4})
    assert found.windows == (20, None, 20, None, None, None)
    assert found.mlps == ("mlp", "experts", "mlp", "experts", "mlp", "experts")


def test_layers_of_cohere2_moe():
    """The first layers have another pattern of windows, and a rotary embedding without a window if it is 1."""
    given = {k: v for k, v in config_of("cohere2_moe").items() if k not in ("layer_types", "mlp_layer_types")}
    for pattern, windows, rotated in (
        (1, (None, None, 20, 20, 20, None), (True, True, True, True, True, False)),
        (2, (20, None, 20, 20, 20, None), (True, False, True, True, True, False)),
    ):
        more = {"first_k_dense_replace": 2, "num_hidden_layers": 6, "prefix_dense_sliding_window_pattern": pattern}
        found = ModelConfig.from_dict(given | more)
        assert (found.windows, found.rotated) == (windows, rotated)
        assert found.mlps == ("mlp",) * 2 + ("experts",) * 4


def test_keys_of_mimo():
    """Published files count the tokens before one in a window, and do not list layers: the first one has none."""
    given = config_of("mimo_v2_flash")
    want = ModelConfig.from_dict(given)
    published = {key: value for key, value in given.items() if key not in ("layer_types", "mlp_layer_types")}
    assert ModelConfig.from_dict(published | {"sliding_window": 19, "sliding_window_size": 19}) == want
    assert want.windows == (None, 20, 20, 20, 20, None, 20)
    assert [size.num_kv_heads for size in want.sizes] == [3, 6, 6, 6, 6, 3, 6]
    assert (want.rotary_dim, want.value_scale, want.mlps.count("mlp")) == (8, 0.707, 1)
    layers = Transformer.from_pretrained(seeded("mimo_v2_flash")).weights.layers
    assert [layer.sinks is None for layer in layers] == [window is None for window in want.windows]


def test_published_keys():
    """K-EXAONE says the first MLPs in place of a list, Hunyuan the number of experts once, Trinity a pattern."""
    for name, absent, more in (
        ("exaone_moe", ("mlp_layer_types",), {"architectures": ["ExaoneMoEForCausalLM"]}),
        ("hunyuan_moe", (), {"moe_topk": 3}),
        ("afmoe", ("layer_types",), {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}),
    ):
        given = config_of(name)
        published = {key: value for key, value in given.items() if key not in absent} | more
        assert ModelConfig.from_dict(published) == ModelConfig.from_dict(given), name


def test_ling_is_glm_with_other_names(tmp_path):
    glm, ling = twins(tmp_path)
    want = run_dense(Transformer.from_pretrained(glm), TOKENS)
    np.testing.assert_array_equal(run_dense(Transformer.from_pretrained(ling), TOKENS), want)
    found = Transformer.from_pretrained(convert(ling, tmp_path / "x.gguf"))
    assert found.config == replace(ModelConfig.from_pretrained(ling), eos_token_ids=())
    np.testing.assert_allclose(run_dense(found, TOKENS), want, rtol=0, atol=2e-5)


def test_biases_of_queries_keys_and_values_as_one(tmp_path):
    want, found = (run_dense(Transformer.from_pretrained(folder), TOKENS) for folder in twins(tmp_path, biases=True))
    np.testing.assert_array_equal(found, want)


def test_mtp_layers_of_ernie(tmp_path):
    """Published folders have them under names of their own; the bias of the choice is a row."""
    folder = seeded("ernie4_5_moe")
    stored = Checkpoint(folder)
    tensors = {name: stored.read(name) for name in stored.names()}
    assert tensors["model.layers.1.mlp.moe_statics.e_score_correction_bias"].shape == (1, 7)
    others = ("mtp_block.0.mlp.up_proj", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0")
    tensors |= {f"model.{name}.weight": np.ones((3, 2), np.float32) for name in others}
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(tensors))
    found, want = (run_dense(Transformer.from_pretrained(each), TOKENS) for each in (tmp_path, folder))
    np.testing.assert_array_equal(found, want)


def test_experts_of_qwen3_vl_in_columns(tmp_path):
    """Published folders have the transposes of what transformers 5 writes, and do not say that weights add up to 1."""
    folder = seeded("qwen3_vl_moe")
    stored = Checkpoint(folder)
    tensors = {name: stored.read(name) for name in stored.names()}
    stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 4
    tensors |= {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2)) for name in stacks}
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(tensors))
    found, want = (Transformer.from_pretrained(each) for each in (tmp_path, folder))
    assert found.config.experts.choice.normalise
    np.testing.assert_array_equal(run_dense(found, TOKENS), run_dense(want, TOKENS))
    tensors[stacks[0]] = tensors[stacks[0]][:, :-1]
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(tensors))
    with pytest.raises(CheckpointError, match=r"expected shape \(7, "):
        Transformer.from_pretrained(tmp_path)


def test_layers_of_llama4():
    """Published files have neither lists nor layer types; experts, rotations and chunks follow from three numbers."""
    lists = ("layer_types", "moe_layers")
    given = {key: value for key, value in config_of("llama4").items() if key not in lists} | {"no_rope_layers": []}
    found = ModelConfig.from_dict(given | {"num_hidden_layers": 6, "interleave_moe_layer_step": 2})
    assert found.rotated == (True, True, True, False, True, True)
    assert found.windows == (21, 21, 21, None, 21, 21)
    assert found.mlps == ("mlp", "experts") * 3
    for changes, windows in (
        ({"attention_chunk_size": None}, (None,) * 5), ({"attention_chunk_size": 256}, (None,) * 5),
        ({"layer_types": ["full_attention"] * 4 + ["chunked_attention"]}, (None,) * 4 + (21,)),
    ):
        assert ModelConfig.from_dict(given | changes).windows == windows
    growth = [ModelConfig.from_dict(given | {"attn_temperature_tuning": each}).unrotated_growth for each in (4, 0)]
    assert growth == [(0.6, 10), None]


def test_llama4_in_its_tower(tmp_path):
    """As published: the parts for images are left out, and experts may be apart, as in quantised folders."""
    folder, texts = seeded("llama4"), config_of("llama4")
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": texts}
    stored, tensors = Checkpoint(folder), {}
    for name in stored.names():
        values = stored.read(name)
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"language_model.{name}"] = values
            continue
        for i, each in enumerate(values):
            parts = {"gate_proj": each[:, :28], "up_proj": each[:, 28:]} if "gate_up" in name else {"down_proj": each}
            for part, matrix in parts.items():
                own = f"language_model.{name.rpartition('.')[0]}.{i}.{part}.weight"
                tensors[own] = np.ascontiguousarray(matrix.T)
    for name in ("multi_modal_projector.linear_1.weight", "vision_model.layernorm_pre.bias"):
        tensors[name] = np.ones((3, 2), np.float32)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "model.safetensors").write_bytes(pack_arrays(tensors))
    found, want = (run_dense(Transformer.from_pretrained(each), TOKENS) for each in (tmp_path, folder))
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama4", {"moe_layers": [True]}, "moe_layers: expected numbers of layers, got [True]"),
        ("llama4", {"interleave_moe_layer_step": 0, "moe_layers": None},
         "interleave_moe_layer_step: expected a positive whole number, got 0"),
        ("llama4", {"attention_chunk_size": 0},
         "attention_chunk_size: expected a positive whole number or null, got 0"),
        ("llama4", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning: expected true or false, got 'yes'"),
        ("llama4", {"floor_scale": 0}, "floor_scale: expected a positive whole number, got 0"),
        ("llama4", {"layer_types": ["sliding_attention"] * 5},
         "layer_types: expected full_attention or chunked_attention for each of 5 layers, got ['sliding_attention', "
         "'sliding_attention', 'sliding_attention', 'sliding_attention', 'sliding_attention']"),
        ("minimax_m2", {"rotary_dim": 11}, "rotary_dim: expected an even number of channels, got 11"),
        ("minimax_m2", {"rotary_dim": 26}, "rotary_dim: expected a positive whole number up to 24, got 26"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index: expected -1 or the last of 3 layers, got 1"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval: expected 1, got 2"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias: expected false with experts, got true"),
        ("hunyuan_moe", {"moe_topk": [3, 2, 3]}, "moe_topk: expected one number for all layers, got [3, 2, 3]"),
        ("hunyuan_moe", {"moe_topk": [8] * 3}, "moe_topk: expected a positive whole number up to 7, got 8"),
        ("qwen2_moe", {"mlp_only_layers": [True]}, "mlp_only_layers: expected numbers of layers, got [True]"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected a positive whole number, got 0"),
        ("cohere2_moe", {"expert_selection_fn": 1}, "expert_selection_fn: expected softmax or sigmoid, got 1"),
        ("cohere2_moe", {"shared_expert_combination_strategy": 1},
         "shared_expert_combination_strategy: expected sum or average, got 1"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok: expected 2, got 3"),
        ("phimoe", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
         "rope_parameters.rope_type: expected default or longrope, got 'yarn'"),
        ("phimoe", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 1, 1, 1], "short_mscale": 0}},
         "rope_parameters.short_mscale: expected a positive number, got 0.0"),
        ("mimo_v2_flash", {"v_head_dim": 25}, "v_head_dim: expected a positive whole number up to 24, got 25"),
        ("mimo_v2_flash", {"num_attention_heads": 3},
         "num_key_value_heads: expected a divisor of 3 attention heads, got 6 in layer 1"),
        ("afmoe", {"n_group": 2}, "n_group: expected 1, got 2"),
        ("afmoe", {"score_func": "softmax"}, "score_func: expected sigmoid, got 'softmax'"),
        ("glm4_moe", {"use_qk_norm": 1}, "use_qk_norm: expected true or false, got 1"),
    ],
)
def test_refused(name, changes, message):
    config = config_of(name)
    if "rotary_dim" in changes:
        del config["rope_parameters"]["partial_rotary_factor"]
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        ModelConfig.from_dict(config | changes)


def test_files_of_llama4(tmp_path):
    """Chunks are llama.cpp's; queries have a norm but in the network with 128 experts."""
    for number, (entries, norm) in enumerate((
        ({}, ""), ({"attention__sliding_window": (U32, 8192)}, ""), ({"expert_count": (U32, 16)}, "unit"),
    )):
        said = {f"llama4__{key}": value for key, value in entries.items()} | {"llama4__context_length": (U32, 9000)}
        found = GgufCheckpoint(convert(seeded("llama4_plain"), tmp_path / f"{number}.gguf", **said)).config
        assert (found.windows, found.chunked, found.qk_norm) == ((8192, 8192, 8192, None), True, norm)
        assert (found.rotated, found.unrotated_growth) == ((True, True, True, False), (0.1, 8192))
    for key, value, expected in (("", 0, 8192), ("_pattern", 3, 4)):
        entry = f"attention.sliding_window{key}"
        path = convert(seeded("llama4_plain"), tmp_path / "x.gguf", **{f"llama4.{entry}": (U32, value)})
        with pytest.raises(CheckpointError, match=f"llama4.{entry}: expected {expected}, got {value}"):
            Transformer.from_pretrained(path)


CHOICES = [("minimax_m2", 1, "sigmoids"), ("ernie4_5_moe", 2, "a softmax")]


@pytest.mark.parametrize(("name", "gating", "expected"), CHOICES)
def test_other_choices_in_files(tmp_path, name, gating, expected):
    letters = {"minimax_m2": "minimax-m2", "ernie4_5_moe": "ernie4_5-moe"}[name]
    path = convert(seeded(name), tmp_path / "x.gguf", **{f"{letters}.expert_gating_func": (U32, gating)})
    with pytest.raises(CheckpointError, match=f"expert_gating_func: expected {expected}, got {gating}$"):
        Transformer.from_pretrained(path)
