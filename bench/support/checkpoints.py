"""Checkpoints of Llama networks as Hugging Face and as GGUF files, written without other libraries.

Weights are random unless the caller brings its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "SIZES", "Size", "Stored", "row_order_of_llama", "stored_as", "vocabulary_of", "write_checkpoint", "write_file",
    "write_gguf",
]

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Size:
    """The size of a network; `head_dim` is 64 in all of `SIZES`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 4096
    positions: int = 4096

    def __str__(self) -> str:
        return f"hidden {self.hidden}, {self.layers} layers, {self.heads} + {self.kv_heads} heads"

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.hidden // self.heads


SIZES = {
    "small": Size(512, 8, 8, 4, 1376),
    "large": Size(768, 12, 12, 4, 2048),
    "1b": Size(2048, 16, 32, 8, 8192, 32000),
    "tiny": Size(128, 2, 2, 1, 352),
}


def tensors(size: Size) -> Iterator[tuple[str, Float32]]:
    """Every weight with its Hugging Face name, the same in each call."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Float32:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)

    kv = size.kv_heads * size.head_dim
    yield "model.embed_tokens.weight", matrix(size.vocabulary, size.hidden)
    for i in range(size.layers):
        layer = f"model.layers.{i}."
        yield f"{layer}input_layernorm.weight", np.ones(size.hidden, np.float32)
        for name, rows in (("q", size.hidden), ("k", kv), ("v", kv), ("o", size.hidden)):
            yield f"{layer}self_attn.{name}_proj.weight", matrix(rows, size.hidden)
        yield f"{layer}post_attention_layernorm.weight", np.ones(size.hidden, np.float32)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", matrix(size.intermediate, size.hidden)
        yield f"{layer}mlp.down_proj.weight", matrix(size.hidden, size.intermediate)
    yield "model.norm.weight", np.ones(size.hidden, np.float32)
    yield "lm_head.weight", matrix(size.vocabulary, size.hidden)


def config(size: Size) -> dict[str, Any]:
    """The contents of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size.hidden,
        "intermediate_size": size.intermediate, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "vocab_size": size.vocabulary,
        "max_position_embeddings": size.positions, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None,
    }


def write_checkpoint(size: Size, folder: Path) -> Path:
    """Write `config.json` and `model.safetensors` and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(size)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors(size):
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in tensors(size):
            file.write(tensor.tobytes())
    return folder


# -- GGUF: for llama.cpp and for OpenVINO GenAI ---------------------------------------------------------------

ALIGNMENT = 32
U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5
_PACKED = {I32: "<i", F32: "<f", BOOL: "<?"}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A typed metadata value: int, float, str, bool, or a list of one of them."""
    if isinstance(value, list):
        kind = {int: I32, float: F32, str: STRING, bool: BOOL}[type(value[0])]
        items = [_text(v) if kind == STRING else struct.pack(_PACKED[kind], v) for v in value]
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(items)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    return struct.pack("<II", U32, value) if isinstance(value, int) else struct.pack("<If", F32, value)


def _vocabulary(count: int) -> list[str]:
    """Three special tokens, every byte in the spelling of byte-level BPE, and made-up words."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + i) for i in range(256 - len(plain))]
    words = ["<unk>", "<s>", "</s>", *map(chr, plain), *others, "ab"]
    return [*words, *(f"w{i}" for i in range(count - len(words)))]


def vocabulary_of(count: int) -> dict[str, Any]:
    """Metadata of a vocabulary, which the readers require; requests are token ids, and nothing is tokenised."""
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.tokens": _vocabulary(count), "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (count - 3),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }


def _metadata(size: Size) -> dict[str, Any]:
    """The network and its vocabulary."""
    return {
        "general.architecture": "llama", "general.name": "random", "general.alignment": ALIGNMENT,
        "llama.vocab_size": size.vocabulary, "llama.context_length": size.positions,
        "llama.embedding_length": size.hidden, "llama.block_count": size.layers,
        "llama.feed_forward_length": size.intermediate, "llama.attention.head_count": size.heads,
        "llama.attention.head_count_kv": size.kv_heads, "llama.rope.dimension_count": size.head_dim,
        "llama.rope.freq_base": 10000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **vocabulary_of(size.vocabulary),
    }


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[stem]}.weight"


class Stored(NamedTuple):
    """A tensor of a GGUF file: its Hugging Face name, shape, type (ggml's number), and the bytes of its values."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: npt.NDArray[Any]


def stored_as(name: str, tensor: npt.NDArray[Any]) -> Stored:
    """A float32 or float16 array as it is."""
    return Stored(name, tensor.shape, int(tensor.dtype == np.float16), tensor)


def row_order_of_llama(rows: Float32, heads: int) -> Float32:
    """Rows of q or k of `heads` heads in llama.cpp's order, that of interleaved RoPE."""
    pairs = rows.reshape(heads, 2, -1, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(
    size: Size, path: Path, *, half: bool = False, stored: Callable[[], Iterator[Stored]] | None = None
) -> Path:
    """Write one file. Without `stored`, weights are random, and rows of q and k need no other order.

    Args:
        half: store random matrices as float16 instead of float32.
        stored: yields the tensors instead, the same in each call, rows of q and k in the order of llama.cpp.
    """

    def random() -> Iterator[Stored]:
        for name, tensor in tensors(size):
            yield stored_as(name, tensor.astype(np.float16) if half and tensor.ndim == 2 else tensor)

    make = stored or random
    return write_file(path, {**_metadata(size), "general.file_type": int(half)}, make, _gguf_name)


def write_file(
    path: Path, metadata: dict[str, Any], make: Callable[[], Iterator[Stored]], name_of: Callable[[str], str] = str,
    outlines: Callable[[], Iterator[Stored]] | None = None,
) -> Path:
    """Write a GGUF file of tensors that `make` yields, the same in each call.

    Args:
        name_of: gives the names in the file.
        outlines: yields the tensors without their values, which saves a call of `make`.
    """
    infos, at, count = b"", 0, 0
    for name, shape, kind, data in (outlines or make)():
        sizes = shape[::-1]
        infos += _text(name_of(name)) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, at)
        at += data.nbytes + -data.nbytes % ALIGNMENT
        count += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, count, len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _value(value))
        file.write(infos)
        _pad(file)
        for tensor in make():
            file.write(tensor.data.tobytes())
            _pad(file)
    return path


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
