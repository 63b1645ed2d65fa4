"""The weights of a network, read from a checkpoint into the matrices of the forward pass.

The names, shapes and dtypes of all tensors are checked before anything is allocated. Then tensors are read piece by
piece, straight into their place in the fused matrices. All weights are private memory: a later change of a file does
not reach them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.core.arguments import short
from kvcache.core.matrix import Matrix
from kvcache.errors import CheckpointError, OutOfMemoryError
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.config import ModelConfig
from kvcache.networks.linear import MatrixStack, empty_matrices, stacked
from kvcache.networks.tensors import Tensors

__all__ = ["FORMATS", "LayerWeights", "Progress", "Weight", "Weights"]

Float32 = NDArray[np.float32]
Weight = Matrix | MatrixStack
Progress = Callable[[int, int], None]

# What `weights=` accepts: the formats of all matrices but embedding and head, and of these.
# The head of "q4" has 8 bits: its error goes straight into the logits, and it is a small part of most networks.
FORMATS = {
    "auto": ("", ""),
    "f32": ("f32", "f32"),
    "f16": ("f16", "f16"),
    "bf16": ("bf16", "bf16"),
    "q8": ("q8_0", "q8_0"),
    "q4": ("q4_1", "q8_0"),
}
_BAND_BYTES = 1 << 20  # of float32 values, read and converted at a time: fits the second-level cache

_QKV = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
_MATRICES = (_QKV, ("self_attn.o_proj.",), ("mlp.gate_proj.", "mlp.up_proj."), ("mlp.down_proj.",))
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer: matrices `(out, in)`, vectors in float32. Absent biases and norms are None.

    Attributes:
        input_norm: `(hidden,)`, before attention.
        qkv: `((num_heads + 2 * num_kv_heads) * head_dim, hidden)`: queries, keys, values, stacked.
        qkv_bias: one value per row of `qkv`.
        qk_norm: `(num_heads + num_kv_heads, head_dim)`, one row for each head of queries, then of keys.
        output: `(hidden, num_heads * head_dim)`.
        mlp_norm: `(hidden,)`, before the MLP.
        gate_up: `(2 * intermediate, hidden)`: gate above up.
        down: `(hidden, intermediate)`.
    """

    input_norm: Float32
    qkv: Weight
    qkv_bias: Float32 | None
    qk_norm: Float32 | None
    output: Weight
    output_bias: Float32 | None
    mlp_norm: Float32
    gate_up: Weight
    gate_up_bias: Float32 | None
    down: Weight
    down_bias: Float32 | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights: `embedding` and `head` `(vocab, hidden)` (one matrix if tied), layers, last norm."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    norm: Float32
    head: Weight

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, config: ModelConfig, weights: str = "auto", progress: Progress | None = None
    ) -> Weights:
        """Load the weights of the network that `config` describes from a checkpoint directory; see `read`."""
        return cls.read(Checkpoint(directory), config, weights, progress)

    @classmethod
    def read(
        cls, checkpoint: Tensors, config: ModelConfig, weights: str = "auto", progress: Progress | None = None
    ) -> Weights:
        """Load the weights of the network that `config` describes from an open checkpoint.

        Args:
            checkpoint: where the tensors are.
            config: the network.
            weights: the format of the matrices, one of `FORMATS`. "auto" keeps them as they are stored, without loss
                (types of GGUF that no matrix has become q8_0 or q4_1). "q8" and "q4" quantise.
            progress: called with the bytes of the matrices that are loaded, and those of all.

        Raises:
            FileNotFoundError: no safetensors files, or a shard is missing.
            CheckpointError: a file is damaged; a tensor is missing, unexpected, of the wrong shape or dtype, or has
                numbers that the format cannot hold.
            OutOfMemoryError: the weights need more bytes than the machine has or than can be allocated.
            ValueError: unknown `weights`.
        """
        if weights not in FORMATS:
            raise ValueError(f"weights: expected one of {', '.join(FORMATS)}, got {short(weights)}")
        checkpoint.require(_expected(config), optional=_is_redundant)
        return _Loader(checkpoint, config, weights, progress or (lambda *_: None)).load()

    def arrays(self) -> Iterator[Float32 | Weight]:
        """Every vector and matrix; one that two names share comes twice."""
        yield from (self.embedding, self.norm, self.head)
        for layer in self.layers:
            yield from (array for field in fields(layer) if (array := getattr(layer, field.name)) is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; those that two names share count once."""
        return sum({id(array): array.nbytes for array in self.arrays()}.values())


class _Loader:
    """One load: plans all matrices, allocates them together, and fills one after another."""

    def __init__(self, checkpoint: Tensors, config: ModelConfig, weights: str, progress: Progress) -> None:
        self._checkpoint, self._config, self._progress = checkpoint, config, progress
        self._shapes = dict(_expected(config))
        layers, head = FORMATS[weights]
        self._plans = [
            self._parts([f"model.layers.{i}.{name}weight" for name in names], layers)
            for i in range(config.num_layers)
            for names in _MATRICES
        ]
        self._plans.append(self._parts([_EMBEDDING], head))
        if not config.tie_word_embeddings:
            self._plans.append(self._parts([_HEAD], head))

    def _parts(self, names: list[str], format: str) -> list[tuple[list[str], tuple[int, int, str]]]:
        """The names above each other that one matrix can hold, with its rows, columns and format ("": as stored)."""
        parts = []
        for kind, same in groupby(names, key=lambda name: format or self._checkpoint.format(name)):
            inside = list(same)
            rows = sum(self._shapes[name][0] for name in inside)
            parts.append((inside, (rows, self._shapes[inside[0]][1], kind)))
        return parts

    def load(self) -> Weights:
        shapes = [shape for plan in self._plans for _, shape in plan]
        size = sum(Matrix.num_bytes(*shape) for shape in shapes)
        # A sparse file costs nothing on disk; reading it could exhaust the memory of all processes.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory:
            raise OutOfMemoryError(size, memory, "bytes")
        try:
            matrices = self._fill(iter(empty_matrices(shapes)), size)
            layers, each = self._config.num_layers, len(_MATRICES)
            weights = Weights(
                embedding=matrices[layers * each],
                layers=tuple(
                    self._layer(f"model.layers.{i}.", *matrices[each * i : each * (i + 1)]) for i in range(layers)
                ),
                norm=self._vector("model.norm.weight"),
                head=matrices[-1],
            )
        except MemoryError:
            raise OutOfMemoryError(size, 0, "bytes") from None
        for array in weights.arrays():
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        return weights

    def _fill(self, empty: Iterator[Matrix], size: int) -> list[Weight]:
        done, filled = 0, []
        for plan in self._plans:
            parts = []
            for names, _ in plan:
                matrix, row = next(empty), 0
                for name in names:
                    self._put(name, matrix, row)
                    row += self._shapes[name][0]
                done += matrix.nbytes
                self._progress(done, size)
                parts.append(matrix)
            filled.append(stacked(parts))
        self._progress(size, size)
        return filled

    def _put(self, name: str, matrix: Matrix, row: int) -> None:
        rows, columns = self._shapes[name]
        band = max(1, _BAND_BYTES // (4 * columns))
        for first in range(0, rows, band):
            stored = self._checkpoint.rows(name, first, min(first + band, rows))
            try:
                stored.put_into(matrix, row + first)
            except ValueError as error:  # not finite, or too large
                raise CheckpointError(f"{name}: {error}") from None

    def _vector(self, *names: str) -> Float32:
        return np.concatenate([self._checkpoint.read(name) for name in names])

    def _layer(self, prefix: str, qkv: Weight, output: Weight, gate_up: Weight, down: Weight) -> LayerWeights:
        config = self._config

        def vector(*names: str) -> Float32:
            return self._vector(*[prefix + name for name in names])

        qk_norm = None
        if config.qk_norm:
            query, key = vector("self_attn.q_norm.weight"), vector("self_attn.k_norm.weight")
            qk_norm = np.stack([query] * config.num_heads + [key] * config.num_kv_heads)
        return LayerWeights(
            input_norm=vector("input_layernorm.weight"),
            qkv=qkv,
            qkv_bias=vector(*[name + "bias" for name in _QKV]) if config.qkv_bias else None,
            qk_norm=qk_norm,
            output=output,
            output_bias=vector("self_attn.o_proj.bias") if config.output_bias else None,
            mlp_norm=vector("post_attention_layernorm.weight"),
            gate_up=gate_up,
            gate_up_bias=vector("mlp.gate_proj.bias", "mlp.up_proj.bias") if config.mlp_bias else None,
            down=down,
            down_bias=vector("mlp.down_proj.bias") if config.mlp_bias else None,
        )


def _expected(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the network with its shape."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", queries, hidden, config.qkv_bias),
            ("self_attn.k_proj", pairs, hidden, config.qkv_bias),
            ("self_attn.v_proj", pairs, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, queries, config.output_bias),
            ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
            ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
        ):
            yield f"{layer}{name}.weight", (rows, columns)
            if bias:
                yield f"{layer}{name}.bias", (rows,)
        if config.qk_norm:
            yield layer + "self_attn.q_norm.weight", (config.head_dim,)
            yield layer + "self_attn.k_norm.weight", (config.head_dim,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _is_redundant(name: str) -> bool:
    """Whether a tensor is redundant, as in older files: RoPE frequencies, a second copy of tied weights."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
