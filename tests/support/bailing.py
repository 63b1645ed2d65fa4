"""Ling 2.0, which transformers has not: the network of GLM-4.5 with other names and keys."""

import json

import numpy as np
from next_layers import add_next_layer
from seeded_weights import seeded, tensors_of, write

HEAD = 8  # channels, with which all heads are as wide as the network: llama.cpp wants that of this one
_NAMES = {
    "shared_head.norm": "final_layernorm",
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}


def twins(place, next_layer=False, biases=False):
    """Write folders of two networks with the same numbers, of GLM-4.5 and of Ling 2.0; returns both.

    Args:
        next_layer: whether they have an MTP layer, of sizes as their last one.
        biases: whether queries, keys and values have biases.
    """
    golden = seeded("glm4_moe")
    config, spec = (json.loads((golden / f"{each}.json").read_text()) for each in ("config", "weights"))
    if next_layer:
        add_next_layer("glm4_moe", config, spec)
    config["num_nextn_predict_layers"] = int(next_layer)
    before = config["head_dim"]
    config |= {"head_dim": HEAD, "attention_bias": biases, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    for name, (shape, *_) in list(spec["tensors"].items()):
        if name.endswith("_proj.bias") and not biases:
            del spec["tensors"][name]
        elif "self_attn" in name:
            axis = 1 if "o_proj" in name else 0
            shape[axis] = shape[axis] // before * HEAD
        elif name.endswith((".mlp.gate.weight", "e_score_correction_bias")):
            shape[0] = 8
        elif ".experts.0." in name:
            spec["tensors"][name.replace(".experts.0.", ".experts.7.")] = spec["tensors"][name]
    tensors, folders = tensors_of(spec), [place / "glm", place / "ling"]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "config.json").write_text(json.dumps(config))
    write(folders[0] / "model.safetensors", tensors)
    (folders[1] / "config.json").write_text(json.dumps(_as_ling(config)))
    write(folders[1] / "model.safetensors", _renamed(tensors))
    return folders


def _as_ling(config):
    rope = config.pop("rope_parameters")
    config["num_experts"], config["num_shared_experts"] = config.pop("n_routed_experts"), config.pop("n_shared_experts")
    return config | {
        "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2", "score_function": "sigmoid",
        "use_qkv_bias": config["attention_bias"], "use_bias": False,
        "rope_theta": rope["rope_theta"], "rope_scaling": None,
        "partial_rotary_factor": rope["partial_rotary_factor"], "moe_router_enable_expert_bias": True,
    }


def _renamed(tensors):
    found = {}
    for name, content in tensors.items():
        if name.endswith(("shared_head.head.weight", "embed_tokens.weight")) and ".layers." in name:
            continue
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        found[name] = content
    for layer in sorted({name.split(".")[2] for name in found if name.endswith("self_attn.q_proj.weight")}):
        for kind in ("weight", "bias") if f"model.layers.{layer}.self_attn.q_proj.bias" in found else ("weight",):
            parts = [found.pop(f"model.layers.{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            dtype, rows = parts[0][0], np.concatenate([bits for _, bits, _ in parts])
            found[f"model.layers.{layer}.attention.query_key_value.{kind}"] = dtype, rows, None
    return found
