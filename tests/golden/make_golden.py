"""Make the golden data: tiny random checkpoints, and the results of the transformers library for them.

Run by hand, once, with torch and transformers installed; the tests only read its output:

    python tests/golden/make_golden.py            # every model
    python tests/golden/make_golden.py qwen3      # one of them

Each model becomes a folder with a checkpoint as `save_pretrained` writes it and `golden.npz`:

    prompt_<n>     uint32 (n,)           the prompt of n tokens
    positions_<n>  int64 (m,)            the positions whose logits are kept (all, for the long prompt some)
    logits_<n>     float32 (m, vocab)    float32 logits of the stored (rounded) weights, eager attention
    exact_<n>      float32 (m, vocab)    the same computed in float64 throughout, norms and rotary angles included
    greedy_<n>     uint32 (64,)          the greedy continuation, each token by a forward pass without a cache
    margin         float32 ()            the smallest distance between best and second-best along all of them

A variant with `seeded=True` stores no weights: its folder is `seeded/<name>`, and `weights.json` says how
`tests/support/seeded_weights.py` makes them, by the names of the file that `save_pretrained` writes.

A random model is a useful reference only if its choices are clear. So weights are scaled such that logits spread over
several units, and a seed is accepted only if float32 noise cannot change any greedy choice and the continuations do
not repeat one token.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    BailingHybridConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HYV3Config,
    KimiLinearConfig,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Llama4TextConfig,
    LlamaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    MuseGlimmerConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OlmoHybridConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    Starcoder2Config,
    Step3p7Config,
    YoutuConfig,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
import seeded_weights as seeding

PROMPT_LENGTHS = (1, 15, 16, 17, 33, 200)
SEEDED_LENGTHS = (1, 33, 100)
CONTINUATION = 64
MIN_MARGIN = 5e-3
MIN_DISTINCT = 8
VOCAB = 256
CONTEXT = 512

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
SMALL_HYBRID = COMMON | {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}
SMALL_MAMBA = {key: value for key, value in SMALL_HYBRID.items() if key != "num_hidden_layers"} | {
    "head_dim": 8, "mamba_num_heads": 6, "mamba_head_dim": 12, "ssm_state_size": 20, "n_groups": 2, "conv_kernel": 4,
    "chunk_size": 16, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
    "time_step_min": 1e-30,  # which prefills of transformers clamp steps at, and nothing else does
}
SMALL = COMMON | {  # of seeded variants
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 24, "max_position_embeddings": 256,
}
NO_HEAD_DIM = {key: value for key, value in SMALL.items() if key != "head_dim"}  # 8
FULL = ["full_attention"] * 3
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 8.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.5, 1.8],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
}
SMALL_DELTA = SMALL_HYBRID | {  # groups of heads, and sizes that no other part has
    "head_dim": 32, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 8, "linear_value_head_dim": 20,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": DEFAULT_ROPE | {
        "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}
GRANITE_HYBRID = SMALL_HYBRID | {
    "num_attention_heads": 6, "intermediate_size": 20, "shared_intermediate_size": 28,
    "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope", "mamba_n_heads": 8,
    "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_d_head": "auto", "mamba_expand": 2, "mamba_d_conv": 4,
    "mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_proj_bias": True, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 0.5, "rope_parameters": DEFAULT_ROPE,
}
FALCON = {
    "mamba_d_ssm": 60, "mamba_n_heads": 6, "mamba_d_head": 10, "mamba_n_groups": 2, "mamba_d_state": 12,
    "mamba_d_conv": 3, "mamba_chunk_size": 16, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.8,
    "key_multiplier": 0.9, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7], "mlp_multipliers": [1.3, 0.8],
}
LATENT = {key: value for key, value in NO_HEAD_DIM.items() if key != "num_key_value_heads"} | {
    "num_key_value_heads": 6, "moe_intermediate_size": 20,
}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 32, "sliding_window": 24, "tie_word_embeddings": False}


STEP = {
    "sliding_window": 20, "n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
    "share_expert_dim": 36, "pad_token_id": 0,
}
UNSAVED = ("attn_implementation", "n_routed_experts", "num_experts_per_tok")
NO_IMAGES = {  # tokens that no prompt has
    "image_token_id": VOCAB, "video_token_id": VOCAB, "vision_start_token_id": VOCAB, "vision_end_token_id": VOCAB,
}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


GEMMA4 = {
    "head_dim": 16, "global_head_dim": 24, "sliding_window": 20, "final_logit_softcapping": 20.0,
    "tie_word_embeddings": True, "pad_token_id": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}


def _kinds(letters: str) -> list[str]:
    """`layer_types` of layers with a window, W, and without one, F."""
    return ["sliding_attention" if each == "W" else "full_attention" for each in letters]


GEMMA3N = SMALL | {
    "num_hidden_layers": 7, "layer_types": _kinds("WFWWFWF"), "num_kv_shared_layers": 3, "sliding_window": 20,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 96, "laurel_rank": 10, "pad_token_id": 0,
    "final_logit_softcapping": 20.0, "activation_sparsity_pattern": [0.95, 0.5, 0.9, 0.0, 0.0, 0.2, 0.0],
}


class Variant(NamedTuple):
    """One golden model: its configuration, stored dtype, and the size at which files are split.

    `lengths` are those of its prompts. Models with another tower beside that of texts are in `towers/`, those whose
    weights come from a seeded stream in `seeded/`. `exact`: parts of names of tensors that the file has in float32.
    `renamed`: keys that config.json has instead, None to leave out: of a network that transformers has by another name.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    max_shard_size: str = "1GB"
    lengths: tuple[int, ...] = PROMPT_LENGTHS
    seeded: bool = False
    exact: tuple[str, ...] = ()
    renamed: dict[str, Any] | None = None


def seeded(config: PreTrainedConfig, **options: Any) -> Variant:
    """A model in bfloat16 whose weights come from a seeded stream."""
    return Variant(config, torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True, **options)


def minicpm(*, scale_emb: float, scale_depth: float, dim_model_base: float, **options: Any) -> Variant:
    """MiniCPM, which transformers has not: Granite with its factors."""
    sizes = {"num_hidden_layers": 4, "tie_word_embeddings": True, "rope_parameters": DEFAULT_ROPE} | options
    config = GraniteConfig(
        **NO_HEAD_DIM | sizes, attention_multiplier=8**-0.5, embedding_multiplier=scale_emb,
        residual_multiplier=scale_depth / 2, logits_scaling=48 / dim_model_base,
    )
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    return seeded(config, renamed=dict.fromkeys(names) | {
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": scale_emb,
        "scale_depth": scale_depth, "dim_model_base": dim_model_base,
    })


def step(sizes: dict[str, Any], published: dict[str, Any] | None = None, **options: Any) -> Variant:
    """The text network of Step 3.7, or Step 3.5 with the keys of its own files."""
    config = Step3p7Config(text_config=sizes | options, vision_config=VISION | {"image_size": 28, "patch_size": 14},
                           image_token_id=VOCAB)
    names = ("text_config", "vision_config", "image_token_id", "projector_bias")
    flat = {key: value for key, value in sizes.items() if key not in ("num_key_value_heads", *UNSAVED)}
    renamed = None if published is None else dict.fromkeys(names) | flat | {"tie_word_embeddings": False} | published
    return seeded(config, renamed=renamed)


