"""config.json: supported options, options that are refused by name, and defaults of absent keys."""

from __future__ import annotations

import json
import math

import pytest
from configs import BAND, GEMMA2, GEMMA3, GPT_OSS, LLAMA, MISTRAL, QWEN2, QWEN3, parse

from kvcache.engine import ModelConfig
from kvcache.errors import CheckpointError

pytestmark = pytest.mark.one_build


def test_defaults_of_absent_keys():
    config = parse(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert parse(QWEN3).head_dim == 128
    assert parse(QWEN3, head_dim=None).head_dim == 16
    absent = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    assert parse(absent, num_attention_heads=16).num_kv_heads == 8
    assert parse(MISTRAL, num_attention_heads=16, num_key_value_heads=None).num_kv_heads == 16
    assert parse(GEMMA2).activation == parse(GEMMA2, hidden_activation=None).activation == "gelu_tanh"
    gemma = GEMMA2 | {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "num_key_value_heads": 4}
    assert parse(gemma).activation == "gelu_tanh"  # as its first files have it


def test_biases_and_norms_of_each_architecture():
    def flags(config):
        return config.qkv_bias, config.output_bias, config.mlp_bias, bool(config.qk_norm)

    assert flags(parse(LLAMA, attention_bias=True)) == (True, True, False, False)
    assert flags(parse(LLAMA, mlp_bias=True)) == (False, False, True, False)
    assert flags(parse(MISTRAL, attention_bias=True)) == (False, False, False, False)
    assert flags(parse(QWEN2)) == (True, False, False, False)
    assert flags(parse(QWEN3)) == (False, False, False, True)
    assert flags(parse(QWEN3, attention_bias=True)) == (True, True, False, True)


def test_biases_by_other_keys():
    def flags(config):
        return config.qkv_bias, config.output_bias, config.mlp_bias

    seed = {**LLAMA, "architectures": ["SeedOssForCausalLM"], "num_key_value_heads": 2}
    assert flags(parse(seed)) == (True, False, False)
    assert flags(parse(seed, attention_bias=False, attention_out_bias=True)) == (False, True, False)
    ernie = {**LLAMA, "architectures": ["Ernie4_5_ForCausalLM"]}
    assert flags(parse(ernie)) == (False, False, False)
    assert flags(parse(ernie, use_bias=True)) == (True, True, True)
    assert parse(ernie).architecture == "Ernie4_5ForCausalLM"


def test_factors_of_minicpm():
    """Files have to say them."""
    said = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32}
    base = {**LLAMA, "architectures": ["MiniCPMForCausalLM"], "num_hidden_layers": 4, **said}
    config = parse(base)
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12, 0.7, 0.5)
    for key in said:
        with pytest.raises(CheckpointError, match=f"{key}: expected a finite number of at least 0, got nothing"):
            parse({name: value for name, value in base.items() if name != key})
    with pytest.raises(CheckpointError, match="sparse_config: expected null, got"):
        parse(base, sparse_config={"kernel_size": 32})


def test_alpha_of_hunyuan():
    """It changes the base of the rotary embedding, where this is called dynamic."""
    base = {**LLAMA, "architectures": ["HunYuanDenseV1ForCausalLM"]}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 128.0}
    config = parse(base, rope_parameters=rope)
    assert (config.rope.kind, config.rope.theta) == ("default", pytest.approx(10000 * 2**8))  # 128**(16 / 14)
    assert parse(base, rope_parameters=rope | {"rope_type": "default"}).rope.theta == 10000
    for changes in ({"alpha": None}, {"alpha": 0}):
        with pytest.raises(CheckpointError, match=r"rope_type: expected default, .* got 'dynamic'"):
            parse(base, rope_parameters=rope | changes)
    with pytest.raises(CheckpointError, match="alpha: expected"):
        parse(base, rope_parameters=rope | {"alpha": -1})


