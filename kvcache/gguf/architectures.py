"""The architectures of GGUF files that can be read, and what each fixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["ARCHITECTURES", "CAPS", "NEXT_LAYERS", "SCALES", "Architecture"]


class Architecture(NamedTuple):
    """An architecture as `general.architecture` names it.

    Attributes:
        model_type: of the Hugging Face library.
        permuted: whether rows of q and k are in the order of interleaved RoPE.
        windows: whether the entry of a window is honoured.
        layers_differ: whether layers may have sizes of their own, which entries with `_swa` and arrays say.
        understood: entries of `NEUTRAL` that may have other values.
        fixed: keys of `config.json` that files do not say.
        post_attention_norm: whether the norm before the MLP has the name of one after attention.
        states: the kind of its layers with a state, or "".
        names: the entries of keys of `KEYS` where they are others.
    """

    model_type: str
    permuted: bool
    windows: bool = False
    understood: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = {}
    post_attention_norm: bool = False
    states: str = ""
    names: Mapping[str, str] = {}
    layers_differ: bool = False


NEXT_LAYERS = "nextn_predict_layers"  # MTP layers, behind the last one
_EXPERTS = ("expert_count", "expert_shared_count", "expert_group_count", "expert_gating_func")
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SCALES = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
ARCHITECTURES = {
    "llama": Architecture("llama", True, understood=("expert_count",)),  # Mistral, Mixtral and SmolLM2 too
    "mistral3": Architecture(
        "ministral3", True, True, ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
    ),  # some files of Mistral Small too
    "qwen2": Architecture("qwen2", False),
    "qwen3": Architecture("qwen3", False),
    "qwen3moe": Architecture("qwen3_moe", False, understood=("expert_count",), fixed={"norm_topk_prob": True}),
    # The text networks of Qwen2.5-VL and Qwen3-VL, which turn all channels of a text by one position.
    "qwen2vl": Architecture("qwen2", False),
    "qwen3vl": Architecture("qwen3", False),
    "qwen3vlmoe": Architecture("qwen3_moe", False, understood=("expert_count",), fixed={"norm_topk_prob": True}),
    "gemma2": Architecture("gemma2", False, True, CAPS),
    "gemma3": Architecture("gemma3_text", False, True, ("final_logit_softcapping",)),
    "gemma4": Architecture(
        "gemma4_text", False, True, ("final_logit_softcapping", "expert_count", "attention.shared_kv_layers"),
        layers_differ=True,
    ),
    "phi3": Architecture("phi3", False, True, ("rope.scaling.attn_factor",)),
    "smollm3": Architecture("smollm3", True),
    "granite": Architecture("granite", True, understood=SCALES),
    "granite_swa": Architecture("granite_swa", True, True, understood=SCALES),
    "olmo2": Architecture("olmo2", False, True),  # OLMo 3 too
    "gpt-oss": Architecture("gpt_oss", False, True, ("expert_count",), post_attention_norm=True),
    "seed_oss": Architecture("seed_oss", False, fixed={"attention_bias": False}, post_attention_norm=True),
    "exaone4": Architecture("exaone4", False, True),
    "olmoe": Architecture("olmoe", False, understood=("expert_count",), fixed={"norm_topk_prob": False}),
    "ernie4_5": Architecture("ernie4_5", True),
}

_NEMOTRON = {"position_embedding_type": "nope"}
_GRANITE = {"num_local_experts": 0, "position_embedding_type": "rope"}  # unless files say more
ARCHITECTURES |= {
    "lfm2": Architecture("lfm2", False, fixed={"block_auto_adjust_ff_dim": False}, states="conv"),
    "qwen35": Architecture(
        "qwen3_5_text", False, understood=(NEXT_LAYERS,), post_attention_norm=True, states="delta"
    ),
    "lfm2moe": Architecture("lfm2_moe", False, understood=_EXPERTS, fixed={"norm_topk_prob": True}, states="conv"),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", False, understood=(NEXT_LAYERS, *_EXPERTS), post_attention_norm=True, states="delta"
    ),
    "qwen3next": Architecture(
        "qwen3_next", False, understood=(NEXT_LAYERS, *_EXPERTS), post_attention_norm=True, states="delta"
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid", True, understood=(*SCALES, *_EXPERTS), fixed=_GRANITE, states="mamba"
    ),
    "granitemoe": Architecture("granitemoehybrid", True, understood=(*SCALES, *_EXPERTS), fixed=_GRANITE),
    "nemotron_h_moe": Architecture(
        "nemotron_h", True, understood=(NEXT_LAYERS, *_EXPERTS), states="mamba", fixed=_NEMOTRON,
        names={
            "rms_norm_eps": "attention.layer_norm_epsilon", "num_local_experts": "", "n_routed_experts": "expert_count",
        },
    ),
    "nemotron_h": Architecture(
        "nemotron_h", True, states="mamba", fixed=_NEMOTRON, names={"rms_norm_eps": "attention.layer_norm_epsilon"}
    ),
}

_LAYER_NORM = "attention.layer_norm_epsilon"
ARCHITECTURES |= {
    "hunyuan-dense": Architecture("hunyuan_v1_dense", False),
    "glm4": Architecture("glm4", True, fixed={"attention_bias": False}),
    "cohere2": Architecture(
        "cohere2", True, True, ("logit_scale",),
        names={"rms_norm_eps": _LAYER_NORM, "layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
    ),
    "starcoder2": Architecture(
        "starcoder2", False, fixed={"use_bias": False},
        names={"rms_norm_eps": _LAYER_NORM, "norm_epsilon": _LAYER_NORM},
    ),
    "apertus": Architecture("apertus", False),
    "minicpm": Architecture("minicpm", True, understood=("embedding_scale", "residual_scale", "logit_scale")),
}

ARCHITECTURES |= {
    "deepseek2": Architecture(  # DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Youtu-LLM
        "deepseek_v3", False, understood=(NEXT_LAYERS, *_EXPERTS, "rope.scaling.yarn_log_multiplier"),
        names={"num_local_experts": "", "n_routed_experts": "expert_count", "head_dim": ""},
    ),
    "mistral4": Architecture(
        "mistral4", False,
        understood=(*_EXPERTS, "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"),
        names={"num_local_experts": "", "n_routed_experts": "expert_count", "head_dim": ""},
    ),
}

ARCHITECTURES |= {
    "glm4moe": Architecture(
        "glm4_moe", False, understood=(NEXT_LAYERS, *_EXPERTS), post_attention_norm=True,
        names={"num_local_experts": "", "n_routed_experts": "expert_count"},
    ),
    "minimax-m2": Architecture("minimax_m2", False, understood=_EXPERTS),
    "mellum": Architecture("mellum", False, True, ("expert_count",), fixed={"norm_topk_prob": True}),
    "bailingmoe2": Architecture(
        "bailing_moe_v2", False, understood=(NEXT_LAYERS, *_EXPERTS),
        names={"num_local_experts": "", "num_experts": "expert_count"},
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", True, understood=_EXPERTS,
        names={
            "num_local_experts": "", "moe_num_experts": "expert_count", "num_experts_per_tok": "",
            "moe_k": "expert_used_count", "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count", "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
}
