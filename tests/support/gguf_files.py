"""GGUF files: written by hand, byte for byte, and converted from checkpoint folders as llama.cpp converts them."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import struct

import gguf
import numpy as np
from places import GOLDEN
from seeded_weights import SEEDED

from kvcache.engine import ModelConfig
from kvcache.networks.checkpoint import Checkpoint

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
# The architecture of each model type, and those whose rows of q and k llama.cpp orders for interleaved RoPE.
_LETTERS = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "smollm3": "smollm3",
    "granite": "granite", "ministral3": "mistral3", "olmo2": "olmo2", "olmo3": "olmo2", "gpt_oss": "gpt-oss",
    "seed_oss": "seed_oss", "exaone4": "exaone4", "olmoe": "olmoe", "ernie4_5": "ernie4_5",
    "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "gemma4": "gemma4", "gemma4_unified": "gemma4",
    "hunyuan_v1_dense": "hunyuan-dense", "glm4": "glm4", "cohere2": "cohere2", "starcoder2": "starcoder2",
    "apertus": "apertus", "minicpm": "minicpm", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2",
    "gemma": "gemma", "glm": "chatglm", "cohere": "command-r",
    "ernie4_5_moe": "ernie4_5-moe", "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe",
    "bailing_moe_v2": "bailingmoe2", "mellum": "mellum", "granite_swa": "granite_swa", "solar_open": "glm4moe",
    "qwen2_moe": "qwen2moe", "dots1": "dots1", "hunyuan_v1_moe": "hunyuan-moe", "exaone_moe": "exaone-moe",
    "llama4_text": "llama4", "afmoe": "afmoe", "cohere2_moe": "cohere2moe", "phimoe": "phimoe", "hy_v3": "hy_v3",
    "step3p7": "step35", "mimo_v2_flash": "mimo2",
}
# Networks in which other layers than the first ones have an MLP in place of experts: no entry says which.
_MIXED = {"qwen2_moe", "qwen2_moe_steps", "exaone_moe_dense", "llama4", "hy_v3_shared"}
_HALVES = ("qwen3_vl_moe", "llama4_text")  # whose stacks have gate above up
_NAMED_AS = {  # which the package lacks
    "mellum": "qwen3moe", "cohere2moe": "exaone-moe", "granite_swa": "granite", "hy_v3": "exaone-moe",
}
# Parts of an MTP layer that folders call otherwise.
_OF_MTP = {
    "model.mtp.layers.0.": "", "mtp.layers.0.": "", "mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.", "mtp.norm.": "shared_head.norm.",
}
_INTERLEAVED = ("llama", "mistral", "mixtral", "ministral3", "smollm3", "granite", "granite_swa", "minicpm")

CONVERTIBLE = sorted(path.parent.name for path in GOLDEN.glob("*/config.json")) + [
    name for name in sorted({*SEEDED} - _MIXED)
    if json.loads((GOLDEN / "seeded" / name / "config.json").read_text())["model_type"] in _LETTERS
]  # golden networks


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind, content):
    return string(content) if kind == STRING else struct.pack("<" + _CODES[kind], content)


def array(kind, contents, count=None):
    head = struct.pack("<IQ", kind, len(contents) if count is None else count)
    return head + b"".join(value(kind, content) for content in contents)


def entry(key, kind, content):
    """One entry; `content` may be the bytes of the value."""
    return string(key) + struct.pack("<I", kind) + (content if isinstance(content, bytes) else value(kind, content))


def tensor(name, sizes, kind=0, offset=0, rank=None):
    """One line of the tensor list; `sizes` begin with the row length."""
    rank = len(sizes) if rank is None else rank
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", rank, *sizes, kind, offset)


def pack(entries=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, num_tensors=None, num_entries=None, align=32):
    """The bytes of a file."""
    counts = len(tensors) if num_tensors is None else num_tensors, len(entries) if num_entries is None else num_entries
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + (bytes(-len(head) % align) + data if data else b"")


def with_rows_for_llama(rows, num_heads):
    """Rows of q or k as llama.cpp orders them for interleaved RoPE."""
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


@functools.cache
def _names(model_type):
    """The names of a network of at most 16 layers, by the gguf package, which takes 20 ms to list them."""
    networks = {letters: arch for arch, letters in gguf.MODEL_ARCH_NAMES.items()}
    letters = _LETTERS[model_type]
    return gguf.get_tensor_name_map(networks[_NAMED_AS.get(letters, letters)], 16)


def name_of(name, model_type="llama"):
    """The name in a GGUF file of a tensor of a Hugging Face checkpoint."""
    known = _names(model_type)
    name = name.replace("model.language_model.", "model.")
    for end, ours in ((".router.scale", "ffn_gate_inp.scale"), (".router.per_expert_scale", "ffn_down_exps.scale")):
        if name.endswith(end):
            return f"blk.{name.split('.')[2]}.{ours}"
    for own, theirs in (("router_bias",) * 2, ("e_score_correction_bias", "e_score_correction"), ("expert_bias",) * 2):
        name = f"{name.removesuffix(own)}{theirs}.bias" if name.endswith(own) else name
    stem, _, kind = name.rpartition(".")
    if kind in ("sinks", "attention_sink_bias"):  # which the list of some networks leaves out
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    if stem == "lm_head":  # which the list of Gemma 2 leaves out
        return f"output.{kind}"
    found = known.get_name(stem)
    if found is None:  # of an MTP layer, which the list of some networks leaves out
        _, _, layer, part = stem.split(".", 3)
        of_next = f"nextn.{part.replace('.', '_')}"
        found = f"blk.{layer}.{'layer_output_norm' if part == 'final_layernorm' else of_next}"
    return f"{found}.{kind}"


def write(path, architecture, entries, tensors, **options):
    """Write a file with the gguf package. Entries: `(kind, value)`, for arrays `(ARRAY, values, kind)`; tensors:
    float arrays, or `(raw bytes, type's name)`; options of the package's writer."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, (kind, content, *of) in entries.items():
        sub = gguf.GGUFValueType(of[0]) if of else None
        writer.add_key_value(key, content, gguf.GGUFValueType(kind), sub)
    for name, content in tensors.items():
        if isinstance(content, tuple):
            writer.add_tensor(name, content[0], raw_dtype=gguf.GGMLQuantizationType[content[1]])
        else:
            writer.add_tensor(name, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def entries_of(config, folder_config):
    """The entries of a network, as llama.cpp's converter writes them."""
    letters = _LETTERS[folder_config["model_type"]]
    folder_config = {"model_type": folder_config["model_type"]} | folder_config.get("text_config", folder_config)
    kind, rope = folder_config["model_type"], folder_config.get("rope_parameters") or {"rope_type": "default"}
    rope = rope.get("full_attention", rope)
    found = {
        "block_count": (U32, config.num_layers + config.next_layers),
        "context_length": (U32, config.max_position_embeddings),
        "embedding_length": (U32, config.hidden_size),
        "feed_forward_length": (U32, config.intermediate_size),
        "attention.head_count": (U32, config.num_heads),
        "attention.head_count_kv": (U32, config.num_kv_heads),
        f"attention.layer_norm_{'rms_' if config.norm == 'rms' or kind == 'phimoe' else ''}epsilon": (
            F32, config.rms_norm_eps
        ),
        "rope.freq_base": (F32, config.rope.theta),
        "vocab_size": (U32, config.vocab_size),
        "rope.dimension_count": (U32, config.rotary_dim),
    }
    if config.head_dim * config.num_heads != config.hidden_size or "gemma" in letters:
        found["attention.key_length"] = found["attention.value_length"] = (U32, config.head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = (STRING, rope["rope_type"])
        found["rope.scaling.factor"] = (F32, rope["factor"])
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = (U32, rope["original_max_position_embeddings"])
        found["rope.scaling.yarn_beta_fast"] = (F32, rope["beta_fast"])
        found["rope.scaling.yarn_beta_slow"] = (F32, rope["beta_slow"])
    if rope["rope_type"] == "dynamic":
        found |= {"rope.scaling.type": (STRING, "none"), "rope.scaling.factor": (F32, 1.0)}
    if kind in ("cohere", "cohere2", "cohere2_moe"):
        found["logit_scale"] = (F32, config.logit_scale)
    if kind == "minicpm":
        found["embedding_scale"] = (F32, config.embedding_scale)
        found["residual_scale"] = (F32, config.residual_scale)
        found["logit_scale"] = (F32, 1 / config.logit_scale)
    if kind == "ministral3":
        found["rope.scaling.yarn_log_multiplier"] = (F32, rope["mscale_all_dim"])
        found["attention.temperature_scale"] = (F32, rope["llama_4_scaling_beta"])
    if any(config.windows):
        found["attention.sliding_window"] = (U32, max(filter(None, config.windows)))
    if kind == "mellum":
        found["rope.freq_base_swa"] = (F32, (config.window_rope or config.rope).theta)
    if kind in ("olmo3", "exaone4", "exaone_moe", "cohere2_moe", "mellum", "granite_swa") and any(config.windows):
        found["attention.sliding_window_pattern"] = (ARRAY, [window is not None for window in config.windows], BOOL)
    if kind == "gemma3_text":
        found["attention.sliding_window_pattern"] = (U32, config.windows.index(None) + 1)
    for key, cap in (("attn_", config.attention_softcap), ("final_", config.logit_softcap)):
        if cap:
            found[f"{key}logit_softcapping"] = (F32, cap)
    if kind == "granite_swa":
        found["attention.rope_pattern"] = (ARRAY, list(config.rotated), BOOL)
    if kind in ("granite", "granite_swa"):
        found["embedding_scale"] = (F32, config.embedding_scale)
        found["residual_scale"] = (F32, config.residual_scale)
        found["attention.scale"] = (F32, config.attention_scale)
        found["logit_scale"] = (F32, 1 / config.logit_scale)
    if "vl" in letters:
        found["rope.dimension_sections"] = (ARRAY, [*rope["mrope_section"], 0], I32)
    if config.num_experts:
        found["expert_count"] = (U32, config.num_experts)
        found["expert_used_count"] = (U32, config.experts_per_token)
        if kind not in ("mixtral", "phimoe"):
            found["expert_feed_forward_length"] = (U32, config.experts.size)
        if config.experts.choice.bias:
            found |= _of_chosen(config, kind)
        if kind == "cohere2_moe":
            found["expert_gating_func"] = (U32, 2 if config.experts.choice.sigmoid else 1)
            found["expert_weights_norm"] = (BOOL, config.experts.choice.normalise)
            found["expert_shared_count"] = (U32, config.experts.shared // config.experts.size)
            found["leading_dense_block_count"] = (U32, config.mlps.count("mlp"))
        elif kind == "llama4_text":
            found["interleave_moe_layer_step"] = (U32, config.mlps.index("experts") + 1)
        elif config.experts.shared and not config.experts.choice.bias:
            found["expert_shared_feed_forward_length"] = (U32, config.experts.shared)
    if config.next_layers:
        found["nextn_predict_layers"] = (U32, config.next_layers)
    if letters == "gemma4":
        found |= _of_gemma4(config)
    if letters == "gemma3n":
        found |= _of_gemma3n(config)
    if letters == "step35":
        found |= _of_step(config)
    if letters == "mimo2":
        found |= _of_mimo(config)
    if rope["rope_type"] == "longrope":
        found["rope.scaling.attn_factor"] = (F32, config.rope.attention_factor)
        found["rope.scaling.original_context_length"] = (U32, config.rope.original_positions)
    return letters, {f"{letters}.{key}": content for key, content in found.items()}


def _of_gemma3n(config):
    """The entries of Gemma 3n that only it has, or writes in another way."""
    cutoffs = [-math.inf if size.cutoff is None else size.cutoff for size in config.sizes]
    inner = [size.intermediate_size for size in config.sizes]
    return {
        "attention.sliding_window_pattern": (ARRAY, [window is not None for window in config.windows], BOOL),
        "attention.shared_kv_layers": (U32, sum(size.kv_layer is not None for size in config.sizes)),
        "embedding_length_per_layer_input": (U32, config.layer_inputs),
        "activation_sparsity_scale": (ARRAY, cutoffs, F32),
        "altup.active_idx": (U32, config.streams.active), "altup.num_inputs": (U32, config.streams.count),
        "feed_forward_length": (ARRAY, inner, U32),
    }


def _of_gemma4(config):
    """The entries of Gemma 4 that its converter writes in another way."""
    full, slides = config.sizes[config.windows.index(None)], [window is not None for window in config.windows]
    found = {
        "attention.head_count_kv": (ARRAY, [size.num_kv_heads for size in config.sizes], U32),
        "attention.sliding_window_pattern": (ARRAY, slides, BOOL),
        "attention.shared_kv_layers": (U32, sum(size.kv_layer is not None for size in config.sizes)),
        "embedding_length_per_layer_input": (U32, config.layer_inputs),
        "rope.freq_base_swa": (F32, config.window_rope.theta),
        "rope.dimension_count_swa": (U32, config.head_dim),
    }
    inner = [size.intermediate_size for size in config.sizes]
    if len(set(inner)) > 1:
        found["feed_forward_length"] = (ARRAY, inner, U32)
    for name in ("key_length", "value_length"):
        found[f"attention.{name}"], found[f"attention.{name}_swa"] = (U32, full.head_dim), (U32, config.head_dim)
    if config.num_experts:
        found["expert_feed_forward_length"] = (U32, config.experts.size)
    return found


def _of_step(config):
    """The entries of Step 3.5, whose lists go on for MTP layers."""
    more, slides = config.next_layers, [window is not None for window in config.windows]
    like = config.next_layer.like if config.next_layer else 0
    heads = [size.num_heads for size in config.sizes]
    found = {
        "attention.head_count": (ARRAY, heads + more * [heads[like]], U32),
        "attention.head_count_kv": (ARRAY, [config.num_kv_heads] * (len(slides) + more), U32),
        "attention.sliding_window_pattern": (ARRAY, slides + more * [slides[like]], BOOL),
        "rope.freq_base_swa": (F32, (config.window_rope or config.rope).theta),
        "rope.dimension_count": (U32, config.head_dim),
    }
    for i, name in enumerate(("swiglu_clamp_shexp", "swiglu_clamp_exp")):
        found[name] = (ARRAY, [each[i] for each in config.limits] + more * [0.0], F32)
    return found


def _of_mimo(config):
    """The entries of MiMo V2: lists go on for MTP layers, and a window is written as the tokens before one."""
    more, slides = config.next_layers, [int(window is not None) for window in config.windows]
    like = config.next_layer.like if config.next_layer else 0
    pairs = [size.num_kv_heads for size in config.sizes]
    found = {
        "attention.head_count_kv": (ARRAY, pairs + more * [pairs[like]], I32),
        "attention.sliding_window": (U32, max(filter(None, config.windows)) - 1),
        "attention.sliding_window_pattern": (ARRAY, slides + more * [slides[like]], I32),
        "attention.value_length": (U32, config.sizes[0].value_dim),
        "rope.freq_base_swa": (F32, config.window_rope.theta),
    }
    return found | ({"attention.value_scale": (F32, config.value_scale)} if config.value_scale != 1 else {})


def _of_chosen(config, kind):
    """The entries of experts that are chosen with a bias."""
    experts, choice, found = config.experts, config.experts.choice, {}
    if kind != "ernie4_5_moe":
        found["expert_gating_func"] = (U32, 2 if choice.sigmoid else 1)
    if experts.shared:
        found["expert_shared_count"] = (U32, experts.shared // experts.size)
        each = experts.size if kind == "bailing_moe_v2" else experts.shared  # of one, or of all
        found["expert_shared_feed_forward_length"] = (U32, each)
        found["leading_dense_block_count"] = (U32, config.mlps.count("mlp"))
    if kind == "ernie4_5_moe":
        found["interleave_moe_layer_step"] = (U32, 1)
    if kind in ("hy_v3", "step3p5"):
        found |= {
            "expert_weights_scale": (F32, choice.factor), "expert_weights_norm": (BOOL, choice.normalise),
        }
    if kind in ("glm4_moe", "solar_open", "bailing_moe_v2", "dots1", "exaone_moe", "afmoe", "mimo_v2_flash"):
        found |= {
            "expert_weights_scale": (F32, choice.factor), "expert_weights_norm": (BOOL, choice.normalise),
            "expert_group_count": (U32, choice.groups), "expert_group_used_count": (U32, choice.kept),
        }
    return found


def llama3_divisors(config):
    """The tensor `rope_freqs.weight` of a network with the scaling llama3, as the converter computes it."""
    rope = config.rope
    divisors = []
    for frequency in rope.theta ** -(np.arange(0, config.rotary_dim, 2) / config.rotary_dim):
        turns = rope.original_positions * frequency / (2 * math.pi)
        if turns > rope.high_freq_factor:
            divisors.append(1.0)
        elif turns < rope.low_freq_factor:
            divisors.append(rope.factor)
        else:
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            divisors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(divisors + [1.0] * (config.head_dim // 2 - len(divisors)), np.float32)


def _converted(checkpoint, model_type, config):
    """The tensors of a checkpoint folder as the converter changes them, by Hugging Face names."""
    stacks, letters = {}, _LETTERS[model_type]
    for name in checkpoint._files:
        if ".act_fn." in name:
            continue
        values, behind = checkpoint.read(name), f"model.layers.{config.num_layers}."
        for own, part in _OF_MTP.items():
            name = behind + part + name.removeprefix(own) if name.startswith(own) else name
        name = name.replace(".transformer.", ".")
        name = name.replace("final_layernorm", "shared_head.norm") if model_type == "hy_v3" else name
        if model_type in _INTERLEAVED and ".q_proj." in name:
            values = with_rows_for_llama(values, config.num_heads)
        if model_type in _INTERLEAVED and ".k_proj." in name:
            values = with_rows_for_llama(values, config.num_kv_heads)
        if "vision" in name or "visual." in name or name.startswith("vit_"):
            continue
        if letters == "llama4" and ".experts." in name:  # (experts, in, out)
            values = np.ascontiguousarray(values.swapaxes(1, 2))
        if found := re.fullmatch(r"(model\.altup_\w*projections)\.(\d+)\.weight", name):
            stacks.setdefault(f"{found[1]}.weight", {})[int(found[2])] = values
            continue
        if letters == "gemma3n":
            yield name + ".weight" * name.endswith("_scale"), values
            continue
        if letters == "gemma4":
            added = name.endswith("layer_scalar") or ".experts." in name
            yield name + ".weight" * added, values
            continue
        if letters.startswith(("gemma", "step")) and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if found := re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", name):
            part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(found[3], found[3])
            stack = f"{found[1].replace('block_sparse_moe', 'mlp')}{part}.weight"
            stacks.setdefault(stack, {})[int(found[2])] = values
        elif model_type in _HALVES and name.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield f"{name.replace('gate_up', part)}.weight", np.ascontiguousarray(half)
        elif model_type in _HALVES and ".experts." in name:
            yield f"{name}.weight", values
        elif ".experts." in name:  # of gpt-oss: (experts, in, out), gate and up in turn
            weight = not name.endswith("_bias")
            values = values.swapaxes(1, 2) if weight else values
            stem = name.removesuffix("_bias")
            kind = "weight" if weight else "bias"
            if stem.endswith("gate_up_proj"):
                yield stem.replace("gate_up", "gate") + f".{kind}", np.ascontiguousarray(values[:, 0::2])
                yield stem.replace("gate_up", "up") + f".{kind}", np.ascontiguousarray(values[:, 1::2])
            else:
                yield f"{stem}.{kind}", np.ascontiguousarray(values)
        else:
            yield name, values
    for name, parts in stacks.items():
        yield name, np.stack([parts[i] for i in range(len(parts))])


def tensors_of(folder, config, kind="F32"):
    """The tensors of a checkpoint folder; matrices in type `kind` (one that the gguf package can make)."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    found, quantised = {}, gguf.GGMLQuantizationType[kind]
    for name, values in _converted(Checkpoint(folder), model_type, config):
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        fits = values.ndim > 1 and not values.shape[-1] % gguf.GGML_QUANT_SIZES[quantised][0]
        if fits and kind != "F32" and not name.endswith(".bias"):
            values = gguf.quants.quantize(values, quantised), kind
        found[name_of(name, model_type)] = values
    if config.rope.kind == "llama3":
        found["rope_freqs.weight"] = llama3_divisors(config)
    if config.rope.kind == "divided":
        found["rope_freqs.weight"] = np.minimum(config.rope.divisors, 1e30).astype(np.float32)
    if config.rope.kind == "longrope":
        found["rope_factors_short.weight"] = np.array(config.rope.divisors, np.float32)
        found["rope_factors_long.weight"] = np.array(config.rope.long_divisors, np.float32)
    return found


# What files of llama.cpp do not say: each network has the one value that its checkpoints have.
_ASSUMED = {
    "gemma2": {"query_pre_attn_scalar": 24}, "gemma3": {"query_pre_attn_scalar": 24},  # the size of a head
    "mistral_window": {"sliding_window": None}, "mixtral": {"sliding_window": None},
    "qwen2_windows": {"use_sliding_window": False, "layer_types": None, "sliding_window": None},
    "gpt_oss": {"swiglu_limit": 7.0}, "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_100": {"use_sliding_window": False, "layer_types": None, "sliding_window": None},
    "ernie4_5_moe_least": {"moe_norm_min": 1e-12},
    "olmoe_normalised": {"norm_topk_prob": False}, "cohere2_biases": {"layer_types": None},
    "starcoder2_window": {"sliding_window": None},
    "granite_swa": {"layer_rope_theta": [0, *[500_000.0] * 4]},
    "dots1_windows": {"sliding_window": None, "layer_types": None},
    "cohere2_moe_sum": {
        "shared_expert_combination_strategy": "average", "prefix_dense_sliding_window_pattern": 1,
    },
    "mimo_v2_flash_groups": {"rope_parameters": {  # one number of channels that turn
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6},
    }},
    "phimoe": {"router_jitter_noise": 0.01},
    "phimoe_longrope": {"router_jitter_noise": 0.01, "rope_parameters": {  # one factor for all texts
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.3, 2.0, 4.0], "long_factor": [1.0, 1.5, 2.5, 5.0], "short_mscale": 1.2,
        "long_mscale": 1.2,
    }},
    "afmoe_plain": {"mup_enabled": True, "layer_types": None},
    "gemma3n_streams": {"altup_correct_scale": True, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    }},
}


def as_converted(golden, folder, **changes):
    """A copy of a golden folder, changed where llama.cpp has one variant of a network alone."""
    shutil.copytree(golden, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | _ASSUMED.get(golden.name, {}) | changes))
    return folder


def convert(folder, path, kind="F32", **more):
    """Write the checkpoint of `folder` as a GGUF file; `more` entries. Returns the path."""
    config = ModelConfig.from_pretrained(folder)
    letters, entries = entries_of(config, json.loads((folder / "config.json").read_text()))
    entries |= {key.replace("__", "."): content for key, content in more.items()}
    if config.activation == "xielu":
        checkpoint = Checkpoint(folder)
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            names = [f"model.layers.{i}.mlp.act_fn.{part}" for i in range(config.num_layers)]
            numbers = [float(checkpoint.read(name).reshape(-1)[0]) for name in names]
            entries[f"xielu.{part}"] = (ARRAY, numbers, F32)
    return write(path, letters, entries, tensors_of(folder, config, kind))
