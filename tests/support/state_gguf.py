"""GGUF files of networks with a state, converted from folders as llama.cpp converts them."""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
from gguf_files import ARRAY, BOOL, F32, U32, with_rows_for_llama, write

from kvcache.engine import ModelConfig
from kvcache.networks.checkpoint import Checkpoint

LETTERS = {
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next", "nemotron_h": "nemotron_h", "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1", "kimi_linear": "kimi-linear",
}
_PARTS = {  # stems in a layer of any of these families
    "operator_norm": "attn_norm", "input_layernorm": "attn_norm", "norm": "attn_norm", "ffn_norm": "ffn_norm",
    "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm", "mamba.out_proj": "ssm_out", "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm", "mixer.out_proj": "ssm_out", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
}
_NEXT = {
    "mtp.fc.weight": "eh_proj", "mtp.pre_fc_norm_embedding.weight": "enorm", "mtp.pre_fc_norm_hidden.weight": "hnorm",
    "mtp.norm.weight": "shared_head_norm",
}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(w1|w2|w3|\w+_proj)\.weight")
_STACKS = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
_PARTS |= {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    **dict.fromkeys(("mlp.gate", "mixer.gate", "feed_forward.gate"), "ffn_gate_inp"),
}
for _short in ("gate", "up", "down"):
    _STACKS[f"{_short}_proj"] = f"ffn_{_short}"
    _PARTS[f"mlp.shared_expert.{_short}_proj"] = _PARTS[f"mixer.shared_experts.{_short}_proj"] = f"ffn_{_short}_shexp"
for _short, _long in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
    _PARTS[f"self_attn.{_short}_proj"] = _PARTS[f"mixer.{_short}_proj"] = _long
for _short in ("gate", "up", "down"):
    _PARTS[f"mlp.{_short}_proj"] = f"ffn_{_short}"
    _PARTS[f"feed_forward.{_short}_proj"] = f"ffn_{_short}"