VARIANTS = {
    "llama": Variant(LlamaConfig(**COMMON, rope_parameters=DEFAULT_ROPE), torch.float32),
    "llama_llama3_bf16": Variant(LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE), torch.bfloat16),
    "llama_linear_tied_sharded_f16": Variant(
        LlamaConfig(**COMMON, rope_parameters=LINEAR_ROPE, tie_word_embeddings=True), torch.float16, "40KB"
    ),
    "llama_biases": Variant(
        LlamaConfig(
            **COMMON | {"num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 3},
            rope_parameters=DEFAULT_ROPE,
            attention_bias=True,
            mlp_bias=True,
        ),
        torch.bfloat16,
    ),
    "mistral_yarn": Variant(
        MistralConfig(**COMMON, head_dim=32, sliding_window=None, rope_parameters=YARN_ROPE), torch.bfloat16
    ),
    "ministral3": Variant(
        Ministral3Config(
            **COMMON, head_dim=24,
            rope_parameters=YARN_ROPE | {
                "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        ),
        torch.bfloat16,
    ),
    "qwen2": Variant(
        Qwen2Config(**COMMON, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
        torch.bfloat16,
    ),
    "qwen3_tied": Variant(
        Qwen3Config(
            **COMMON | {"num_hidden_layers": 3},
            head_dim=24,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        ),
        torch.float32,
    ),
    "mistral_window": Variant(
        MistralConfig(**COMMON, sliding_window=24, rope_parameters=DEFAULT_ROPE), torch.bfloat16
    ),
    "qwen2_windows": Variant(
        Qwen2Config(
            **COMMON | {"num_hidden_layers": 3},
            use_sliding_window=True,
            sliding_window=40,
            max_window_layers=1,
            rope_parameters=DEFAULT_ROPE,
        ),
        torch.bfloat16,
    ),
    "gemma2": Variant(
        Gemma2Config(
            **COMMON | {"num_hidden_layers": 3},
            **GEMMA,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=15.0,
            rope_parameters=DEFAULT_ROPE,
        ),
        torch.bfloat16,
    ),
    "gemma3": Variant(
        Gemma3TextConfig(
            **COMMON | {"num_hidden_layers": 4},
            **GEMMA,
            layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        torch.bfloat16,
    ),
    "phi3_longrope": Variant(
        Phi3Config(**COMMON, original_max_position_embeddings=64, rope_parameters=LONG_ROPE), torch.bfloat16
    ),
    "smollm3": Variant(
        SmolLM3Config(
            **COMMON | {"num_hidden_layers": 4}, no_rope_layer_interval=4, tie_word_embeddings=False,
            rope_parameters=DEFAULT_ROPE,
        ),
        torch.bfloat16,
    ),
    "granite": Variant(
        GraniteConfig(
            **COMMON, embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.2, logits_scaling=0.5,
            rope_parameters=DEFAULT_ROPE,
        ),
        torch.bfloat16,
    ),
    "olmo2": Variant(Olmo2Config(**COMMON, rope_parameters=DEFAULT_ROPE), torch.bfloat16),
    "olmo3": Variant(
        Olmo3Config(
            **COMMON,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"full_attention": YARN_ROPE, "sliding_attention": DEFAULT_ROPE},
        ),
        torch.bfloat16,
    ),
    "qwen3_moe": Variant(
        Qwen3MoeConfig(
            **COMMON, head_dim=24, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32,
            norm_topk_prob=False, rope_parameters=DEFAULT_ROPE,
        ),
        torch.bfloat16,
    ),
    "mixtral": Variant(
        MixtralConfig(
            **COMMON | {"intermediate_size": 32}, num_local_experts=4, num_experts_per_tok=2, sliding_window=24,
            rope_parameters=DEFAULT_ROPE,
        ),
        torch.bfloat16,
    ),
    "towers/gemma3": Variant(
        Gemma3Config(
            text_config=COMMON | GEMMA | {
                "num_hidden_layers": 3, "sliding_window_pattern": 2, "model_type": "gemma3_text",
                "tie_word_embeddings": True,
            },
            vision_config=VISION | {"image_size": 28, "patch_size": 14},
            mm_tokens_per_image=1, image_token_index=255, eos_token_id=None,
        ),
        torch.bfloat16,
        lengths=(33, 200),
    ),
    "towers/mistral3": Variant(
        Mistral3Config(
            text_config=COMMON | {"head_dim": 24, "sliding_window": None, "model_type": "mistral"},
            vision_config=VISION | {"image_size": 28, "patch_size": 14, "head_dim": 8, "model_type": "pixtral"},
            image_token_index=255, tie_word_embeddings=False,
        ),
        torch.bfloat16,
        lengths=(33, 200),
    ),
    "towers/qwen2_5_vl": Variant(
        Qwen2_5_VLConfig(
            text_config=COMMON | {"rope_parameters": DEFAULT_ROPE | {"mrope_section": [2, 3, 3]}},
            vision_config={"hidden_size": 8, "intermediate_size": 8, "depth": 1, "num_heads": 1, "out_hidden_size": 64},
            **NO_IMAGES,
        ),
        torch.bfloat16,
        lengths=(33, 200),
    ),
    "towers/qwen3_vl": Variant(
        Qwen3VLConfig(
            text_config=COMMON | {
                "head_dim": 16,
                "rope_parameters": DEFAULT_ROPE | {"mrope_section": [2, 3, 3], "mrope_interleaved": True},
            },
            vision_config={
                "hidden_size": 8, "intermediate_size": 8, "depth": 1, "num_heads": 1, "out_hidden_size": 64,
                "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
            },
            **NO_IMAGES,
        ),
        torch.bfloat16,
        lengths=(33, 200),
    ),
    "lfm2": Variant(  # one convolution is behind the last attention
        Lfm2Config(
            **SMALL_HYBRID | {"num_attention_heads": 6},  # heads of 8
            layer_types=["conv", "full_attention", "conv"], conv_L_cache=3, conv_bias=True,
            block_multiple_of=8, rope_parameters=DEFAULT_ROPE, tie_word_embeddings=False,
        ),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "granite_hybrid": Variant(
        GraniteMoeHybridConfig(**GRANITE_HYBRID, num_local_experts=0, num_experts_per_tok=0),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "granite_hybrid_moe": Variant(
        GraniteMoeHybridConfig(
            **GRANITE_HYBRID | {"position_embedding_type": "rope"}, num_local_experts=6, num_experts_per_tok=3,
        ),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "granite_4": Variant(  # without a state
        GraniteMoeHybridConfig(
            **GRANITE_HYBRID | {"layer_types": ["attention"] * 3, "position_embedding_type": "rope"},
            num_local_experts=0, num_experts_per_tok=0,
        ),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "lfm2_moe": Variant(
        Lfm2MoeConfig(
            **SMALL_HYBRID | {"num_attention_heads": 6},
            layer_types=["conv", "full_attention", "conv"], rope_parameters=DEFAULT_ROPE, num_dense_layers=1,
            num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
            routed_scaling_factor=1.7, use_expert_bias=True, norm_topk_prob=True,
        ),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "qwen3_5_moe": Variant(
        Qwen3_5MoeTextConfig(
            **SMALL_DELTA, tie_word_embeddings=False, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
            shared_expert_intermediate_size=28,
        ),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "qwen3_next": Variant(
        Qwen3NextConfig(
            **SMALL_DELTA, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
            shared_expert_intermediate_size=28,
        ),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "nemotron_h_moe": Variant(
        NemotronHConfig(
            **SMALL_MAMBA, layers_block_type=["mamba", "moe", "attention", "mamba", "moe"], n_routed_experts=8,
            num_experts_per_tok=3, moe_intermediate_size=20, moe_shared_expert_intermediate_size=28, n_group=2,
            topk_group=1, moe_latent_size=16, routed_scaling_factor=2.5,
        ),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "nemotron_h_mixed": Variant(
        NemotronHConfig(
            **SMALL_MAMBA, layers_block_type=["mamba", "moe", "attention", "mlp"], n_routed_experts=5,
            num_experts_per_tok=2, moe_intermediate_size=20, moe_shared_expert_intermediate_size=28,
            norm_topk_prob=False,
        ),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "nemotron_h": Variant(  # an MLP is behind the last layer that mixes
        NemotronHConfig(
            **SMALL_MAMBA, layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"], use_bias=True,
            attention_bias=True, mlp_bias=True,
        ),
        torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "qwen3_5": Variant(
        Qwen3_5TextConfig(**SMALL_DELTA, tie_word_embeddings=True), torch.bfloat16, lengths=SEEDED_LENGTHS, seeded=True,
    ),
    # Layers that read K and V of others, inputs of each layer, a wide MLP.
    "gemma3n": seeded(Gemma3nTextConfig(**GEMMA3N)),
    "gemma3n_streams": seeded(  # layers run on the second of three; no scale of it, no sharing, other widths of MLPs
        Gemma3nTextConfig(
            **GEMMA3N | {
                "num_hidden_layers": 4, "layer_types": _kinds("WFFW"), "intermediate_size": [40, 72, 64, 56],
                "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.3, 0.9, 0.0],
                "vocab_size_per_layer_input": 90,
            },
            altup_num_inputs=3, altup_active_idx=1, altup_correct_scale=False,
            attention_bias=True, tie_word_embeddings=False,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0},
            },
        ),
    ),
    "gemma4": seeded(
        Gemma4TextConfig(
            **SMALL | GEMMA4 | {"num_hidden_layers": 8, "num_key_value_heads": 1}, layer_types=_kinds("WFWWFWFF"),
            num_kv_shared_layers=3, use_double_wide_mlp=True, hidden_size_per_layer_input=6,
            vocab_size_per_layer_input=96,
        ),
    ),
    "gemma4_experts": seeded(  # beside an MLP; values are keys
        Gemma4Config(
            text_config=SMALL | GEMMA4 | {
                "num_hidden_layers": 4, "layer_types": _kinds("WFWF"), "hidden_size_per_layer_input": 0,
                "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 5,
                "top_k_experts": 2, "moe_intermediate_size": 20,
            },
            vision_config=VISION | {"num_key_value_heads": 1, "head_dim": 8}, audio_config=None,
        ),
    ),
    "gemma4_unified": seeded(
        Gemma4UnifiedConfig(
            text_config=SMALL | GEMMA4 | {
                "num_hidden_layers": 4, "layer_types": _kinds("WFWF"), "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
            },
        ),
    ),
    "llama_odd": Variant(  # sizes that no other one has: a transposed matrix does not fit
        LlamaConfig(**SMALL, rope_parameters=DEFAULT_ROPE, attention_bias=True), torch.bfloat16,
        lengths=SEEDED_LENGTHS, seeded=True,
    ),
    "seed_oss": seeded(SeedOssConfig(**SMALL, rope_parameters=DEFAULT_ROPE)),
    "seed_oss_biases": seeded(SeedOssConfig(
        **SMALL | {"num_key_value_heads": 2}, attention_bias=False, attention_out_bias=True, mlp_bias=True,
        tie_word_embeddings=True, rope_parameters=YARN_ROPE,
    )),
    "exaone4": seeded(Exaone4Config(
        **NO_HEAD_DIM, sliding_window=None, rope_parameters=LLAMA3_ROPE, layer_types=FULL
    )),
    "exaone4_windows": seeded(Exaone4Config(
        **SMALL | {"num_hidden_layers": 5}, sliding_window=20, sliding_window_pattern=4, rope_parameters=DEFAULT_ROPE,
    )),
    "olmoe": seeded(OlmoeConfig(
        **NO_HEAD_DIM | {"intermediate_size": 40, "num_key_value_heads": 6}, num_experts=5, num_experts_per_tok=2,
        rope_parameters=DEFAULT_ROPE,
    )),
    "olmoe_normalised": seeded(OlmoeConfig(
        **NO_HEAD_DIM | {"intermediate_size": 24}, num_experts=7, num_experts_per_tok=3,
        norm_topk_prob=True, attention_bias=True, rope_parameters=DEFAULT_ROPE,
    )),
    "ernie4_5": seeded(Ernie4_5Config(**SMALL, tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE)),
    "ernie4_5_biases": seeded(Ernie4_5Config(
        **SMALL | {"head_dim": 16, "num_key_value_heads": 2}, use_bias=True, rope_parameters=DEFAULT_ROPE
    )),
    "hunyuan": seeded(HunYuanDenseV1Config(
        **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 2048.0, "factor": 1.0},
    )),
    "hunyuan_biases": seeded(HunYuanDenseV1Config(
        **SMALL | {"num_key_value_heads": 2, "head_dim": 16}, attention_bias=True, rope_parameters=DEFAULT_ROPE,
    )),
    "glm4": seeded(Glm4Config(**SMALL, rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 0.5})),
    "glm4_no_biases": seeded(Glm4Config(
        **SMALL | {"num_key_value_heads": 2, "head_dim": 16}, attention_bias=False,
        rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 0.75},
    )),
    # As many channels of queries, keys and values: transformers cuts their convolution into three equal parts.
    "olmo_hybrid": seeded(OlmoHybridConfig(
        **SMALL_HYBRID, layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=30, linear_value_head_dim=10,
        linear_conv_kernel_dim=3, rope_parameters={"rope_type": "default", "rope_theta": None},
    )),
    "olmo_hybrid_turned": seeded(OlmoHybridConfig(
        **SMALL_HYBRID | {"num_hidden_layers": 4}, linear_allow_neg_eigval=False, attention_bias=True,
        linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=12, linear_value_head_dim=12,
        tie_word_embeddings=True, rope_parameters=DEFAULT_ROPE,
    )),
    "muse_glimmer": seeded(MuseGlimmerConfig(
        text_config=SMALL | {
            "num_hidden_layers": 5, "sliding_window": 20, "output_multiplier": 0.7, "final_logit_softcapping": 15.0,
            "qk_scale_factor": 1.3, "post_norm_eps": 1e-3, "rope_parameters": DEFAULT_ROPE,
        },
        vision_config=VISION | {"pos_emb_height": 4, "pos_emb_width": 4}, out_hidden_size=48, projector_hidden_size=8,
        image_token_id=VOCAB, video_token_id=VOCAB + 1,
    )),
    "muse_glimmer_kinds": seeded(MuseGlimmerConfig(  # layers without a rotary embedding have a window, one beside not
        text_config=SMALL | {
            "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 24,
            "layer_types": _kinds("FWFW"), "layer_rope_theta": [10000.0, 10000.0, 0, 0], "output_multiplier": 0.5,
            "qk_scale_factor": 1.5, "attention_bias": True, "rope_parameters": LINEAR_ROPE,
        },
        vision_config=VISION | {"pos_emb_height": 4, "pos_emb_width": 4}, out_hidden_size=48, projector_hidden_size=8,
        image_token_id=VOCAB, video_token_id=VOCAB + 1,
    )),
    "falcon_h1": seeded(FalconH1Config(
        **SMALL_HYBRID | FALCON, mamba_rms_norm=False, rope_parameters=DEFAULT_ROPE,
    )),
    "falcon_h1_norms": seeded(FalconH1Config(
        **SMALL_HYBRID | FALCON | {"num_hidden_layers": 2, "mamba_d_ssm": None, "mamba_d_head": "auto"},
        mamba_rms_norm=True, mamba_norm_before_gate=True, attention_bias=True, mlp_bias=True, mamba_proj_bias=True,
        projectors_bias=True, mamba_conv_bias=False, tie_word_embeddings=True, rope_parameters=DEFAULT_ROPE,
    )),
    "falcon_h1_gated": seeded(FalconH1Config(
        **SMALL_HYBRID | FALCON | {"num_hidden_layers": 2, "mlp_multipliers": None, "ssm_multipliers": None},
        mamba_rms_norm=True, mamba_norm_before_gate=False,
        rope_parameters=DEFAULT_ROPE,
    )),
    "gemma": seeded(GemmaConfig(**SMALL, rope_parameters=DEFAULT_ROPE)),
    "gemma_biases": seeded(GemmaConfig(
        **SMALL | {"num_key_value_heads": 1, "head_dim": 16}, attention_bias=True, tie_word_embeddings=False,
        rope_parameters=LINEAR_ROPE,
    )),
    "glm": seeded(GlmConfig(**SMALL, rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 0.5})),
    "glm_no_biases": seeded(GlmConfig(
        **SMALL | {"num_key_value_heads": 2, "head_dim": 16}, attention_bias=False, tie_word_embeddings=True,
        rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 0.75},
    )),
    "cohere": seeded(CohereConfig(**NO_HEAD_DIM, logit_scale=0.75, rope_parameters=DEFAULT_ROPE)),
    "cohere_norms": seeded(CohereConfig(  # of queries and keys, with weights for each head
        **NO_HEAD_DIM | {"hidden_size": 96, "num_key_value_heads": 2}, logit_scale=1.5, use_qk_norm=True,
        attention_bias=True, tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE,
    )),
    "cohere2": seeded(Cohere2Config(
        **NO_HEAD_DIM | {"num_hidden_layers": 5}, sliding_window=20, logit_scale=0.75, rope_parameters=DEFAULT_ROPE,
    )),
    "cohere2_biases": seeded(Cohere2Config(
        **NO_HEAD_DIM | {"hidden_size": 96, "num_key_value_heads": 2}, sliding_window=24, logit_scale=1.5,
        layer_types=["full_attention", "sliding_attention", "full_attention"], attention_bias=True,
        tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE,
    )),
    "starcoder2": seeded(Starcoder2Config(**NO_HEAD_DIM, rope_parameters=DEFAULT_ROPE)),
    "starcoder2_window": seeded(Starcoder2Config(
        **NO_HEAD_DIM | {"hidden_size": 96, "num_key_value_heads": 2}, sliding_window=20, use_bias=False,
        tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE,
    )),
    "deepseek_v3": seeded(DeepseekV3Config(
        **LATENT, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=24, v_head_dim=20, q_lora_rank=36,
        n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, first_k_dense_replace=1,
        rope_parameters=YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.8},
    )),
    "deepseek_v2": seeded(DeepseekV2Config(
        **LATENT, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=28, q_lora_rank=None,
        n_routed_experts=6, num_experts_per_tok=2, first_k_dense_replace=1, rope_parameters=DEFAULT_ROPE,
    )),
    "deepseek_v2_groups": seeded(DeepseekV2Config(
        **LATENT, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=20, v_head_dim=24, q_lora_rank=28,
        n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        routed_scaling_factor=3.0, rope_parameters=YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.7},
    )),
    "deepseek_v32": seeded(DeepseekV32Config(
        **LATENT, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20, q_lora_rank=36,
        n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, first_k_dense_replace=1, index_n_heads=10,
        index_head_dim=40, index_topk=20, rope_parameters=YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.8},
    )),
    "glm_moe_dsa": seeded(GlmMoeDsaConfig(  # the third layer takes the tokens of the second one
        **LATENT | {"num_hidden_layers": 4}, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=20, v_head_dim=28,
        q_lora_rank=44, n_routed_experts=7, num_experts_per_tok=3, first_k_dense_replace=2, index_n_heads=12,
        index_head_dim=32, index_topk=24, indexer_types=["full", "full", "shared", "full"],
        rope_parameters=DEFAULT_ROPE,
    )),
    "mistral4": seeded(
        Mistral3Config(  # transformers has this network as a part of that one alone
            text_config=LATENT | {
                "model_type": "mistral4", "kv_lora_rank": 40, "qk_rope_head_dim": 16, "qk_nope_head_dim": 12,
                "v_head_dim": 28, "q_lora_rank": 44, "n_routed_experts": 12, "n_group": 4, "topk_group": 2,
                "num_experts_per_tok": 3, "routed_scaling_factor": 1.3, "rope_parameters": YARN_ROPE | {
                    "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.3,
                },
            },
            vision_config=VISION | {"image_size": 28, "patch_size": 14, "head_dim": 8, "model_type": "pixtral"},
            image_token_index=255, tie_word_embeddings=False,
        ),
    ),
    "glm4_moe_lite": seeded(Glm4MoeLiteConfig(
        **LATENT, kv_lora_rank=40, qk_rope_head_dim=16, qk_nope_head_dim=20, v_head_dim=28, q_lora_rank=44,
        n_routed_experts=7, n_shared_experts=2, num_experts_per_tok=3, rope_interleave=False, routed_scaling_factor=1.3,
        rope_parameters=DEFAULT_ROPE,
    )),
    "kimi_linear": seeded(KimiLinearConfig(
        **LATENT | {"num_hidden_layers": 4, "max_position_embeddings": 256, "linear_attn_config": {
            "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 20, "num_heads": 6,
            "short_conv_kernel_size": 3,
        }},
        kv_lora_rank=40, qk_rope_head_dim=10, qk_nope_head_dim=20, v_head_dim=28, q_lora_rank=None,
        num_local_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=2,
        routed_scaling_factor=1.3,
    )),
    "kimi_linear_mixed": seeded(KimiLinearConfig(  # biases, queries with a latent, fewer heads with a state
        **LATENT | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=12, v_head_dim=20, q_lora_rank=28,
        num_local_experts=7, num_experts_per_tok=2, norm_topk_prob=False, attention_bias=True, linear_head_dim=16,
        linear_num_heads=4, linear_conv_kernel_dim=2, mlp_layer_types=["sparse", "dense", "sparse"],
    )),
    "bailing_hybrid": seeded(BailingHybridConfig(
        **LATENT | {"num_hidden_layers": 4, "head_dim": 20}, kv_lora_rank=40, qk_rope_head_dim=16,
        qk_nope_head_dim=20, v_head_dim=28, q_lora_rank=44, num_local_experts=8, n_group=4, topk_group=2,
        num_experts_per_tok=3, first_k_dense_replace=1, layer_group_size=2, short_conv_kernel_size=3,
        kda_lower_bound=-3.5, num_mtp_layers=0,
    )),
    "bailing_hybrid_free": seeded(BailingHybridConfig(  # without a bound of decays
        **LATENT | {"num_hidden_layers": 3, "head_dim": 24}, kv_lora_rank=32, qk_rope_head_dim=8,
        qk_nope_head_dim=12, v_head_dim=20, q_lora_rank=None, num_local_experts=7, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=0, layer_group_size=3, kda_safe_gate=False, num_mtp_layers=0,
        n_shared_experts=2, attention_bias=True,
    )),
    "glm4_moe": seeded(Glm4MoeConfig(
        **SMALL, moe_intermediate_size=40, n_routed_experts=7, num_experts_per_tok=3, n_shared_experts=2,
        routed_scaling_factor=1.7, use_qk_norm=True, attention_bias=True,
        rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 0.75},
    )),
    "glm4_moe_air": seeded(Glm4MoeConfig(
        **SMALL | {"num_key_value_heads": 2, "head_dim": 16}, moe_intermediate_size=24, n_routed_experts=8, n_group=4,
        topk_group=2, num_experts_per_tok=3, first_k_dense_replace=0,
        rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
    )),
    "solar_open": seeded(SolarOpenConfig(
        **{key: value for key, value in SMALL.items() if key != "intermediate_size"}, moe_intermediate_size=24,
        n_routed_experts=7, num_experts_per_tok=3, routed_scaling_factor=1.4, rope_parameters=DEFAULT_ROPE | {},
    )),
    "youtu": seeded(YoutuConfig(
        **{key: value for key, value in LATENT.items() if "moe" not in key}, kv_lora_rank=40, qk_rope_head_dim=16,
        qk_nope_head_dim=20, v_head_dim=28, q_lora_rank=44, tie_word_embeddings=True, rope_parameters=DEFAULT_ROPE,
    )),
    "qwen3_vl_moe": seeded(Qwen3VLMoeConfig(
        text_config=SMALL | {
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 2,
            "rope_parameters": DEFAULT_ROPE | {"mrope_section": [4, 4, 4], "mrope_interleaved": True},
        },
        vision_config={
            "hidden_size": 8, "intermediate_size": 8, "depth": 1, "num_heads": 1, "out_hidden_size": 48,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        },
        **NO_IMAGES,
    )),
    "mellum": seeded(MellumConfig(
        **SMALL | {"num_hidden_layers": 4}, moe_intermediate_size=28, num_experts=7, num_experts_per_tok=3,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=20,
        rope_parameters={
            "full_attention": DEFAULT_ROPE | {"rope_theta": 5e5}, "sliding_attention": DEFAULT_ROPE | {},
        },
    )),
    "lfm3": seeded(Lfm3Config(
        **SMALL | {"num_hidden_layers": 5}, layer_types=["conv", "full_attention", "sliding_attention", "conv",
        "sliding_attention"], sliding_window=20, conv_L_cache=5, conv_bias=True,
    )),
    "granite_swa": seeded(GraniteSWAConfig(
        **SMALL | {"num_hidden_layers": 5}, sliding_window=20, embedding_multiplier=3.0, residual_multiplier=0.7,
        attention_multiplier=0.3, logits_scaling=2.0, tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE | {},
        layer_rope_theta=[0, 10000.0, 10000.0, 10000.0, 500000.0],
    )),
    "minimax_m2": seeded(MiniMaxM2Config(
        **SMALL | {"intermediate_size": 40}, num_local_experts=7, num_experts_per_tok=3,
        rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
    )),
    "ernie4_5_moe": seeded(Ernie4_5_MoeConfig(
        **NO_HEAD_DIM, moe_intermediate_size=40, moe_num_experts=7, moe_k=3, moe_num_shared_experts=2,
        tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE,
    )),
    "deepseek_v3_biases": seeded(DeepseekV3Config(
        **LATENT, kv_lora_rank=40, qk_rope_head_dim=16, qk_nope_head_dim=20, v_head_dim=28, q_lora_rank=44,
        n_routed_experts=7, n_group=1, topk_group=1, num_experts_per_tok=3, first_k_dense_replace=1,
        attention_bias=True, rope_parameters=DEFAULT_ROPE,
    )),
    "deepseek_v2_biases": seeded(DeepseekV2Config(  # queries have none: they have no latent
        **LATENT, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=28, q_lora_rank=None,
        n_routed_experts=6, num_experts_per_tok=2, first_k_dense_replace=1, attention_bias=True,
        rope_parameters=DEFAULT_ROPE,
    )),
    "ernie4_5_moe_least": seeded(Ernie4_5_MoeConfig(
        **NO_HEAD_DIM, moe_intermediate_size=40, moe_num_experts=7, moe_k=2, moe_norm_min=0.8,
        rope_parameters=DEFAULT_ROPE,
    )),
    "lfm3_biases": seeded(Lfm3Config(
        **SMALL | {"num_hidden_layers": 4, "head_dim": 20}, attention_bias=True, sliding_window=20, conv_L_cache=3,
    )),
    # Heads of sizes that no kernel has.
    "llama4": seeded(Llama4TextConfig(  # chunks of whole blocks and others; the last layer has experts alone
        **SMALL | {"num_hidden_layers": 5, "intermediate_size": 28}, intermediate_size_mlp=40, num_local_experts=7,
        num_experts_per_tok=2, moe_layers=[1, 2, 4], no_rope_layers=[1, 0, 1, 1, 0], attention_chunk_size=21,
        floor_scale=10, attn_scale=0.6, attention_bias=True, rope_parameters=LLAMA3_ROPE | {"high_freq_factor": 1.0},
    )),
    "llama4_plain": seeded(Llama4TextConfig(  # as files of 8,192 positions a chunk, whose queries have no norm
        **SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 20},
        intermediate_size_mlp=36, num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False,
        rope_parameters=DEFAULT_ROPE | {},
    )),
    "llama_26": seeded(LlamaConfig(**SMALL | {"head_dim": 26}, rope_parameters=DEFAULT_ROPE, attention_bias=True)),
    "qwen3_100": seeded(Qwen3Config(
        **SMALL | {"head_dim": 100, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
        use_sliding_window=True, sliding_window=20, max_window_layers=1, rope_parameters=DEFAULT_ROPE,
    )),
    "gpt_oss_18": seeded(GptOssConfig(
        **SMALL | {"intermediate_size": 32, "head_dim": 18}, num_local_experts=5, num_experts_per_tok=2,
        sliding_window=24, rope_parameters=DEFAULT_ROPE,
    )),
    "gemma4_20": seeded(Gemma4TextConfig(
        **SMALL | GEMMA4 | {
            "num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 12, "global_head_dim": 20,
        },
        layer_types=_kinds("WFWWF"), num_kv_shared_layers=1, hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=96,
    )),
    "qwen3_5_26": seeded(Qwen3_5TextConfig(**SMALL_DELTA | {"head_dim": 26, "rope_parameters": DEFAULT_ROPE | {
        "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1], "mrope_interleaved": True,
    }}, tie_word_embeddings=True)),
    "deepseek_v3_44": seeded(DeepseekV3Config(  # a latent and what turns of it
        **LATENT, kv_lora_rank=34, qk_rope_head_dim=10, qk_nope_head_dim=20, v_head_dim=28, q_lora_rank=44,
        n_routed_experts=7, n_group=1, topk_group=1, num_experts_per_tok=3, first_k_dense_replace=1,
        rope_parameters=DEFAULT_ROPE,
    )),
    "qwen2_moe": seeded(Qwen2MoeConfig(
        **NO_HEAD_DIM | {"num_hidden_layers": 4}, moe_intermediate_size=40, shared_expert_intermediate_size=28,
        num_experts=7, num_experts_per_tok=3, mlp_only_layers=[2], use_sliding_window=True, sliding_window=20,
        max_window_layers=3, rope_parameters=DEFAULT_ROPE | {},
    )),
    "qwen2_moe_steps": seeded(Qwen2MoeConfig(
        **NO_HEAD_DIM | {"num_hidden_layers": 4, "num_key_value_heads": 2}, moe_intermediate_size=24,
        shared_expert_intermediate_size=36, num_experts=5, num_experts_per_tok=2, decoder_sparse_step=2,
        norm_topk_prob=True, qkv_bias=False, rope_parameters=DEFAULT_ROPE | {},
    )),
    "qwen2_moe_all": seeded(Qwen2MoeConfig(
        **NO_HEAD_DIM, moe_intermediate_size=40, shared_expert_intermediate_size=28, num_experts=7,
        num_experts_per_tok=3, rope_parameters=DEFAULT_ROPE | {},
    )),
    "dots1": seeded(Dots1Config(
        **SMALL, moe_intermediate_size=40, n_routed_experts=7, n_shared_experts=2, num_experts_per_tok=3,
        first_k_dense_replace=1, routed_scaling_factor=1.7, norm_topk_prob=True, sliding_window=None,
        rope_parameters=DEFAULT_ROPE | {},
    )),
    "dots1_windows": seeded(Dots1Config(
        **NO_HEAD_DIM | {"num_hidden_layers": 4, "num_key_value_heads": 2}, moe_intermediate_size=24,
        n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=1, num_experts_per_tok=3, attention_bias=True,
        routed_scaling_factor=0.8, sliding_window=20, max_window_layers=2, rope_parameters=DEFAULT_ROPE | {},
    )),
    "hunyuan_moe": seeded(HunYuanMoEV1Config(
        **SMALL | {"intermediate_size": 40}, num_experts=7, moe_topk=[3] * 3,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 2048.0, "factor": 1.0},
    )),
    "hunyuan_moe_biases": seeded(HunYuanMoEV1Config(
        **SMALL | {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 16}, num_experts=5, moe_topk=2,
        attention_bias=True, tie_word_embeddings=True, rope_parameters=DEFAULT_ROPE | {},
    )),
    "hy_v3": seeded(HYV3Config(
        **SMALL | {"num_hidden_layers": 4}, moe_intermediate_size=28, num_experts=7, num_experts_per_tok=3,
        rope_parameters=DEFAULT_ROPE | {},
    )),
    "hy_v3_shared": seeded(HYV3Config(
        **SMALL | {"num_key_value_heads": 2, "head_dim": 16}, moe_intermediate_size=20, num_experts=5,
        num_experts_per_tok=2, num_shared_experts=2, router_scaling_factor=1.3, attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"], tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE | {},
    )),
    "laguna": seeded(LagunaConfig(
        **SMALL | {"num_hidden_layers": 5}, num_attention_heads_per_layer=[6, 9, 3, 9, 6], sliding_window=20,
        layer_types=_kinds("FWWWF"), moe_intermediate_size=28, shared_expert_intermediate_size=36, num_experts=7,
        num_experts_per_tok=3, moe_routed_scaling_factor=1.7, moe_router_logit_softcapping=1.5, attention_bias=True,
        rope_parameters={
            "full_attention": YARN_ROPE | {"partial_rotary_factor": 0.5}, "sliding_attention": DEFAULT_ROPE | {},
        },
    )),
    "laguna_elements": seeded(LagunaConfig(
        **SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "num_attention_heads": 4},
        num_attention_heads_per_layer=[4, 2, 8, 6], sliding_window=24, layer_types=_kinds("WFWF"), gating="per-element",
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"], moe_intermediate_size=20,
        shared_expert_intermediate_size=24, num_experts=5, num_experts_per_tok=2, rope_parameters={
            "full_attention": DEFAULT_ROPE | {"rope_theta": 5e5, "partial_rotary_factor": 0.25},
            "sliding_attention": DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
        },
    )),
    "step3p7": step(
        SMALL | STEP | {"num_hidden_layers": 5}, layer_types=_kinds("FWWWF"), num_sliding_attention_heads=9,
        mlp_layer_types=["dense"] + ["sparse"] * 4, swiglu_limits=[0.0, None, 0.4, 0.2, 0.0],
        swiglu_limits_shared=[0.3, 0.0, None, 0.25, 0.5], moe_router_scaling_factor=1.6,
        rope_parameters={
            "full_attention": LLAMA3_ROPE | {"partial_rotary_factor": 0.5}, "sliding_attention": DEFAULT_ROPE | {},
        },
    ),
    "step3p5": step(  # a file as published, with an MTP layer in its lists
        SMALL | STEP | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "num_attention_heads": 4},
        published={
            "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_attention_groups": 2,
            "moe_num_experts": 7, "moe_top_k": 3, "num_nextn_predict_layers": 1,
            "layer_types": _kinds("FWFWW"), "attention_other_setting": {"num_attention_heads": 6},
            "moe_layers_enum": "1,3", "rope_theta": [5e5, 1e4, 5e5, 1e4, 1e4],
            "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0, 1.0], "swiglu_limits": [0, 0, 0, 0.3, 0],
            "query_pre_attn_scalar": 20,
        },
        layer_types=_kinds("FWFW"), num_sliding_attention_heads=6, swiglu_limits=[0, 0, 0, 0.3],
        query_pre_attn_scalar=20, mlp_layer_types=["dense", "sparse"] * 2, rope_parameters={
            "full_attention": DEFAULT_ROPE | {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": DEFAULT_ROPE | {"partial_rotary_factor": 1.0},
        },
    ),
    "exaone_moe": seeded(ExaoneMoeConfig(
        **SMALL | {"num_hidden_layers": 5}, sliding_window=20, moe_intermediate_size=28, num_experts=8, n_group=4,
        topk_group=2, num_experts_per_tok=3, num_shared_experts=2, rope_parameters=DEFAULT_ROPE | {},
    )),
    "exaone_moe_dense": seeded(ExaoneMoeConfig(  # layers in any order
        **SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16}, sliding_window=24,
        sliding_window_pattern="LLGG", layer_types=_kinds("WWFF"), mlp_layer_types=["sparse", "dense"] * 2,
        moe_intermediate_size=40, num_experts=7, num_experts_per_tok=2, norm_topk_prob=False, routed_scaling_factor=1.2,
        rope_parameters=LLAMA3_ROPE | {},
    )),
    "afmoe": seeded(AfmoeConfig(
        **SMALL | {"num_hidden_layers": 5}, sliding_window=20, moe_intermediate_size=28, num_experts=7,
        num_experts_per_tok=3, num_shared_experts=2, num_dense_layers=2, route_scale=1.7, mup_enabled=True,
        rope_parameters=DEFAULT_ROPE | {},
    )),
    "afmoe_plain": seeded(AfmoeConfig(
        **SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16}, sliding_window=24,
        layer_types=_kinds("FWFW"), moe_intermediate_size=40, num_experts=5, num_experts_per_tok=2,
        num_shared_experts=1, num_dense_layers=0, attention_bias=True, rope_parameters=DEFAULT_ROPE | {},
    )),
    "cohere2_moe": seeded(Cohere2MoeConfig(
        **SMALL | {"num_hidden_layers": 5, "intermediate_size": 28}, sliding_window=20, logit_scale=0.75,
        num_experts=7, num_experts_per_tok=3, num_shared_experts=2, expert_selection_fn="sigmoid",
        prefix_dense_intermediate_size=40, mlp_layer_types=["dense"] + ["sparse"] * 4, layer_types=_kinds("FWWWF"),
    )),
    "cohere2_moe_sum": seeded(Cohere2MoeConfig(
        **SMALL | {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 36}, sliding_window=24,
        logit_scale=1.5, num_experts=5, num_experts_per_tok=2, num_shared_experts=1, rms_norm_eps=1e-6,
        shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid", norm_topk_prob=False,
        mlp_layer_types=["dense", "sparse", "sparse"], layer_types=_kinds("FWF"), attention_bias=True,
        prefix_dense_sliding_window_pattern=2, tie_word_embeddings=False,
    )),
    "cohere2_moe_softmax": seeded(Cohere2MoeConfig(
        **SMALL | {"num_hidden_layers": 4, "intermediate_size": 40}, sliding_window=24, logit_scale=1.25,
        num_experts=6, num_experts_per_tok=3, norm_topk_prob=False,
    )),
    "phimoe": seeded(PhimoeConfig(
        **NO_HEAD_DIM | {"intermediate_size": 40}, num_local_experts=7, router_jitter_noise=0.15, attention_bias=True,
        lm_head_bias=True, rope_parameters=DEFAULT_ROPE | {},
    )),
    "phimoe_longrope": seeded(PhimoeConfig(  # equal factors: transformers has the short ones for longer texts too
        **NO_HEAD_DIM | {"intermediate_size": 24, "num_key_value_heads": 2}, num_local_experts=5,
        router_jitter_noise=0.3, sliding_window=40, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.3, 2.0, 4.0], "long_factor": [1.0, 1.3, 2.0, 4.0], "short_mscale": 1.2,
            "long_mscale": 1.35,
        },
    )),
    "mimo_v2_flash": seeded(MiMoV2FlashConfig(
        **SMALL | {"num_hidden_layers": 7}, v_head_dim=16, moe_intermediate_size=28, n_routed_experts=7,
        num_experts_per_tok=3, sliding_window=20, attention_bias=True,
    )),
    "mimo_v2_flash_groups": seeded(MiMoV2FlashConfig(
        **SMALL | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 40, "num_hidden_layers": 4},
        v_head_dim=36, moe_intermediate_size=24, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3,
        sliding_window=24, attention_value_scale=None, routed_scaling_factor=1.4,
        layer_types=_kinds("WFWF"), mlp_layer_types=["sparse", "dense", "sparse", "sparse"], rope_parameters={
            "full_attention": DEFAULT_ROPE | {"rope_theta": 5e5, "partial_rotary_factor": 0.6},
            "sliding_attention": DEFAULT_ROPE | {"partial_rotary_factor": 0.4},
        },
    )),
    "apertus": seeded(ApertusConfig(**SMALL, rope_parameters=LLAMA3_ROPE)),
    "apertus_biases": seeded(ApertusConfig(
        **SMALL | {"num_key_value_heads": 2, "head_dim": 16}, attention_bias=True, rope_parameters=DEFAULT_ROPE,
    )),
    "minicpm": minicpm(scale_emb=3.0, scale_depth=1.4, dim_model_base=64.0),
    "minicpm_linear": minicpm(
        scale_emb=12, scale_depth=2.8, dim_model_base=96, num_key_value_heads=6, tie_word_embeddings=False,
        attention_bias=True, rope_parameters=LINEAR_ROPE,
    ),
    "gpt_oss": Variant(
        GptOssConfig(
            **COMMON | {"intermediate_size": 32}, head_dim=24, num_local_experts=5, num_experts_per_tok=2,
            sliding_window=24, swiglu_limit=1.5, rope_parameters=YARN_ROPE | {"truncate": False},
        ),
        torch.bfloat16,
    ),
}


def randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Fill the parameters so that each has an effect: attention is not uniform, and logits spread.

    With tied embeddings the layers get larger weights, since otherwise every token would predict itself.
    """
    config = model.config.get_text_config()
    gain = 3.0 if getattr(config, "tie_word_embeddings", False) else 1.0
    gemma = config.model_type.startswith("gemma")
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        # One matrix is `(out, in)`, several are `(experts, out, in)`; gpt-oss has `(experts, in, out)`.
        inputs = parameter.shape[1 if config.model_type == "gpt_oss" and "experts" in name else -1]
        if name.endswith("norm.weight"):
            value = 0.2 * noise if gemma else 1 + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif "sinks" in name:
            value = 1 + noise
        elif "embed_tokens" in name:
            value = 0.4 * noise * (config.hidden_size**-0.5 if gemma else 1)
        elif "lm_head" in name:
            value = 0.4 * noise
        elif "q_proj" in name or "k_proj" in name:
            value = 1.6 * noise * inputs**-0.5
        elif "qkv_proj" in name:
            value = 1.4 * noise * inputs**-0.5
        elif "router" in name or name.endswith("mlp.gate.weight"):
            value = 2 * noise * inputs**-0.5
        elif "o_proj" in name or "down_proj" in name:
            value = gain * noise * inputs**-0.5
        else:
            value = noise * inputs**-0.5
        parameter.data.copy_(value)


def spread_of(name: str, shape: list[int], config: PreTrainedConfig) -> tuple[float, float]:
    """Standard deviation and mean of a tensor of a seeded variant, by its name in the file; as in `randomise`."""
    config = config.get_text_config()
    gain = 3.0 if getattr(config, "tie_word_embeddings", False) else 1.0
    if config.model_type == "gemma":  # whose embedding is multiplied by as much
        gain *= config.hidden_size**0.5
    if "modality_router" in name:  # whose inputs are divided by the hidden size
        return shape[-1] ** 0.5, 0.0
    if "_coefs" in name:
        return 0.15, 0.0
    if config.model_type.startswith(("gemma3n", "gemma4")) and "post_" in name and name.endswith("weight"):
        return 0.2 * gain, gain  # of what layers add: the last product does not count behind a norm
    if config.model_type.startswith(("gemma3n", "gemma4")) and name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0.2, 0.6  # scores are not scaled: these say how far they spread
    if "norm" in name and name.endswith("weight"):
        less_one = config.model_type == "gemma" or (config.model_type == "muse_glimmer_text" and "layers" in name) or (
            config.model_type.startswith(("qwen3_5", "qwen3_next")) and "linear_attn" not in name
        ) or config.model_type == "step3p5"
        return 0.2, 0.0 if less_one else 1.0
    for part, size, mean in (("A_log", 1.0, 0.5), ("dt_bias", 1.5, -2.0), (".D", 0.5, 1.0)):
        if name.endswith(part):
            return size, mean
    if "scal" in name:
        return 0.2, 1.0
    if name.endswith("bias"):
        return 0.3, 0.0
    if "embed_tokens" in name or "lm_head" in name:
        return 0.4, 0.0
    for part, size, mean in (("alpha_p", 0.5, 0.3), ("alpha_n", 0.5, 0.3), ("beta", 0.0, 0.4375), ("eps", 0.0, -0.25)):
        if name.endswith(f"act_fn.{part}"):
            return size, mean
    for part, size in (("q_proj", 1.6), ("k_proj", 1.6), ("router", 2.0), ("mlp.gate.w", 2.0), ("moe.gate.w", 2.0)):
        if part in name:
            return size * shape[-1] ** -0.5, 0.0
    if any(part in name for part in ("o_proj", "down_proj", "out_proj", "c_proj")):
        return gain * shape[-1] ** -0.5, 0.0
    return shape[-1] ** -0.5, 0.0


def seeded_weights(variant: Variant, seed: int, folder: Path) -> None:
    """Write `weights.json` and the file of tensors that it describes, in place of those of `save_pretrained`."""
    from safetensors import safe_open

    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as content:
            shapes |= {name: content.get_slice(name).get_shape() for name in content.keys()}  # noqa: SIM118
        file.unlink()
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    spec: dict[str, Any] = {
        "seed": seed, "dtype": names[variant.dtype],
        "exact": sorted(name for name in shapes if any(part in name for part in variant.exact)),
        "tensors": {name: [shape, *spread_of(name, shape, variant.config)] for name, shape in sorted(shapes.items())},
    }
    tensors = seeding.tensors_of(spec)
    spec["digest"] = seeding.digest(tensors)
    seeding.write(folder / "model.safetensors", tensors)
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in spec.pop("tensors").items())
    (folder / "weights.json").write_text(f'{json.dumps(spec)[:-1]}, "tensors": {{\n{rows}\n}}}}\n')


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits (len(tokens), vocab) of one forward pass without a cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@torch.no_grad()
def add_exact(variant: Variant, folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Add the logits of the same network in float64, to tell its errors from the rounding of float32."""
    model = auto_class(variant).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    model.double()
    # transformers computes the angles of rotary embeddings by `.float()`, whatever the network's dtype.
    rounds, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    converts = torch.Tensor.to

    def to_double(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return converts(tensor, *(torch.float64 if each is torch.float32 else each for each in given), **named)

    if "linear_head_dim" in vars(variant.config):  # Kimi delta attention, whose rows are all made float32
        torch.Tensor.to = to_double  # type: ignore[method-assign]
    try:
        for length in variant.lengths:
            logits = logits_of(model, arrays[f"prompt_{length}"].tolist())
            arrays[f"exact_{length}"] = logits.numpy()[arrays[f"positions_{length}"]].astype(np.float32)
    finally:
        torch.Tensor.float, torch.Tensor.to = rounds, converts  # type: ignore[method-assign]


def judge(model: PreTrainedModel, seed: int, lengths: tuple[int, ...]) -> dict[str, np.ndarray] | None:
    """The golden arrays of this model, or None if its greedy choices are not clear enough."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    margin = float("inf")
    for length in lengths:
        prompt = rng.integers(0, model.config.get_text_config().vocab_size, size=length).tolist()
        logits = logits_of(model, prompt)
        positions = np.arange(length) if length < 100 else np.unique(np.append(np.arange(0, length, 12), length - 1))
        tokens = list(prompt)
        for _ in range(CONTINUATION):
            (best, second), (choice, _) = (part.tolist() for part in torch.topk(logits_of(model, tokens)[-1], 2))
            margin = min(margin, best - second)
            if margin < MIN_MARGIN:
                return None
            tokens.append(choice)
        continuation = tokens[length:]
        if len(set(continuation)) < MIN_DISTINCT:
            return None
        inputs = torch.tensor([prompt])
        generated = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=CONTINUATION
        )
        assert generated[0, length:].tolist() == continuation, "transformers disagrees with itself"
        arrays[f"prompt_{length}"] = np.array(prompt, np.uint32)
        arrays[f"positions_{length}"] = positions
        arrays[f"logits_{length}"] = logits.numpy()[positions]
        arrays[f"greedy_{length}"] = np.array(continuation, np.uint32)
    arrays["margin"] = np.float32(margin)
    return arrays


def auto_class(variant: Variant) -> Any:
    """The class of transformers that loads a model."""
    texts_alone = variant.config.get_text_config() is variant.config
    return transformers.AutoModelForCausalLM if texts_alone else transformers.AutoModelForImageTextToText


def make(name: str, folder: Path) -> None:
    """Find the first seed that is clear, and write its checkpoint and golden.npz to `folder`."""
    variant = VARIANTS[name]
    for seed in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        model = auto_class(variant).from_config(variant.config, attn_implementation="eager")
        randomise(model, torch.Generator().manual_seed(seed))
        model.to(variant.dtype).save_pretrained(folder, max_shard_size=variant.max_shard_size)
        if variant.seeded:
            seeded_weights(variant, seed, folder)
        stored = auto_class(variant).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        arrays = judge(stored, seed, variant.lengths)
        if arrays is not None:
            break
    else:
        raise SystemExit(f"{name}: no seed gives clear choices")
    add_exact(variant, folder, arrays)
    np.savez_compressed(folder / "golden.npz", **arrays)
    if variant.renamed is not None:
        config = json.loads((folder / "config.json").read_text()) | variant.renamed
        kept = {key: value for key, value in config.items() if key not in variant.renamed or value is not None}
        (folder / "config.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    spread = float(np.std(arrays[f"logits_{variant.lengths[-1]}"]))
    if variant.seeded:
        (folder / "model.safetensors").unlink()
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: seed {seed}, margin {arrays['margin']:.4f}, spread {spread:.2f}, {size / 1024:.0f} KiB")


def main(names: list[str]) -> None:
    here = Path(__file__).parent
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in names or VARIANTS:
        make(name, here / ("seeded" if VARIANTS[name].seeded else "") / name)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    (here / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
