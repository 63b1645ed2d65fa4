"""The architectures that can be read, a row each; see `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.networks.expert_kinds import EXPERT_KINDS
from kvcache.networks.family import Family
from kvcache.networks.step_entries import step_entries
from kvcache.networks.towers import TOWERS
from kvcache.networks.unread_families import parts_missing
from kvcache.networks.usual_entries import bailing_entries, kimi_entries
from kvcache.support.arguments import short

__all__ = ["FAMILIES", "family_of"]

_GEMMA = {
    "head_dim": 256, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096}
_GEMMA4_DEFAULTS = {
    "vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "attention_multiplier": 1.0, "final_logit_softcapping": None, "global_head_dim": 512,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}

_GEMMA4 = Family(
    "gemma4_unified_text", qkv_bias=None, qk_norm="head", norms="both", embedding_by_size=True,
    activation_key="hidden_activation", windows="types", full_every=6, rope_per_kind=True, layers_differ=True,
    value_norm=True, layer_scales=True, last_full=True,
    defaults=_GEMMA4_DEFAULTS | {"sliding_window": 1024, "max_position_embeddings": 262144},
)
_LFM2 = {
    "model.norm": "model.embedding_norm", "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj", "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "mlp.gate": "feed_forward.gate",
    "mlp.expert_bias": "feed_forward.expert_bias", "mixer.in_proj": "conv.in_proj", "mixer.conv1d": "conv.conv",
    "mixer.out_proj": "conv.out_proj",
}
_LFM2_DEFAULTS = {"num_key_value_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True}
_LFM3 = {name: own for name, own in _LFM2.items() if "self_attn" not in name} | {
    "post_attention_layernorm": "post_operator_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
_QWEN3_5 = {
    "mixer": "linear_attn", "mixer.rate": "linear_attn.A_log",
    **{f"mixer.{name}": f"linear_attn.{name}" for name in (
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj",
    )},
}
_OLMO_HYBRID = {
    "mixer": "linear_attn", "mixer.rate": "linear_attn.A_log", "mixer.norm": "linear_attn.o_norm",
    "mixer.out_proj": "linear_attn.o_proj", "mixer.in_proj_z": "linear_attn.g_proj",
    **{f"mixer.in_proj_{part}": f"linear_attn.{part}_proj" for part in "qkvab"},
    **{f"mixer.conv1d_{part}": f"linear_attn.{part}_conv1d" for part in "qkv"},
}
_NEMOTRON = {
    "model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f", "mixer.rate": "mixer.A_log",
    "input_layernorm": "norm", "post_attention_layernorm": "norm", "mlp.up_proj": "mixer.up_proj",
    "mlp.down_proj": "mixer.down_proj", "mlp.gate": "mixer.gate",
    "mlp.expert_bias": "mixer.gate.e_score_correction_bias", "mlp.latent_in": "mixer.fc1_latent_proj",
    "mlp.latent_out": "mixer.fc2_latent_proj", "mlp.shared_expert.up_proj": "mixer.shared_experts.up_proj",
    "mlp.shared_expert.down_proj": "mixer.shared_experts.down_proj",
    **{f"self_attn.{name}": f"mixer.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
}
_GRANITE = {
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0,
}
_GRANITE_NAMES = {
    "mixer": "mamba", "mixer.rate": "mamba.A_log", "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.down_proj": "shared_mlp.output_linear", "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
    **{f"mixer.{name}": f"mamba.{name}" for name in ("in_proj", "conv1d", "norm", "out_proj")},
}

_HUNYUAN = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
_FALCON = {
    "model.norm": "model.final_layernorm", "post_attention_layernorm": "pre_ff_layernorm",
    "mixer": "mamba", "mixer.rate": "mamba.A_log",
    **{f"mixer.{name}": f"mamba.{name}" for name in ("in_proj", "conv1d", "norm", "out_proj")},
    **{f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}
_GLM = Family(
    "glm", qkv_bias=None, bias_keys=("attention_bias", "", ""), neighbours=True, fused=("", "mlp.gate_up_proj"),
    defaults={
        "attention_bias": True, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
    },
)
_GLM4 = {
    "post_attention_layernorm": "post_self_attn_layernorm", "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}

_MTP = {
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "head_norm": "mtp.norm",
}
_DELTA = Family(
    "qwen3_5_text", qkv_bias=None, qk_norm="head", norms_less_one=True, attention_gate=True, recurrence="delta",
    names=_QWEN3_5, next_layers="mtp_num_hidden_layers", next_prefix="mtp.layers.",
    next_names=_MTP,
    defaults={"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
)
_LLAMA4 = {"mlp.gate": "feed_forward.router", **{
    f"mlp.{each}{part}_proj": f"feed_forward.{each}{part}_proj" for each in ("", "shared_expert.")
    for part in ("gate", "up", "down")
}}
_DEEPSEEK = {"mlp.expert_bias": "mlp.gate.e_score_correction_bias", **{
    f"mlp.shared_expert.{name}_proj": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")
}}
_BAILING = _DEEPSEEK | {
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "mlp.expert_bias": "mlp.gate.expert_bias",
}
_KIMI = {
    "mixer": "self_attn", "mixer.rate": "self_attn.A_log", "mixer.norm": "self_attn.o_norm",
    "mixer.out_proj": "self_attn.o_proj", "mixer.in_proj_z": "self_attn.g_a_proj",
    "mixer.in_proj_b": "self_attn.b_proj", "mixer.in_proj_a": "self_attn.f_a_proj",
    "mixer.decay_proj": "self_attn.f_b_proj", "mixer.gate_proj": "self_attn.g_b_proj",
    **{f"mixer.in_proj_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"mixer.conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{name: own.replace("mlp.", "block_sparse_moe.") for name, own in _DEEPSEEK.items()},
    "mlp.gate": "block_sparse_moe.gate",
}
_LING3 = {name: own.replace("self_attn.", "attention.") for name, own in _KIMI.items() if "mlp." not in name} | {
    **_DEEPSEEK, "model.embed_tokens": "model.word_embeddings", "mlp.expert_bias": "mlp.gate.expert_bias",
    "mixer": "attention", "mixer.in_proj_z": "attention.g_proj", "mixer.in_proj_a": "attention.f_proj",
    "self_attn.o_proj": "attention.dense", "self_attn.gate_proj": "attention.g_proj",
    **{f"self_attn.{name}": f"attention.{name}" for name in (
        "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
    )},
}

_DEEPSEEK_V32 = {
    "q_lora_rank": 1536, "scoring_func": "sigmoid", "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}

FAMILIES = {
    "LlamaForCausalLM": Family("llama", qkv_bias=None, mlp_bias=None),
    "Llama4ForCausalLM": Family(
        "llama4_text", qkv_bias=None, qk_norm="unit", windows="types", chunked=True, neighbours=True,
        experts=EXPERT_KINDS["llama4"], names=_LLAMA4,
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "use_qk_norm": True,
            "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
            "attn_scale": 0.1, "floor_scale": 8192, "num_local_experts": 16, "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16384,
        },
    ),
    "MistralForCausalLM": Family(
        "mistral", windows="all", defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Ministral3ForCausalLM": Family("ministral3", windows="all", defaults={
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "llama_4_scaling_beta": 0.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    }),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, windows="types", window_switch=True, defaults=_QWEN),
    "Qwen3ForCausalLM": Family(
        "qwen3", qkv_bias=None, qk_norm="head", windows="types", window_switch=True, defaults=_QWEN | {"head_dim": 128}
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", qkv_bias=None, mlp_bias=None, windows="types", window_switch=True,
        defaults={
            "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4,
        },
    ),
    "GraniteForCausalLM": Family(
        "granite", qkv_bias=None, mlp_bias=None,
        defaults=_GRANITE,
    ),
    "GraniteSWAForCausalLM": Family(
        "granite_swa", qkv_bias=None, mlp_bias=None, windows="types", rope_per_kind=True, sinks="all",
        defaults=_GRANITE | {
            "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128,
            "layer_rope_theta": (),
        },
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", qkv_bias=None, qk_norm="all", norms="after", defaults={"rms_norm_eps": 1e-5}
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3", qkv_bias=None, qk_norm="all", norms="after", windows="types", full_every=4, rope_per_kind=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "OlmoHybridForCausalLM": Family(
        "olmo_hybrid", qkv_bias=None, qk_norm="all", norms="mixed", rope_in_windows="given", recurrence="delta",
        names=_OLMO_HYBRID,
        other_names={
            "input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm",
        },
        defaults={"linear_allow_neg_eigval": True},
    ),
    "FalconH1ForCausalLM": Family(
        "falcon_h1", qkv_bias=None, mlp_bias=None, recurrence="mamba", paired=True, names=_FALCON,
        defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "embedding_multiplier": 1.0,
            "lm_head_multiplier": 1.0, "mamba_rms_norm": False,
        },
    ),
    "GemmaForCausalLM": Family(
        "gemma", qkv_bias=None, norms_less_one=True, embedding_by_size=True,
        defaults={
            "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        },
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2", qkv_bias=None, norms="both", norms_less_one=True, embedding_by_size=True,
        activation_key="hidden_activation", windows="types", full_every=2,
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "MuseGlimmerForCausalLM": Family(
        "muse_glimmer_text", qkv_bias=None, qk_norm="plain", norms="both", norms_less_one="layers",
        embedding_norm=True, activation_key="hidden_activation", gates="channel", windows="types", rope_per_kind=True,
        defaults={
            "num_key_value_heads": 2, "head_dim": 128, "hidden_activation": "silu", "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8, "sliding_window": 2048, "qk_scale_factor": 3.87, "final_logit_softcapping": 20.0,
            "output_multiplier": 0.19611613513818404, "layer_rope_theta": "last",
        },
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", qkv_bias=None, qk_norm="head", norms="both", norms_less_one=True, embedding_by_size=True,
        activation_key="hidden_activation", windows="types", full_every=6, rope_per_kind=True,
        defaults=_GEMMA | {
            "vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "final_logit_softcapping": None, "use_bidirectional_attention": False,
        },
        aliases=("Gemma3TextModel",),
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2", qk_norm="head", recurrence="conv", eps_key="norm_eps", names=_LFM2,
        defaults=_LFM2_DEFAULTS | {"block_multiple_of": 256},
    ),
    "Lfm3ForCausalLM": Family(
        "lfm3", qkv_bias=None, bias_keys=("attention_bias", "attention_bias", ""), qk_norm="head", recurrence="conv",
        norms="both", eps_key="norm_eps", gates="head", windows="types", rope_per_kind=True, names=_LFM3,
        defaults={
            "num_key_value_heads": 4, "head_dim": 128, "norm_eps": 1e-5, "tie_word_embeddings": True,
            "conv_L_cache": 7, "sliding_window": 256, "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "Lfm2MoeForCausalLM": Family(
        "lfm2_moe", qk_norm="head", recurrence="conv", eps_key="norm_eps", names=_LFM2, experts=EXPERT_KINDS["lfm2"],
        defaults=_LFM2_DEFAULTS | {"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4},
    ),
    "Qwen3_5MoeForCausalLM": replace(
        _DELTA, model_type="qwen3_5_moe_text", experts=EXPERT_KINDS["gated"], defaults={
            **_DELTA.defaults, "num_key_value_heads": 2, "moe_intermediate_size": 512, "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
    "Qwen3NextForCausalLM": replace(
        _DELTA, model_type="qwen3_next", by_key_heads=True, experts=EXPERT_KINDS["gated"],
        next_layers="num_nextn_predict_layers", defaults={
            **_DELTA.defaults, "num_key_value_heads": 2, "moe_intermediate_size": 512, "num_experts": 512,
            "num_experts_per_tok": 10, "num_nextn_predict_layers": 1,  # its files do not say it
        },
    ),
    "Qwen3_5ForCausalLM": _DELTA,
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid", qkv_bias=None, recurrence="mamba", experts=EXPERT_KINDS["granite"], names=_GRANITE_NAMES,
        fused=("", "shared_mlp.input_linear"),
        defaults=_GRANITE | {
            "position_embedding_type": "nope", "num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        },
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h", mlp_bias=None, mlp_gate=False, activation_key="mlp_hidden_act", recurrence="mamba",
        experts=EXPERT_KINDS["nemotron"], eps_key="layer_norm_epsilon", prefix="backbone.", names=_NEMOTRON,
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
            "mamba_num_heads": 128, "position_embedding_type": "nope", "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Gemma4ForCausalLM": replace(
        _GEMMA4, model_type="gemma4_text", experts=EXPERT_KINDS["gemma4"], names={"mlp.gate": "router.proj"},
        defaults=_GEMMA4_DEFAULTS | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
    ),
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Gemma3nForCausalLM": Family(
        "gemma3n_text", qkv_bias=None, bias_keys=("attention_bias", "attention_bias", ""), qk_norm="head", norms="both",
        embedding_by_size=True, activation_key="hidden_activation", windows="types", full_every=5, rope_per_kind=True,
        layers_differ=True, value_norm=True, streams=True,
        defaults={
            "vocab_size": 262400, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "sliding_window": 512, "tie_word_embeddings": True,
            "attention_multiplier": 1.0, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 15, "activation_sparsity_pattern": None,
            "altup_num_inputs": 4, "altup_active_idx": 0, "laurel_rank": 64,
        },
    ),
    "Phi3ForCausalLM": Family("phi3", windows="all", fused=("self_attn.qkv_proj", "mlp.gate_up_proj"), defaults={
        "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0,
    }),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", qkv_bias=None, qk_norm="head", windows="all", window_switch=True, experts=EXPERT_KINDS["qwen"],
        defaults={
            "num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", qkv_bias=None, bias_keys=("qkv_bias", "", ""), windows="types", window_switch=True, full_every=2,
        experts=EXPERT_KINDS["qwen2"],
        defaults={
            "qkv_bias": True, "num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28,
            "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        },
    ),
    "MixtralForCausalLM": Family(
        "mixtral", windows="all", experts=EXPERT_KINDS["mixtral"], names={"mlp.gate": "block_sparse_moe.gate"},
        defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
            "num_experts_per_tok": 2, "norm_topk_prob": True,
        },
    ),
    "PhimoeForCausalLM": Family(
        "phimoe", qkv_bias=None, norm="layer", norm_bias=True, windows="all", experts=EXPERT_KINDS["phi"],
        names={"mlp.gate": "block_sparse_moe.gate"}, aliases=("PhiMoEForCausalLM",),
        defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 16,
            "num_experts_per_tok": 2, "lm_head_bias": False, "short_mscale": None, "long_mscale": None,
        },
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss", qkv_bias=None, mlp_bias=None, bias_keys=("attention_bias", "attention_out_bias", "mlp_bias"),
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4", qk_norm="head", norms="after", windows="types", full_every=4, rope_in_windows="mixed",
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "ExaoneMoeForCausalLM": Family(
        "exaone_moe", qk_norm="head", windows="types", full_every=4, rope_in_windows="mixed",
        experts=EXPERT_KINDS["exaone"], aliases=("ExaoneMoEForCausalLM",), next_layers="num_nextn_predict_layers",
        next_prefix="mtp.layers.", next_names=_MTP, next_like="first", next_mlp="mlp",
        names=_DEEPSEEK | {"mlp.expert_bias": "mlp.e_score_correction_bias"},
        defaults={
            "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "moe_intermediate_size": 1024,
            "num_experts": 64, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        },
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", qkv_bias=None, qk_norm="all", experts=EXPERT_KINDS["olmoe"],
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5", qkv_bias=None, mlp_bias=None, bias_keys=("use_bias",) * 3, neighbours=True,
        aliases=("Ernie4_5_ForCausalLM",),
        defaults={
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense", qkv_bias=None, qk_norm="turned",
        names=_HUNYUAN, defaults={"rms_norm_eps": 1e-5, "alpha": 0.0},
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "hunyuan_v1_moe", qkv_bias=None, qk_norm="turned", experts=EXPERT_KINDS["hunyuan"], names=_HUNYUAN | {
            "mlp.gate": "mlp.gate.wg",
            **{f"mlp.shared_expert.{part}_proj": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        defaults={"rms_norm_eps": 1e-5, "alpha": 0.0, "num_experts": 1},
    ),
    "HYV3ForCausalLM": Family(
        "hy_v3", qkv_bias=None, mlp_bias=None, qk_norm="head", experts=EXPERT_KINDS["hy3"],
        names={
            "mlp.gate": "mlp.router.gate", "mlp.expert_bias": "mlp.expert_bias",
            **{f"mlp.shared_expert.{part}_proj": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        next_layers="num_nextn_predict_layers", next_names={"head_norm": "final_layernorm"},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0,
            "moe_intermediate_size": 1536, "num_experts": 192, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        },
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, model_type="glm4", norms="both", names=_GLM4),
    "CohereForCausalLM": Family(
        "cohere", qkv_bias=None, qk_norm="layer", norm="layer", norms="parallel", neighbours=True,
        eps_key="layer_norm_eps",
        defaults={
            "layer_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "logit_scale": 0.0625,
            "use_qk_norm": False,
        },
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2", qkv_bias=None, norm="layer", norms="parallel", windows="types", full_every=4,
        rope_in_windows="windows", neighbours=True, eps_key="layer_norm_eps",
        defaults={
            "layer_norm_eps": 1e-5, "sliding_window": 4096, "tie_word_embeddings": True, "logit_scale": 0.0625,
        },
    ),
    "Cohere2MoeForCausalLM": Family(
        "cohere2_moe", qkv_bias=None, norm="layer", norms="parallel", windows="types", full_every=4,
        rope_in_windows="windows", neighbours=True, eps_key="layer_norm_eps", experts=EXPERT_KINDS["cohere"],
        names=_DEEPSEEK, next_layers="num_nextn_predict_layers", next_names={"head_norm": "shared_head.norm"},
        next_turned=True,
        defaults={
            "layer_norm_eps": 1e-5, "rms_norm_eps": None, "head_dim": 128, "sliding_window": 4096,
            "tie_word_embeddings": True, "logit_scale": 0.0625, "num_experts": 8, "num_experts_per_tok": 2,
            "first_k_dense_replace": 0, "prefix_dense_sliding_window_pattern": 1,
        },
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2", qkv_bias=None, mlp_bias=None, bias_keys=("use_bias",) * 3, norm="layer", norm_bias=True,
        windows="all", mlp_gate=False, eps_key="norm_epsilon",
        names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        defaults={
            "use_bias": True, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "ApertusForCausalLM": Family(
        "apertus", qkv_bias=None, qk_norm="head", mlp_gate=False,
        names={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
        defaults={
            "hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12e6, "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "MiniCPMForCausalLM": Family(
        "minicpm", qkv_bias=None,
        defaults={"tie_word_embeddings": True, "scale_emb": None, "scale_depth": None, "dim_model_base": None},
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2", qkv_bias=None, latent=True, experts=EXPERT_KINDS["deepseek_v2"], names=_DEEPSEEK,
        defaults={
            "q_lora_rank": 1536, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1407,
            "n_routed_experts": 64, "first_k_dense_replace": 0, "topk_method": "greedy",
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3", qkv_bias=None, latent=True, experts=EXPERT_KINDS["deepseek"], names=_DEEPSEEK,
        next_layers="num_nextn_predict_layers", next_names={"head_norm": "shared_head.norm"},
        defaults={
            "q_lora_rank": 1536, "scoring_func": "sigmoid", "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3, "num_nextn_predict_layers": 1,
        },
    ),
    "DeepseekV32ForCausalLM": Family(
        "deepseek_v32", qkv_bias=None, latent=True, index="halves", experts=EXPERT_KINDS["deepseek"], names=_DEEPSEEK,
        next_layers="num_nextn_predict_layers", next_names={"head_norm": "shared_head.norm"},
        defaults=_DEEPSEEK_V32,
    ),
    "GlmMoeDsaForCausalLM": Family(
        "glm_moe_dsa", qkv_bias=None, latent=True, index="neighbours", experts=EXPERT_KINDS["deepseek"],
        names=_DEEPSEEK, next_layers="num_nextn_predict_layers", next_names={"head_norm": "shared_head.norm"},
        defaults=_DEEPSEEK_V32 | {
            "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5, "index_n_heads": 32,
            "n_group": 1, "topk_group": 1, "indexer_types": None,
        },
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4_moe_lite", qkv_bias=None, latent=True, experts=EXPERT_KINDS["deepseek"], names=_DEEPSEEK,
        next_layers="num_nextn_predict_layers", next_names={"head_norm": "shared_head.norm"},
        defaults={
            "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "scoring_func": "sigmoid",
            "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_routed_experts": 64,
            "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1,
        },
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe", qkv_bias=None, bias_keys=("attention_bias", "", ""), qk_norm="head",
        experts=EXPERT_KINDS["deepseek"], names=_DEEPSEEK, next_layers="num_nextn_predict_layers",
        next_names={"head_norm": "shared_head.norm"},
        defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False,
            "scoring_func": "sigmoid", "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
            "n_routed_experts": 128, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
        },
    ),
    "Dots1ForCausalLM": Family(
        "dots1", qkv_bias=None, qk_norm="head", windows="types", experts=EXPERT_KINDS["deepseek"], names=_DEEPSEEK,
        defaults={
            "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62, "first_k_dense_replace": 0,
            "moe_intermediate_size": 1408, "norm_topk_prob": False,
        },
    ),
    "AfmoeForCausalLM": Family(
        "afmoe", qkv_bias=None, qk_norm="head", norms="both", gates="channel", windows="types", full_every=4,
        pattern_key="global_attn_every_n_layers", rope_in_windows="windows", experts=EXPERT_KINDS["afmoe"],
        names=_DEEPSEEK | {
            "mlp.gate": "mlp.router.gate", "mlp.expert_bias": "mlp.expert_bias",
            "pre_feedforward_layernorm": "pre_mlp_layernorm", "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        defaults={
            "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024, "mup_enabled": False,
            "moe_intermediate_size": 1408, "num_experts": 64, "num_experts_per_tok": 6, "num_dense_layers": 1,
            "score_func": "sigmoid",
        },
    ),
    "MiMoV2FlashForCausalLM": Family(
        "mimo_v2_flash", qkv_bias=None, bias_keys=("attention_bias", "", ""), windows="types", full_every=6,
        first_full=True, rope_per_kind=True, sinks="windows", window_pairs=2, experts=EXPERT_KINDS["mimo"],
        names=_DEEPSEEK | {"self_attn.sinks": "self_attn.attention_sink_bias"},
        next_layers="num_nextn_predict_layers", next_prefix="model.mtp.layers.", next_like="window", next_mlp="mlp",
        next_names={"head_norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"},
        defaults={
            "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "attention_value_scale": 0.707,
            "rms_norm_eps": 1e-5, "sliding_window": 129, "partial_rotary_factor": 0.334, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,  # its files have three and do not say so
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "LagunaForCausalLM": Family(
        "laguna", qkv_bias=None, qk_norm="head", gates="head", gate_curve="softplus", windows="types", full_every=1,
        rope_per_kind=True, experts=EXPERT_KINDS["laguna"],
        names={"self_attn.gate_proj": "self_attn.g_proj", "mlp.expert_bias": "mlp.experts.e_score_correction_bias"},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 512, "gating": True,
            "num_attention_heads_per_layer": None, "partial_rotary_factor": 1.0, "moe_intermediate_size": 512,
            "num_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "Step3p5ForCausalLM": Family(
        "step3p5", qkv_bias=None, qk_norm="head", norms_less_one=True, gates="head", windows="types", full_every=1,
        rope_per_kind=True, experts=EXPERT_KINDS["step"], translated=step_entries,
        names={
            "self_attn.gate_proj": "self_attn.g_proj", "mlp.gate": "moe.gate", "mlp.expert_bias": "moe.router_bias",
            **{f"mlp.shared_expert.{part}_proj": f"share_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
        next_layers="num_nextn_predict_layers", next_raw=True,
        next_names={"head_norm": "transformer.shared_head.norm"},
        defaults={
            "vocab_size": 128815, "hidden_size": 4096, "intermediate_size": 11264,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "num_attention_heads_per_layer": None,
            "query_pre_attn_scalar": 128, "swiglu_limits": None, "swiglu_limits_shared": None,
            "moe_intermediate_size": 1280, "n_routed_experts": 288, "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
        },
    ),
    "SolarOpenForCausalLM": Family(
        "solar_open", qkv_bias=None, bias_keys=("attention_bias", "", ""),
        experts=EXPERT_KINDS["deepseek"], names=_DEEPSEEK,
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "partial_rotary_factor": 1.0, "scoring_func": "sigmoid", "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280, "n_routed_experts": 128, "first_k_dense_replace": 0,
        },
    ),
    "MellumForCausalLM": Family(
        "mellum", qkv_bias=None, qk_norm="head", windows="types", rope_per_kind=True, experts=EXPERT_KINDS["mellum"],
        defaults={
            "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 5e5, "rope_local_base_freq": 1e4,
            "sliding_window": 1024, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896,
        },
    ),
    "BailingMoeV2ForCausalLM": Family(
        "bailing_moe_v2", qkv_bias=None, bias_keys=("use_qkv_bias", "use_bias", ""), qk_norm="head",
        experts=EXPERT_KINDS["bailing"], names=_BAILING, fused=("attention.query_key_value", ""),
        next_layers="num_nextn_predict_layers",
        next_names={"head_norm": "final_layernorm"},
        defaults={
            "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "use_qk_norm": True, "score_function": "sigmoid",
            "rope_theta": 600000.0, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        },
    ),
    "BailingHybridForCausalLM": Family(
        "bailing_hybrid", qkv_bias=None, latent=True, gates="head", recurrence="kimi", translated=bailing_entries,
        experts=EXPERT_KINDS["bailing"], names=_LING3, aliases=("BailingMoeV3ForCausalLM",),
        other_names={"attention.o_proj": "attention.dense"},  # of layers with a state too, as transformers writes them
        next_layers="num_nextn_predict_layers", next_names={"head_norm": "final_layernorm"},
        defaults={
            "rope_theta": 6e6, "max_position_embeddings": 262144, "num_experts": 512, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
            "score_function": "sigmoid", "first_k_dense_replace": 2, "num_nextn_predict_layers": 1,
            "kda_lower_bound": -5.0, "swiglu_limits": None, "swiglu_limits_shared": None,
        },
    ),
    "KimiLinearForCausalLM": Family(
        "kimi_linear", qkv_bias=None, latent=True, recurrence="kimi", rate_axes=True, translated=kimi_entries,
        experts=EXPERT_KINDS["kimi"], names=_KIMI,
        other_names={"mlp.": "block_sparse_moe."},  # of dense layers too, as transformers writes them
        defaults={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "position_embedding_type": "nope",
            "rope_interleave": False, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.446, "first_k_dense_replace": 1,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2", qk_norm="all", experts=EXPERT_KINDS["minimax"],
        names={
            "mlp.gate": "block_sparse_moe.gate", "mlp.expert_bias": "block_sparse_moe.e_score_correction_bias",
        },
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6, "partial_rotary_factor": 1.0,
            "rotary_dim": None, "use_qk_norm": True, "num_local_experts": 256, "num_experts_per_tok": 8,
        },
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe", neighbours=True, experts=EXPERT_KINDS["ernie"],
        names=_DEEPSEEK | {"mlp.expert_bias": "mlp.moe_statics.e_score_correction_bias"},
        defaults={
            "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True,
            "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, "moe_layer_start_index": 1,
        },
    ),
    "YoutuForCausalLM": Family(
        "youtu", qkv_bias=None, latent=True, defaults={"q_lora_rank": 1536, "tie_word_embeddings": True},
    ),
    "Mistral4ForCausalLM": Family(
        "mistral4", qkv_bias=None, latent=True, experts=EXPERT_KINDS["mistral4"], names=_DEEPSEEK,
        defaults={
            "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048, "n_routed_experts": 128, "first_k_dense_replace": 0,
            "llama_4_scaling_beta": 0.0, "rope_parameters": {
                "rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss", qkv_bias=None, mlp_bias=True, activation="clamped", windows="types", full_every=2, sinks="all",
        experts=EXPERT_KINDS["gpt_oss"], names={"mlp.gate": "mlp.router"},
        defaults={
            "attention_bias": True, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 15e4, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
            "norm_topk_prob": True, "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
_BY_TYPE = {family.model_type: name for name, family in FAMILIES.items()}
_BY_NAME = {alias: name for name, family in FAMILIES.items() for alias in (name, *family.aliases)}


def family_of(config: Mapping[str, Any]) -> tuple[str, Family]:
    """The architecture that wrote a `config.json`, and its row: `architectures`, or `model_type` if that is absent.

    Raises:
        CheckpointError: another one.
    """
    named = config.get("architectures")
    if not named:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in _BY_TYPE:
            if parts := parts_missing(model_type):
                raise CheckpointError(f"model_type: expected a network without {parts}, got {model_type!r}")
            known = ", ".join([*_BY_TYPE, *(tower.model_type for tower in TOWERS.values())])
            raise CheckpointError(f"model_type: expected one of {known}, got {short(model_type)}")
        return _BY_TYPE[model_type], FAMILIES[_BY_TYPE[model_type]]
    name = _with_head(named[0]) if isinstance(named, list) and len(named) == 1 else ""
    if name not in _BY_NAME:
        if parts := parts_missing(name):
            raise CheckpointError(f"architectures: expected a network without {parts}, got {name!r}")
        known = ", ".join([*FAMILIES, *TOWERS])
        raise CheckpointError(f"architectures: expected one of {known}, got {short(named)}")
    return _BY_NAME[name], FAMILIES[_BY_NAME[name]]


def _with_head(name: Any) -> str:
    """The name of an architecture; that with a head for one that was saved without it, such as `Qwen3Model`."""
    text = name if isinstance(name, str) else ""
    return text.removesuffix("Model") + "ForCausalLM" if text.endswith("Model") and text not in _BY_NAME else text