def test_rope_in_windows():
    """EXAONE 4 has no rotary embedding in layers without a window, unless `sliding_window` is null."""
    base = {**LLAMA, "architectures": ["Exaone4ForCausalLM"], "num_key_value_heads": 2, "num_hidden_layers": 4}
    for changes in ({}, {"sliding_window_pattern": 4}, {"sliding_window_pattern": "LLLG"}):
        config = parse(base, sliding_window=64, **changes)
        assert config.windows == (64, 64, 64, None)
        assert config.rotated == (True, True, True, False)
    assert parse(base, sliding_window=9999).windows == (512, 512, 512, None)  # the longest text; it says which RoPE
    assert parse(base, sliding_window=64, layer_types=["full_attention"] * 4).rotated == (False,) * 4
    config = parse(base, sliding_window=None, layer_types=["full_attention"] * 4)
    assert (config.windows, config.rotated) == ((None,) * 4, (True,) * 4)
    for pattern in ("LLL", "GGGL", "LLXG", ""):
        with pytest.raises(CheckpointError, match="sliding_window_pattern: expected a positive whole number, or l"):
            parse(base, sliding_window=64, sliding_window_pattern=pattern)


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
        ({"architectures": None, "model_type": "gptj"}, "model_type: .*'gptj'"),
        ({"architectures": None}, "model_type: .*None"),
        ({"hidden_act": "gelu"}, "hidden_act: expected one of silu, swish, gelu_pytorch_tanh, got 'gelu'"),
        ({"hidden_act": ["silu"]}, "hidden_act: expected one of"),
        ({"hidden_act": ""}, "hidden_act: expected one of .*, got ''"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.*bits"),
        ({"compression_config": {"quant_method": "sparseml"}}, "compression_config: .*got quant_method 'sparseml'"),
        ({"clip_qkv": 8.0}, "clip_qkv: expected null, got 8.0"),
        ({"sliding_window": "512"}, "sliding_window"),
        ({"sliding_window": 0}, "sliding_window: expected a positive whole number or null, got 0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: .*sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected full_attention for each of 2 layers"),
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
        ({"num_hidden_layers": 65537}, "num_hidden_layers: expected a positive whole number up to 65536"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: expected false or 'vision', got True"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: .*dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor: expected 8 numbers, got None"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 7 + [0]}},
            "rope_scaling.long_factor: expected positive numbers",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: .*nothing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rope_parameters.factor: .*0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one kind for all layers"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor: .*nothing"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, **BAND}},
            "low_freq_factor <= high_freq_factor, above 0, got 4.0 and 3.0",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8, "beta_fast": 0}}, "beta_slow <= beta_fast"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8, "truncate": "no"}}, "truncate"),
    ],
)
def test_refused(changes, message):
    base = MISTRAL if "sliding_window" in changes else LLAMA
    with pytest.raises(CheckpointError, match=message):
        parse(base, **changes)


def test_sliding_windows_that_never_slide():
    for config in (
        parse(MISTRAL, sliding_window=512),
        parse(MISTRAL, sliding_window=4096, layer_types=["sliding_attention"] * 2),
        parse(QWEN2, use_sliding_window=False, sliding_window=128),
        parse(QWEN3, use_sliding_window=True, sliding_window=512, max_window_layers=0),
        parse(QWEN2, layer_types=["full_attention"] * 2),
        parse(LLAMA, sliding_window=512),
    ):
        assert config.windows == (None, None)
    with pytest.raises(CheckpointError, match="sliding_window: expected none, or at least all 512 positions, got 128"):
        parse(LLAMA, sliding_window=128)


@pytest.mark.parametrize(
    ("base", "changes", "windows"),
    [
        (MISTRAL, {"sliding_window": 128}, (128, 128)),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (None, 64)),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 64}, (None, None)),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, (64, 64)),
        (
            QWEN3,
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (64, None),
        ),
        (GEMMA2, {"sliding_window": 7}, (7, None)),
        (GEMMA2, {"sliding_window": None}, (None, None)),
        (
            GEMMA3,
            {"sliding_window": 9, "num_hidden_layers": 7},
            (9, 9, 9, 9, 9, None, 9),
        ),
        (
            GEMMA3,
            {"sliding_window": 9, "num_hidden_layers": 4, "sliding_window_pattern": 2},
            (9, None, 9, None),
        ),
        (GPT_OSS, {}, (128, None)),
        (GEMMA3, {"sliding_window_pattern": 2}, (512, None)),
        (GEMMA3, {"layer_types": ["full_attention"] * 2}, (None, None)),
        ({**LLAMA, "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}, {}, (None, None)),
        (
            {**LLAMA, "architectures": ["SmolLM3ForCausalLM"]},
            {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [0, 1]},
            (9, None),
        ),
    ],
)
def test_windows(base, changes, windows):
    assert parse(base, **changes).windows == windows


