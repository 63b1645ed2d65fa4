"""GGUF files: written by hand, byte for byte, and converted from checkpoint folders as llama.cpp converts them."""

from __future__ import annotations

import json
import math
import struct

import gguf
import numpy as np

from kvcache.engine import ModelConfig
from kvcache.networks.weights import Checkpoint

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
_LETTERS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TENSORS = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


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


def name_of(name):
    """The name in a GGUF file of a tensor of a Hugging Face checkpoint."""
    parts = name.split(".")
    layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    return f"{layer}{_TENSORS[parts[-2]]}.{parts[-1]}"


def write(path, architecture, entries, tensors):
    """Write a file with the gguf package. Entries: `(kind, value)`, for arrays `(ARRAY, values, kind)`; tensors:
    float arrays, or `(raw bytes, type's name)`."""
    writer = gguf.GGUFWriter(path, architecture)
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
    rope = folder_config["rope_parameters"]
    found = {
        "block_count": (U32, config.num_layers),
        "context_length": (U32, config.max_position_embeddings),
        "embedding_length": (U32, config.hidden_size),
        "feed_forward_length": (U32, config.intermediate_size),
        "attention.head_count": (U32, config.num_heads),
        "attention.head_count_kv": (U32, config.num_kv_heads),
        "attention.layer_norm_rms_epsilon": (F32, config.rms_norm_eps),
        "rope.freq_base": (F32, config.rope.theta),
        "vocab_size": (U32, config.vocab_size),
        "rope.dimension_count": (U32, config.head_dim),
    }
    if config.head_dim * config.num_heads != config.hidden_size:
        found["attention.key_length"] = found["attention.value_length"] = (U32, config.head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = (STRING, rope["rope_type"])
        found["rope.scaling.factor"] = (F32, rope["factor"])
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = (U32, rope["original_max_position_embeddings"])
        found["rope.scaling.yarn_beta_fast"] = (F32, rope["beta_fast"])
        found["rope.scaling.yarn_beta_slow"] = (F32, rope["beta_slow"])
    return letters, {f"{letters}.{key}": content for key, content in found.items()}


def llama3_divisors(config):
    """The tensor `rope_freqs.weight` of a network with the scaling llama3, as the converter computes it."""
    rope = config.rope
    divisors = []
    for frequency in rope.theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim):
        turns = rope.original_positions * frequency / (2 * math.pi)
        if turns > rope.high_freq_factor:
            divisors.append(1.0)
        elif turns < rope.low_freq_factor:
            divisors.append(rope.factor)
        else:
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            divisors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(divisors, np.float32)


def tensors_of(folder, config, kind="F32"):
    """The tensors of a checkpoint folder; matrices in type `kind` (one that the gguf package can make)."""
    checkpoint, found = Checkpoint(folder), {}
    for name in checkpoint._files:
        values = checkpoint.read(name)
        if config.architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
            if ".q_proj." in name:
                values = with_rows_for_llama(values, config.num_heads)
            if ".k_proj." in name:
                values = with_rows_for_llama(values, config.num_kv_heads)
        fits = values.ndim == 2 and not values.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        if fits and kind != "F32":
            values = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]), kind
        found[name_of(name)] = values
    if config.rope.kind == "llama3":
        found["rope_freqs.weight"] = llama3_divisors(config)
    return found


def convert(folder, path, kind="F32", **more):
    """Write the checkpoint of `folder` as a GGUF file; `more` entries. Returns the path."""
    config = ModelConfig.from_pretrained(folder)
    letters, entries = entries_of(config, json.loads((folder / "config.json").read_text()))
    entries |= {key.replace("__", "."): content for key, content in more.items()}
    return write(path, letters, entries, tensors_of(folder, config, kind))