_PARTS["pre_ff_layernorm"] = "ffn_norm"
_PARTS |= {  # of Kimi-Linear; transformers writes its MLPs as experts
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"}, "self_attn.b_proj": "ssm_beta",
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.o_norm": "ssm_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{f"block_sparse_moe.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"block_sparse_moe.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_OUTSIDE = {
    "model.final_layernorm.weight": "output_norm.weight",
    "model.embed_tokens.weight": "token_embd.weight", "backbone.embeddings.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight", "backbone.norm_f.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight", "lm_head.weight": "output.weight",
}


def name_of(name, kind):
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer, part = re.fullmatch(r"\w+\.layers\.(\d+)\.(.+)", name).groups()
    stem, _, last = part.rpartition(".")
    own = {
        "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "expert_bias": "exp_probs_b.bias",
        "e_score_correction_bias": "exp_probs_b.bias",
    }.get(last)
    if part == "post_attention_layernorm.weight":
        return f"blk.{layer}.post_attention_norm.weight" if kind.startswith("qwen") else f"blk.{layer}.ffn_norm.weight"
    return f"blk.{layer}.{own or f'{_PARTS[stem]}.{last}'}"


def tiled(values, config, first=0, axis=0):
    """Value heads, from row `first` on: head j of the file is head (j % groups) * (heads // groups) + j // groups."""
    groups, heads = config.recurrence.groups, config.recurrence.heads
    moved = np.moveaxis(values, axis, 0)
    rest = moved[first:].reshape(groups, heads // groups, -1, *moved.shape[1:])
    rest = rest.swapaxes(0, 1).reshape(moved[first:].shape)
    return np.ascontiguousarray(np.moveaxis(np.concatenate([moved[:first], rest]), 0, axis))


def by_kinds(both, sizes):
    """The matrices of queries, keys and values, and of z, of one that goes by key heads."""
    values = sizes.heads // sizes.groups * sizes.dim
    heads = both.reshape(sizes.groups, -1, both.shape[1])
    parts = np.split(heads, np.cumsum([sizes.size, sizes.size, values]), axis=1)
    *qkv, z = (part.reshape(-1, both.shape[1]) for part in parts)
    return ("attn_qkv", np.concatenate(qkv)), ("attn_gate", z)


def with_multipliers(name, values, config):
    """The values of a tensor of Falcon-H1, multiplied."""
    by, sizes = config.multipliers, config.recurrence
    groups = sizes.groups * sizes.size
    factors = {
        "q_proj": by.attention_in, "v_proj": by.attention_in, "k_proj": by.attention_in * by.key,
        "o_proj": by.attention_out, "mamba.out_proj": by.state_out, "gate_proj": by.gate, "down_proj": by.down,
        "embed_tokens": config.embedding_scale, "lm_head": config.logit_scale,
    }
    if "in_proj" in name:
        counts = (sizes.inner, sizes.inner, groups, groups, sizes.heads)
        return values * (by.state_in * np.repeat(by.parts, counts)[:, None]).astype(np.float32)
    found = [factor for part, factor in factors.items() if name.removesuffix(".weight").endswith(part)]
    return values * np.float32(found[0]) if found else values


def converted(name, values, config, kind):
    """The values of a tensor as the converter changes them."""
    sizes, last = config.recurrence, name.rpartition(".")[2]
    if kind == "falcon_h1":
        values = with_multipliers(name, values, config)
    if last == "A_log":
        values = -np.exp(values.astype(np.float64)).astype(np.float32)
    if "conv" in name and values.ndim == 3:
        values = values[None] if kind == "kimi_linear" else values[:, 0]
    if kind.startswith("qwen") and "norm" in name and "linear_attn" not in name:
        values = values + np.float32(1)
    if kind.startswith("qwen3_5") and "linear_attn" in name and "norm" not in name:
        keys = 2 * sizes.groups * sizes.size
        first = keys if "qkv" in name or "conv1d" in name else 0
        values = tiled(values, config, first, axis=1 if "out_proj" in name else 0)
    if kind in ("nemotron_h", "granitemoehybrid", "falcon_h1"):
        if ".q_proj." in name and kind != "falcon_h1":
            values = with_rows_for_llama(values, config.num_heads)
        if ".k_proj." in name and kind != "falcon_h1":
            values = with_rows_for_llama(values, config.num_kv_heads)
        if last in ("A_log", "D") and sizes:
            values = values[:, None]
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            values = values.reshape(sizes.groups, -1)
    return values


def granite(name, checkpoint, config):
    """The tensors of Granite's MLPs and experts, by their names in a file."""
    layer, part = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)|lm_head.weight", name).groups()
    end = "_shexp.weight" if config.experts else ".weight"
    if part == "block_sparse_moe.router.layer.weight":
        return {f"blk.{layer}.ffn_gate_inp.weight": checkpoint.read(name)}
    if part == "shared_mlp.output_linear.weight":
        return {f"blk.{layer}.ffn_down{end}": checkpoint.read(name)}
    if part == "block_sparse_moe.output_linear.weight":
        return {f"blk.{layer}.ffn_down_exps.weight": stacked(name, checkpoint)}
    if part and part.endswith(".input_linear.weight"):
        both = stacked(name, checkpoint) if "sparse" in part else checkpoint.read(name)
        gate, up = np.split(both, 2, axis=-2)
        end = "_exps.weight" if "sparse" in part else end
        return {f"blk.{layer}.ffn_gate{end}": gate.copy(), f"blk.{layer}.ffn_up{end}": up.copy()}
    return {}


def stacked(name, checkpoint):
    """A tensor of three axes, which `read` has as rows of the last one."""
    shape = checkpoint.info(name).shape
    return checkpoint.read(name).reshape(shape)


def entries_of(config, kind):
    sizes, layers, experts = config.recurrence, config.num_layers, config.experts
    kv_heads = [config.num_kv_heads if mixer == "attention" else 0 for mixer in config.mixers]
    found = {
        "block_count": (U32, layers), "context_length": (U32, config.max_position_embeddings),
        "embedding_length": (U32, config.hidden_size), "feed_forward_length": (U32, config.intermediate_size),
        "attention.head_count": (U32, config.num_heads), "attention.head_count_kv": (ARRAY, kv_heads, U32),
        "attention.layer_norm_rms_epsilon": (F32, config.rms_norm_eps), "rope.freq_base": (F32, config.rope.theta),
        "vocab_size": (U32, config.vocab_size), "rope.dimension_count": (U32, config.rotary_dim),
    }
    if experts is not None:
        found |= {
            "expert_count": (U32, config.num_experts), "expert_used_count": (U32, config.experts_per_token),
            "expert_feed_forward_length": (U32, experts.size),
        }
        if experts.shared and kind != "kimi_linear":
            found["expert_shared_feed_forward_length"] = (U32, experts.shared)
        if experts.choice is not None:
            found["expert_weights_scale"] = (F32, experts.choice.factor)
    if kind == "kimi_linear":
        return found | kimi(config)
    if kind == "lfm2_moe":
        found |= {"expert_gating_func": (U32, 2), "leading_dense_block_count": (U32, config.mlps.count("mlp"))}
    if kind.startswith("lfm2"):
        return found | {"shortconv.l_cache": (U32, sizes.taps)}
    found["attention.key_length"] = found["attention.value_length"] = (U32, config.head_dim)
    if sizes is not None:
        found |= {
            "ssm.conv_kernel": (U32, sizes.taps), "ssm.state_size": (U32, sizes.size),
            "ssm.group_count": (U32, sizes.groups), "ssm.time_step_rank": (U32, sizes.heads),
            "ssm.inner_size": (U32, sizes.inner),
        }
    if kind.startswith("qwen"):
        found["attention.head_count_kv"] = (U32, config.num_kv_heads)
        found["attention.recurrent_layers"] = (ARRAY, [mixer == "state" for mixer in config.mixers], BOOL)
        found["full_attention_interval"] = (U32, 4)
        if kind != "qwen3_next":
            found["rope.dimension_sections"] = (ARRAY, [2, 1, 1, 0], U32)
    if kind == "granitemoehybrid":
        found |= {
            "embedding_scale": (F32, config.embedding_scale), "residual_scale": (F32, config.residual_scale),
            "attention.scale": (F32, config.attention_scale), "logit_scale": (F32, 1 / config.logit_scale),
            "rope.scaling.finetuned": (BOOL, config.rotated[0]),
        }
        if experts is None:
            found["expert_shared_feed_forward_length"] = (U32, config.intermediate_size)
    if kind == "falcon_h1":
        found["block_count"], found["attention.head_count_kv"] = (U32, layers // 2), (U32, config.num_kv_heads)
    if kind == "nemotron_h":
        widths = [(experts.size if experts else config.intermediate_size) if mlp else 0 for mlp in config.mlps]
        if experts is not None:
            found |= {
                "expert_group_count": (U32, experts.choice.groups), "expert_shared_count": (U32, 1),
                "expert_weights_norm": (BOOL, experts.choice.eps is not None), "moe_latent_size": (U32, experts.latent),
            }
        found["feed_forward_length"] = (ARRAY, widths, U32)
        found["attention.layer_norm_epsilon"] = found.pop("attention.layer_norm_rms_epsilon")
        found["rope.scaling.finetuned"] = (BOOL, False)
    return found


def kimi(config):
    """The entries that Kimi-Linear alone has, or has in another way."""
    latent, sizes, choice = config.latent, config.recurrence, config.experts.choice
    return {
        "attention.kv_lora_rank": (U32, latent.latent), "attention.key_length": (U32, latent.key),
        "attention.key_length_mla": (U32, latent.query), "attention.value_length_mla": (U32, latent.value),
        "rope.dimension_count": (U32, latent.turned), "ssm.conv_kernel": (U32, sizes.taps),
        "kda.head_dim": (U32, sizes.size), "expert_gating_func": (U32, 2),
        "expert_shared_count": (U32, config.experts.shared // config.experts.size),
        "leading_dense_block_count": (U32, config.mlps.count("mlp")), "expert_group_count": (U32, choice.groups),
        "expert_group_used_count": (U32, choice.kept),
    }


def heads_apart(name, values, config):
    """The key matrices of all heads, transposed, and their value matrices, of latent attention."""
    block, sizes = f"blk.{re.search(r'layers.([0-9]+)', name)[1]}", config.latent
    keys, found = np.split(values.reshape(config.num_heads, -1, sizes.latent), [sizes.plain], axis=1)
    return {
        f"{block}.attn_k_b.weight": np.ascontiguousarray(keys.swapaxes(1, 2)),
        f"{block}.attn_v_b.weight": np.ascontiguousarray(found),
    }


def convert(folder, path, quantised="F32", tensors=(), whole=False, **more):
    """Write the checkpoint of `folder` as a GGUF file; `more` entries, and `tensors`. Returns the path.

    Args:
        whole: whether Qwen3-Next has one matrix of queries, keys, values and z, as in its first files.
    """
    config, kind = ModelConfig.from_pretrained(folder), json.loads((folder / "config.json").read_text())["model_type"]
    checkpoint, of, found = Checkpoint(folder), gguf.GGMLQuantizationType[quantised], {}
    stacks = {}
    for own in checkpoint.names():
        name = own.replace("mtp.layers.0.", f"model.layers.{config.num_layers}.")
        if expert := _EXPERT.fullmatch(name):
            layer = re.search(r"layers\.(\d+)\.", name)[1]
            rows = stacks.setdefault(f"blk.{layer}.{_STACKS[expert[3]]}_exps.weight", {})
            rows[int(expert[2])] = checkpoint.read(own)
            continue
        if kind == "granitemoehybrid" and (parts := granite(name, checkpoint, config)):
            found |= parts
            continue
        if name.endswith("kv_b_proj.weight"):
            found |= heads_apart(name, checkpoint.read(own), config)
            continue
        if name.endswith("in_proj_qkvz.weight") and not whole:
            block, both = f"blk.{re.search(r'layers.([0-9]+)', name)[1]}", checkpoint.read(own)
            found |= {f"{block}.{part}.weight": rows for part, rows in by_kinds(both, config.recurrence)}
            continue
        values = converted(name, checkpoint.read(own), config, kind)
        fits = values.ndim > 1 and "conv" not in name and not values.shape[-1] % gguf.GGML_QUANT_SIZES[of][0]
        if fits and quantised != "F32" and "norm" not in name:
            values = gguf.quants.quantize(values, of), quantised
        of_next = _NEXT.get(name)
        found[f"blk.{config.num_layers}.nextn.{of_next}.weight" if of_next else name_of(name, kind)] = values
    found |= {name: np.stack([rows[i] for i in range(len(rows))]) for name, rows in stacks.items()}
    letters = LETTERS[kind] + ("_moe" if kind == "nemotron_h" and config.experts else "")
    if config.recurrence is None:
        letters = "granitemoe" if config.experts else "granite"
    entries = {f"{letters}.{key}": content for key, content in entries_of(config, kind).items()}
    entries |= {f"{letters}.{key.replace('__', '.')}": content for key, content in more.items()}
    return write(path, letters, entries, found | dict(tensors))
