"""The architectures of GGUF files that can be read, and what each fixes beside its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["ARCHITECTURES", "NEXT_LAYERS", "Architecture"]


class Architecture(NamedTuple):
    """An architecture as `general.architecture` names it. What its family says is not said again.

    Attributes:
        model_type: of the Hugging Face library.
        permuted: whether rows of q and k are in the order of interleaved RoPE.
        windows: whether the entry of a window is honoured.
        understood: entries of `NEUTRAL` that may have other values, beside those of the family's keys.
        fixed: keys of `config.json` that files leave out.
        others: the model type if an entry is there and not 0.
        softmax: the model type if the experts of the last of `others` are chosen by a softmax; "": it is the same.
        states: the row of the sizes of its layers with a state, or "".
        names: the entries of keys where they are others.
        tensors: keys that are true if layers have a tensor.
        parts: what files call tensors where it is another name, by the stems of `names`.
        only: the value that an entry has if it is there, and one alone can be read.
        half_turned: whether RoPE turns the first half of a head alone in layers without a window.
        listed: whether tensors alone say which layers have experts.
        post_attention_norm: whether the norm before the MLP has the name of one after attention.
    """

    model_type: str
    permuted: bool = False
    windows: bool = False
    understood: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = {}
    others: Mapping[str, str] = {}
    softmax: str = ""
    states: str = ""
    names: Mapping[str, str] = {}
    tensors: Mapping[str, str] = {}
    parts: Mapping[str, str] = {}
    only: Mapping[str, Any] = {}
    half_turned: bool = False
    listed: bool = False
    post_attention_norm: bool = False


NEXT_LAYERS = "nextn_predict_layers"  # MTP layers, behind the last one
_LOGARITHM = "rope.scaling.yarn_log_multiplier"
_GROWTH = "attention.temperature_scale"
_LAYER_NORM = "attention.layer_norm_epsilon"
_NORMALISED = {"norm_topk_prob": True}
_CONVOLUTION = {
    "mixer.in_proj": "shortconv.in_proj", "mixer.conv1d": "shortconv.conv", "mixer.out_proj": "shortconv.out_proj",
    "model.norm": "token_embd_norm",
}
_GRANITE = Architecture(
    "granitemoehybrid", True, fixed={"num_local_experts": 0, "position_embedding_type": "rope"}  # unless files say more
)
_NEMOTRON = Architecture(
    "nemotron_h", True, states="mamba", fixed={"position_embedding_type": "nope"},
    names={"layer_norm_epsilon": _LAYER_NORM},
    tensors={"use_bias": "ssm_in.bias", "mlp_bias": "ffn_up.bias", "use_conv_bias": "ssm_conv1d.bias"},
)
_INDEXED = Architecture(
    "deepseek_v32", understood=(NEXT_LAYERS, _LOGARITHM, "expert_shared_count", "expert_group_count"), names={
        "index_n_heads": "attention.indexer.head_count", "index_head_dim": "attention.indexer.key_length",
        "index_topk": "attention.indexer.top_k",
    },
)
ARCHITECTURES = {
    "llama": Architecture("llama", True, others={"expert_count": "mixtral"}),  # Mistral, Mixtral and SmolLM2 too
    "llama4": Architecture(  # files have neither the size of chunks nor which layers have them: these are llama.cpp's
        "llama4_text", True, True, fixed={"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
        only={"attention.sliding_window": 8192, "attention.sliding_window_pattern": 4}, names={
            "intermediate_size_mlp": "feed_forward_length", "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
    ),
    "mistral3": Architecture("ministral3", True, True, (_GROWTH, _LOGARITHM)),  # some files of Mistral Small too
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", fixed=_NORMALISED),
    "qwen2moe": Architecture("qwen2_moe", tensors={"qkv_bias": "attn_q.bias"}),
    # The text networks of Qwen2.5-VL and Qwen3-VL, which turn all channels of a text by one position.
    "qwen2vl": Architecture("qwen2"),
    "qwen3vl": Architecture("qwen3"),
    "qwen3vlmoe": Architecture("qwen3_moe", fixed=_NORMALISED),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", windows=True, fixed={"sliding_window": 4096}),
    "gemma3": Architecture("gemma3_text", windows=True, fixed={"rope_local_base_freq": 10000.0}),
    "gemma-embedding": Architecture(
        "gemma3_text", windows=True, fixed={"rope_local_base_freq": 10000.0, "use_bidirectional_attention": True},
    ),
    "gemma3n": Architecture(
        "gemma3n_text", windows=True, fixed={"rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0},
        names={
            "altup_num_inputs": "altup.num_inputs", "altup_active_idx": "altup.active_idx",
            "num_kv_shared_layers": "attention.shared_kv_layers",
        },
    ),
    "gemma4": Architecture("gemma4_text", windows=True, understood=("attention.shared_kv_layers",)),
    "phi3": Architecture("phi3", windows=True, understood=("rope.scaling.attn_factor",)),
    "phimoe": Architecture(
        "phimoe", windows=True, understood=("rope.scaling.attn_factor",), fixed={"lm_head_bias": True},
    ),
    "smollm3": Architecture("smollm3", True),
    # Granite 4 without experts has the size of the MLP for all rows.
    "granite": Architecture("granite", True, names={"intermediate_size": "expert_shared_feed_forward_length"}),
    "granite_swa": Architecture("granite_swa", True, True),
    "olmo2": Architecture("olmo2", windows=True, others={"attention.sliding_window": "olmo3"}),
    "gpt-oss": Architecture("gpt_oss", windows=True, fixed={"rope_scaling": {"truncate": False}},
                            post_attention_norm=True),
    "seed_oss": Architecture("seed_oss", fixed={"attention_bias": False}, post_attention_norm=True),
    "exaone4": Architecture("exaone4", windows=True),
    "exaone-moe": Architecture("exaone_moe", windows=True, understood=(NEXT_LAYERS,)),
    "olmoe": Architecture("olmoe", fixed={"norm_topk_prob": False}),
    "ernie4_5": Architecture("ernie4_5", True),
    "lfm2": Architecture(
        "lfm2", fixed={"block_auto_adjust_ff_dim": False}, states="conv", tensors={"conv_bias": "shortconv.conv.bias"},
        parts=_CONVOLUTION,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", fixed=_NORMALISED, states="conv", tensors={"conv_bias": "shortconv.conv.bias"}, parts=_CONVOLUTION
    ),
    "qwen35": Architecture("qwen3_5_text", post_attention_norm=True, states="delta"),
    "qwen35moe": Architecture("qwen3_5_moe_text", post_attention_norm=True, states="delta"),
    "qwen3next": Architecture("qwen3_next", post_attention_norm=True, states="delta"),
    "granitehybrid": _GRANITE._replace(
        states="granite", tensors={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"}
    ),
    "granitemoe": _GRANITE,
    "falcon-h1": Architecture(  # with its multipliers in the weights; llama.cpp has one order of gate and norm
        "falcon_h1", states="falcon", fixed={"mamba_norm_before_gate": False},
        tensors={
            "mamba_rms_norm": "ssm_norm.weight", "mamba_conv_bias": "ssm_conv1d.bias", "mlp_bias": "ffn_up.bias",
            "mamba_proj_bias": "ssm_in.bias",
        },
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON._replace(
        understood=(NEXT_LAYERS,), names={**_NEMOTRON.names, "n_shared_experts": "expert_shared_count"}
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "hunyuan-moe": Architecture("hunyuan_v1_moe"),
    "hy_v3": Architecture("hy_v3", fixed={"first_k_dense_replace": 1}),
    "glm4": Architecture("glm4", True, fixed={"attention_bias": False}),
    "chatglm": Architecture("glm", True, fixed={"attention_bias": False}),
    "command-r": Architecture(
        "cohere", True, names={"layer_norm_eps": _LAYER_NORM}, tensors={"use_qk_norm": "attn_q_norm.weight"}
    ),
    "cohere2": Architecture("cohere2", True, True, names={"layer_norm_eps": _LAYER_NORM}),
    "cohere2moe": Architecture(
        "cohere2_moe", True, True, understood=(NEXT_LAYERS,), names={
            "layer_norm_eps": _LAYER_NORM, "rms_norm_eps": "attention.layer_norm_rms_epsilon",
            "prefix_dense_intermediate_size": "feed_forward_length",
        },
    ),
    "starcoder2": Architecture("starcoder2", fixed={"use_bias": False}, names={"norm_epsilon": _LAYER_NORM}),
    "apertus": Architecture("apertus"),
    "minicpm": Architecture("minicpm", True, names={"scale_depth": "residual_scale", "dim_model_base": "logit_scale"}),
    "deepseek2": Architecture(  # DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Youtu-LLM
        "youtu", others={"expert_count": "deepseek_v3"}, softmax="deepseek_v2",
        understood=(NEXT_LAYERS, _LOGARITHM, "expert_shared_count", "expert_group_count", "expert_gating_func"),
    ),
    "kimi-linear": Architecture("kimi_linear", fixed=_NORMALISED, states="kimi", parts={
        "mixer.out_proj": "attn_output", "mixer.in_proj_z": "ssm_g_a", "mixer.gate_proj": "ssm_g_b",
        "mixer.in_proj_a": "ssm_f_a", "mixer.decay_proj": "ssm_f_b",
        **{f"mixer.in_proj_{part}": f"attn_{part}" for part in "qkv"},
        **{f"mixer.conv1d_{part}": f"ssm_conv1d_{part}" for part in "qkv"},
    }),
    "deepseek32": _INDEXED,
    "glm-dsa": _INDEXED._replace(model_type="glm_moe_dsa"),
    "mistral4": Architecture("mistral4", understood=(_LOGARITHM, _GROWTH)),
    "glm4moe": Architecture(
        "glm4_moe", tensors={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        post_attention_norm=True,
    ),
    "dots1": Architecture("dots1"),
    "afmoe": Architecture("afmoe", windows=True, fixed={"mup_enabled": True}),
    "minimax-m2": Architecture("minimax_m2"),
    "mimo2": Architecture(  # the window is written as the tokens before one
        "mimo_v2_flash", windows=True, fixed=_NORMALISED, listed=True, parts={"head_norm": "layer_output_norm"},
        names={"sliding_window_size": "attention.sliding_window", "v_head_dim": "attention.value_length"},
    ),
    "step35": Architecture("step3p5", windows=True, half_turned=True),
    "mellum": Architecture("mellum", windows=True, fixed=_NORMALISED),
    "bailingmoe2": Architecture(
        "bailing_moe_v2", parts={"head_norm": "layer_output_norm"},
        tensors={"moe_router_enable_expert_bias": "exp_probs_b.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    "ernie4_5-moe": Architecture("ernie4_5_moe", True, names={"moe_layer_interval": "interleave_moe_layer_step"}),
}
