"""A network in a GGUF file: its configuration and its tensors, by the names of a Hugging Face checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.gguf.blocks import CODED, LOADABLE, codes, row_bytes, values
from kvcache.gguf.config import KEYS, architecture_of, config_of
from kvcache.gguf.file import GgufFile
from kvcache.gguf.vocabulary import end_tokens
from kvcache.networks.config import ModelConfig
from kvcache.networks.rope import Rope
from kvcache.networks.tensors import StoredRows, require

__all__ = ["GgufCheckpoint", "is_gguf"]

Float32 = NDArray[np.float32]

_MAX_DIVISOR = 1e9  # of RoPE frequencies
_ROPE = "rope_freqs.weight"
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The format of `Matrix` for each type. No matrix has the groups of Q5_1, Q5_K, Q6_K: they are quantised again.
_FORMATS = {
    "F32": "f32", "F16": "f16", "BF16": "bf16",
    "Q8_0": "q8_0", "Q5_0": "q8_0", "Q5_1": "q8_0", "Q5_K": "q8_0", "Q6_K": "q8_0",
    "Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_1",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def is_gguf(path: str | Path) -> bool:
    """Whether a checkpoint's path names a GGUF file: it ends in .gguf, in any case, and is no directory."""
    return Path(path).suffix.lower() == ".gguf" and not os.path.isdir(path)


class GgufCheckpoint:
    """The tensors of a GGUF file, under the names and in the row order of a Hugging Face checkpoint.

    In files of the architecture `llama`, rows of q and k are ordered for interleaved RoPE: row `2 i + j` of a head is
    row `i + j * head_dim / 2` of the original. They are put back as they are read.

    Raises FileNotFoundError, or CheckpointError that names the file and the fault.
    """

    def __init__(self, path: str | Path) -> None:
        self.file = GgufFile(path)
        self._permuted = architecture_of(self.file).permuted

    @cached_property
    def config(self) -> ModelConfig:
        """The network's configuration. Raises CheckpointError naming the entry and its value."""
        path, prefix = self.file.path, f"{self.file.metadata['general.architecture']}."
        ends = end_tokens(self.file)
        try:
            config = ModelConfig.from_dict(config_of(self.file) | {"eos_token_id": ends})
        except CheckpointError as error:
            key, _, rest = str(error).partition(": ")
            key = prefix + KEYS[key] if key in KEYS else key
            raise CheckpointError(f"{path}: {key}: {rest}") from None

        def has_bias(name: str) -> bool:
            return f"blk.0.{name}.bias" in self.file

        return replace(
            config,
            qkv_bias=config.qkv_bias or has_bias("attn_q"),
            output_bias=has_bias("attn_output"),
            mlp_bias=has_bias("ffn_down"),
            rope=self._rope(config),
        )

    def _rope(self, config: ModelConfig) -> Rope:
        """The rotary embedding: that of the metadata, and the divisors of `rope_freqs.weight` where it is there."""
        if _ROPE not in self.file:
            return config.rope
        path, info = self.file.path, self.file[_ROPE]
        if info.shape != (config.head_dim // 2,) or info.dtype != "F32":
            raise CheckpointError(
                f"{path}: {_ROPE}: expected F32 ({config.head_dim // 2},), got {info.dtype} {info.shape}"
            )
        if config.rope.kind != "default":
            raise CheckpointError(f"{path}: {_ROPE}: expected no other scaling beside it, got {config.rope.kind}")
        divisors = np.empty(info.shape, "<f4")
        self.file.read([divisors], info.start, _ROPE)
        if not ((divisors > 0) & (divisors <= _MAX_DIVISOR)).all():
            worst = divisors[~((divisors > 0) & (divisors <= _MAX_DIVISOR))][0]
            raise CheckpointError(f"{path}: {_ROPE}: expected positive numbers up to {_MAX_DIVISOR:g}, got {worst}")
        return Rope("divided", config.rope.theta, divisors=tuple(divisors.tolist()))

    def require(
        self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = lambda _: False
    ) -> None:
        """See `Tensors.require`; messages have the file's names of tensors."""
        for name, info in self.file.items():
            if len(info.shape) == 1 and info.dtype in LOADABLE and info.dtype not in ("F32", "F16", "BF16"):
                raise CheckpointError(
                    f"{self.file.path}: {name:.100}: expected F32, F16 or BF16 for a vector, got {info.dtype}"
                )
        named = ((_name(name), shape) for name, shape in expected)
        require(self.file, self.file.path, LOADABLE, named, lambda name: name == _ROPE or optional(name))

    def read(self, name: str) -> Float32:
        """See `Tensors.read`."""
        info = self.file[_name(name)]
        return values(info.dtype, self._rows(name, 0, info.shape[0]), _columns(info.shape)).reshape(info.shape)

    def format(self, name: str) -> str:
        """See `Tensors.format`."""
        return _FORMATS[self.file[_name(name)].dtype]

    def rows(self, name: str, first: int, stop: int) -> StoredRows:
        """See `Tensors.rows`. The scales and minima of Q4_K are float32; a matrix rounds them to f16."""
        info = self.file[_name(name)]
        raw = self._rows(name, first, stop)
        if info.dtype in ("F16", "BF16"):
            return StoredRows(self.format(name), raw.view(np.uint16))
        if info.dtype not in CODED:
            return StoredRows("f32", values(info.dtype, raw, info.shape[1]))
        return StoredRows(self.format(name), *codes(info.dtype, raw, info.shape[1]))

    def _rows(self, name: str, first: int, stop: int) -> NDArray[np.uint8]:
        """The stored bytes of rows in the original order: `(stop - first, bytes of a row)`."""
        translated = _name(name)
        info = self.file[translated]
        size = row_bytes(info.dtype, _columns(info.shape))
        head = self._head(translated)
        begin, end = first // head * head, -(-stop // head) * head  # whole heads
        stored = np.empty((end - begin, size), np.uint8)
        self.file.read([stored], info.start + begin * size, translated)
        if head == 1:
            return stored
        pairs = stored.reshape(-1, head // 2, 2, size)
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(stored.shape)[first - begin : stop - begin])

    def _head(self, name: str) -> int:
        """Rows of a tensor that are permuted among each other: those of a head, or 1."""
        rotated = re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name)
        return self.config.head_dim if self._permuted and rotated else 1


def _columns(shape: tuple[int, ...]) -> int:
    """Values per row; the values of a vector are rows."""
    return shape[1] if len(shape) == 2 else 1


def _name(name: str) -> str:
    """The name in a file of a tensor with this Hugging Face name."""
    inside = _LAYER.fullmatch(name)
    layer, part = (f"blk.{inside[1]}.", inside[2]) if inside else ("", name)
    stem, _, kind = part.rpartition(".")
    return f"{layer}{_NAMES[stem]}.{kind}"
