"""config.json: supported options, options that are refused by name, and defaults of absent keys."""

from __future__ import annotations

import json
import math

import pytest

from kvcache.engine import ModelConfig
from kvcache.errors import CheckpointError

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": None}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
BAND = {"low_freq_factor": 4, "high_freq_factor": 4}


def parse(base, **changes):
    return ModelConfig.from_dict({**base, **changes})


def test_defaults_of_absent_keys():
    config = parse(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert parse(QWEN3).head_dim == 128
    assert parse(QWEN3, head_dim=None).head_dim == 16
    assert parse(MISTRAL, num_attention_heads=16, num_key_value_heads=None).num_kv_heads == 8


def test_biases_and_norms_of_each_architecture():
    def flags(config):
        return config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm

    assert flags(parse(LLAMA, attention_bias=True)) == (True, True, False, False)
    assert flags(parse(LLAMA, mlp_bias=True)) == (False, False, True, False)
    assert flags(parse(MISTRAL, attention_bias=True)) == (False, False, False, False)
    assert flags(parse(QWEN2)) == (True, False, False, False)
    assert flags(parse(QWEN3)) == (False, False, False, True)
    assert flags(parse(QWEN3, attention_bias=True)) == (True, True, False, True)


def test_model_type_replaces_absent_architectures():
    base = {key: value for key, value in QWEN2.items() if key != "architectures"}
    assert parse(base, model_type="qwen2").architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures: .*LlamaForCausalLM.*GPT2LMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: .*Classification"),
        ({"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": None, "model_type": "gemma"}, "model_type: .*'gemma'"),
        ({"architectures": None}, "model_type: .*None"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.*bits"),
        ({"sliding_window": 128}, "sliding_window: .*512.*128"),
        ({"sliding_window": "512"}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: .*sliding_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: .*chunked_attention"),
        ({"layer_types": [[]]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: .*4.*3"),
        ({"head_dim": 15}, "head_dim: .*even.*15"),
        ({"hidden_size": 2}, "head_dim: .*even.*0"),
        ({"hidden_size": None}, "hidden_size: .*nothing"),
        ({"hidden_size": "64"}, "hidden_size: .*'64'"),
        ({"hidden_size": 0}, "hidden_size: .*0"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 2**31}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers: .*True"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id: .*</s>"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: .*0.5"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: .*dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type: .*longrope"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: .*nothing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rope_parameters.factor: .*0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one kind for all layers"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor: .*nothing"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, **BAND}},
            "low_freq_factor < high_freq_factor",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8, "beta_fast": 0}}, "beta_slow <= beta_fast"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8, "truncate": "no"}}, "truncate"),
    ],
)  # fmt: skip
def test_refused(changes, message):
    base = MISTRAL if "sliding_window" in changes else LLAMA
    with pytest.raises(CheckpointError, match=message):
        parse(base, **changes)


def test_sliding_windows_that_never_slide():
    parse(MISTRAL, sliding_window=512)
    parse(MISTRAL, sliding_window=4096, layer_types=["sliding_attention"] * 2)
    parse(QWEN2, use_sliding_window=False, sliding_window=128)
    parse(QWEN3, use_sliding_window=True, sliding_window=512)
    parse(QWEN2, layer_types=["full_attention"] * 2)
    with pytest.raises(CheckpointError, match="sliding_window"):
        parse(QWEN2, use_sliding_window=True, sliding_window=128)


def test_mistral_without_the_key_has_a_window_of_4096():
    base = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    parse(base)
    with pytest.raises(CheckpointError, match=r"sliding_window: .*4096"):
        parse(base, max_position_embeddings=8192)


def test_yarn_attention_factor():
    def factor(**rope):
        return parse(LLAMA, rope_parameters={"rope_type": "yarn", "factor": 4.0, **rope}).rope.attention_factor

    assert factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(attention_factor=1.5) == 1.5
    expected = (0.1 * 0.7 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    assert factor(mscale=0.7, mscale_all_dim=1.0) == pytest.approx(expected)


def test_yarn_factor_from_the_context():
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    assert parse(LLAMA, rope_parameters=rope).rope.factor == 8.0


def test_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 7}))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3, 9]}')
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (3, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (7,)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"llama"', "\xff", "[" * 100_000])
def test_damaged_file(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)
