"""GGUF files of networks with latent attention, converted from folders as llama.cpp converts them."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
from gguf_files import BOOL, F32, STRING, U32, write

from kvcache.engine import ModelConfig
from kvcache.networks.checkpoint import Checkpoint

_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp", "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj",
    **{part: f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_KINDS = {
    "Mistral4ForCausalLM": "mistral4", "DeepseekV32ForCausalLM": "deepseek32", "GlmMoeDsaForCausalLM": "glm-dsa",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def as_converted(folder, target):
    """The folder of a network that a file can hold: neighbours turn, and one temperature is that of all."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    texts = config.get("text_config", config)
    texts["rope_interleave"] = True
    if "mscale" in texts["rope_parameters"]:
        texts["rope_parameters"]["mscale"] = texts["rope_parameters"]["mscale_all_dim"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def convert(folder, path, **more):
    """Write the checkpoint of `folder` as a GGUF file; `more` entries, None to leave out. Returns the path."""
    config, checkpoint, found, stacks = ModelConfig.from_pretrained(folder), Checkpoint(folder), {}, {}
    sizes = config.latent
    texts = "language_model."
    for name in checkpoint.names():
        if "vision" in name or "projector" in name:
            continue
        values, name = checkpoint.read(name), name.removeprefix(texts)
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = values
            continue
        layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
        if expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", part):
            stacks.setdefault(f"blk.{layer}.ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = values
        elif part == "mlp.experts.gate_up_proj":
            found[f"blk.{layer}.ffn_gate_exps.weight"], found[f"blk.{layer}.ffn_up_exps.weight"] = (
                np.ascontiguousarray(half) for half in np.split(values, 2, axis=1)
            )
        elif part == "mlp.experts.down_proj":
            found[f"blk.{layer}.ffn_down_exps.weight"] = values
        elif part == "self_attn.kv_b_proj.weight":
            heads = values.reshape(config.num_heads, sizes.plain + sizes.value, sizes.latent)
            found[f"blk.{layer}.attn_k_b.weight"] = heads[:, : sizes.plain].transpose(0, 2, 1).copy()
            found[f"blk.{layer}.attn_v_b.weight"] = heads[:, sizes.plain :].copy()
        elif part.endswith("e_score_correction_bias"):
            found[f"blk.{layer}.exp_probs_b.bias"] = values
        else:
            stem, _, kind = part.rpartition(".")
            found[f"blk.{layer}.{_PARTS[stem]}.{kind}"] = values
    found |= {name: np.stack([rows[i] for i in range(len(rows))]) for name, rows in stacks.items()}
    entries = entries_of(config, json.loads((folder / "config.json").read_text()))
    entries |= {key.replace("__", "."): each for key, each in more.items()}
    kind = _KINDS.get(config.architecture, "deepseek2")
    entries = {f"{kind}.{key}": each for key, each in entries.items() if each is not None}
    tokenizer = {"tokenizer.ggml.model": (STRING, "none")}
    return write(path, kind, entries | tokenizer, found)


def entries_of(config, given):
    """The entries of a network, as llama.cpp's converter writes them."""
    sizes, experts, rope = config.latent, config.experts, given.get("text_config", given)["rope_parameters"]
    found = {
        "block_count": (U32, config.num_layers + config.next_layers),
        "context_length": (U32, config.max_position_embeddings),
        "embedding_length": (U32, config.hidden_size), "feed_forward_length": (U32, config.intermediate_size),
        "attention.head_count": (U32, config.num_heads), "attention.head_count_kv": (U32, 1),
        "attention.layer_norm_rms_epsilon": (F32, config.rms_norm_eps), "rope.freq_base": (F32, config.rope.theta),
        "vocab_size": (U32, config.vocab_size), "rope.dimension_count": (U32, sizes.turned),
        "attention.q_lora_rank": (U32, sizes.queries), "attention.kv_lora_rank": (U32, sizes.latent),
        "attention.key_length": (U32, sizes.key), "attention.value_length": (U32, sizes.latent),
        "attention.key_length_mla": (U32, sizes.query), "attention.value_length_mla": (U32, sizes.value),
        "leading_dense_block_count": (U32, config.mlps.count("mlp")), "expert_shared_count": (U32, 0),
        "expert_feed_forward_length": (U32, config.intermediate_size),
    }
    if experts is not None:
        choice = experts.choice
        found |= {
            "expert_feed_forward_length": (U32, experts.size), "expert_count": (U32, config.num_experts),
            "expert_used_count": (U32, config.experts_per_token),
            "expert_shared_count": (U32, experts.shared // experts.size),
            "expert_gating_func": (U32, 2 if choice.sigmoid else 1), "expert_weights_scale": (F32, choice.factor),
            "expert_weights_norm": (BOOL, choice.normalise), "expert_group_count": (U32, choice.groups),
            "expert_group_used_count": (U32, choice.kept),
        }
    if config.index is not None:
        found |= {
            "attention.indexer.head_count": (U32, config.index.heads),
            "attention.indexer.top_k": (U32, config.index.most),
            "attention.indexer.key_length": (U32, config.index.dim),
        }
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": (STRING, "yarn"), "rope.scaling.factor": (F32, rope["factor"]),
            "rope.scaling.original_context_length": (U32, rope["original_max_position_embeddings"]),
            "rope.scaling.yarn_beta_fast": (F32, rope["beta_fast"]),
            "rope.scaling.yarn_beta_slow": (F32, rope["beta_slow"]),
            "rope.scaling.yarn_log_multiplier": (F32, 0.1 * rope["mscale_all_dim"]),
        }
    if config.next_layers:
        found["nextn_predict_layers"] = (U32, config.next_layers)
    if "llama_4_scaling_beta" in rope:
        found["attention.temperature_scale"] = (F32, rope["llama_4_scaling_beta"])
        found["attention.temperature_length"] = (U32, rope["original_max_position_embeddings"])
    return found