def test_windows_of_all_layers_or_none():
    with pytest.raises(CheckpointError, match="layer_types: expected sliding_attention for all layers"):
        parse(MISTRAL, sliding_window=128, layer_types=["full_attention", "sliding_attention"])


def test_mistral_without_the_key_has_a_window_of_4096():
    base = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert parse(base).windows == (None, None)
    assert parse(base, max_position_embeddings=8192).windows == (4096, 4096)


def test_layers_without_rope():
    smollm3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5}
    assert parse(smollm3).rotated == (True, True, True, False, True)
    assert parse(smollm3, no_rope_layer_interval=2).rotated == (True, False, True, False, True)
    assert parse(smollm3, no_rope_layers=[0, 1, 1, 0, 0]).rotated == (False, True, True, False, False)
    longer = parse(smollm3, no_rope_layers=[0, 1, 1, 0, 0, 1])  # the list of a network that lost its last layers
    assert longer.rotated == (False, True, True, False, False)
    for wrong in ([1], [1, 1, 1, 1, 2], "11111", [[], 1, 1, 1, 1]):
        with pytest.raises(CheckpointError, match="no_rope_layers: expected 0 or 1 for each of 5 layers"):
            parse(smollm3, no_rope_layers=wrong)
    assert parse(LLAMA, no_rope_layers=[0, 0]).rotated == (True, True)


def test_scales():
    def scales(config):
        return config.embedding_scale, config.residual_scale, config.attention_scale, config.logit_scale

    granite = {**LLAMA, "architectures": ["GraniteForCausalLM"]}
    assert scales(parse(LLAMA)) == (1.0, 1.0, None, 1.0)
    assert scales(parse(granite)) == (1.0, 1.0, 1.0, 1.0)
    given = {
        "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.5, "logits_scaling": 8.0,
    }
    assert scales(parse(granite, **given)) == (12.0, 0.22, 0.5, 0.125)
    assert scales(parse(granite, attention_multiplier=0.25)) == (1.0, 1.0, None, 1.0)  # what 16 channels have anyway
    with pytest.raises(CheckpointError, match="logits_scaling: expected a positive number, got 0"):
        parse(granite, logits_scaling=0)
    assert scales(parse(GEMMA2)) == (8.0, 1.0, None, 1.0)
    assert parse(GEMMA2, query_pre_attn_scalar=144).attention_scale == pytest.approx(1 / 12)


def test_soft_caps():
    """Gemma 2 has both, Gemma 3 that of the logits."""

    def caps(base, **changes):
        config = parse(base, **changes)
        return config.attention_softcap, config.logit_softcap

    given = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    assert caps(GEMMA2) == (50.0, 30.0)
    assert caps(GEMMA2, attn_logit_softcapping=None) == (None, 30.0)
    assert caps(GEMMA3) == (None, None)
    assert [caps(base, **given) for base in (GEMMA2, GEMMA3, LLAMA)] == [(2.0, 3.0), (None, 3.0), (None, None)]
    with pytest.raises(CheckpointError, match="final_logit_softcapping: expected a positive number or null, got 0"):
        parse(GEMMA2, final_logit_softcapping=0)


def test_experts():
    def experts(config):
        normalise = config.experts is None or config.experts.choice.normalise
        return config.num_experts, config.experts_per_token, config.intermediate_size, normalise

    qwen = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"]}
    assert experts(parse(LLAMA)) == (0, 0, 128, True)
    assert experts(parse(qwen)) == (128, 8, 768, False)
    assert experts(parse(qwen, num_experts=4, num_experts_per_tok=3, norm_topk_prob=True)) == (4, 3, 768, True)
    for name, count, each in (("Mixtral", 8, 2), ("GptOss", 128, 4)):
        config = parse({**LLAMA, "architectures": [f"{name}ForCausalLM"], "num_key_value_heads": 2})
        assert experts(config) == (count, each, 128, True)
    for wrong, message in (
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok: expected .* up to 4, got 5"),
        ({"num_experts": 4}, "num_experts_per_tok: expected .* up to 4, got 8"),  # its default
        ({"mlp_only_layers": [1]}, "mlp_only_layers: expected none and a step of 1"),
        ({"decoder_sparse_step": 2}, "mlp_only_layers: expected none and a step of 1, got .* and 2"),
    ):
        with pytest.raises(CheckpointError, match=message):
            parse(qwen, **wrong)


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
