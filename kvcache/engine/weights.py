"""The weights of a network, read from a checkpoint directory into the matrices of the forward pass.

The names, shapes and dtypes of all tensors are checked before anything is allocated. Then tensors are read and
converted one by one, straight into their place in the fused matrices, in the memory order that products read fastest.
All weights are private, read-only memory: a later change of a file does not reach them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.core.arguments import short
from kvcache.engine.config import ModelConfig
from kvcache.engine.files import MAX_JSON_BYTES, read_json
from kvcache.engine.linear import empty_matrices
from kvcache.engine.safetensors import SafetensorsFile
from kvcache.errors import CheckpointError, OutOfMemoryError

__all__ = ["Checkpoint", "LayerWeights", "Tensors", "Weights", "require"]

Float32 = NDArray[np.float32]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FEW = 4  # maximum number of names in a message
_MAX_NAME = 255  # characters of a file name; no file system takes more
_MAX_SHARDS = 512  # all shards are open while a checkpoint is read; a process may have 1024 files open


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer: matrices `(out, in)`, float32, in any memory order. Absent biases and norms are None.

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
    qkv: Float32
    qkv_bias: Float32 | None
    qk_norm: Float32 | None
    output: Float32
    output_bias: Float32 | None
    mlp_norm: Float32
    gate_up: Float32
    gate_up_bias: Float32 | None
    down: Float32
    down_bias: Float32 | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights: `embedding` and `head` `(vocab, hidden)` (one array if tied), layers, last norm."""

    embedding: Float32
    layers: tuple[LayerWeights, ...]
    norm: Float32
    head: Float32

    @classmethod
    def from_pretrained(cls, directory: str | Path, config: ModelConfig) -> Weights:
        """Load the weights of the network that `config` describes.

        Raises:
            FileNotFoundError: no safetensors files, or a shard is missing.
            CheckpointError: a file is damaged; a tensor is missing, unexpected, of the wrong shape or dtype.
            OutOfMemoryError: the weights need more bytes than the machine has or than can be allocated.
        """
        return cls.read(Checkpoint(directory), config)

    @classmethod
    def read(cls, checkpoint: Tensors, config: ModelConfig) -> Weights:
        """Load the weights of the network that `config` describes from an open checkpoint; raises as above."""
        checkpoint.require(_expected(config), optional=_is_redundant)
        # A sparse file costs nothing on disk; reading it could exhaust the memory of all processes.
        size = 4 * sum(math.prod(shape) for _, shape in _expected(config))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory:
            raise OutOfMemoryError(size, memory, "bytes")
        try:
            return cls._read(checkpoint, config)
        except MemoryError:
            raise OutOfMemoryError(size, 0, "bytes") from None

    @classmethod
    def _read(cls, checkpoint: Tensors, config: ModelConfig) -> Weights:
        shapes = _matrix_shapes(config)
        if config.tie_word_embeddings:  # row-major, since the lookup of a token reads a row
            matrices = empty_matrices(shapes * config.num_layers)
            embedding = head = checkpoint.stack(["model.embed_tokens.weight"])
        else:
            *matrices, head = empty_matrices([*shapes * config.num_layers, (config.vocab_size, config.hidden_size)])
            embedding = checkpoint.read("model.embed_tokens.weight")
            checkpoint.fill(head, ["lm_head.weight"])
        weights = cls(
            embedding=embedding,
            layers=tuple(
                _layer(checkpoint, f"model.layers.{i}.", config, *matrices[len(shapes) * i : len(shapes) * (i + 1)])
                for i in range(config.num_layers)
            ),
            norm=checkpoint.read("model.norm.weight"),
            head=head,
        )
        for array in weights.arrays():
            array.flags.writeable = False
        return weights

    def arrays(self) -> Iterator[Float32]:
        """Every array; one that two names share comes twice."""
        yield from (self.embedding, self.norm, self.head)
        for layer in self.layers:
            yield from (array for field in fields(layer) if (array := getattr(layer, field.name)) is not None)


class Tensors(Protocol):
    """The tensors of an open checkpoint by their Hugging Face names; `Checkpoint` documents the methods."""

    def require(
        self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = ...
    ) -> None: ...

    def read(self, name: str) -> Float32: ...

    def stack(self, names: list[str]) -> Float32: ...

    def fill(self, out: Float32, names: list[str]) -> None: ...


class Checkpoint:
    """The tensors of a directory: `model.safetensors`, or shards with `model.safetensors.index.json`."""

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        self.directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        if (directory / _SINGLE).exists():
            file = SafetensorsFile(directory / _SINGLE)
            self._files = dict.fromkeys(file, file)
        elif (directory / _INDEX).exists():
            self._files = _sharded(directory)
        else:
            others = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.pt") for path in directory.glob(pattern))
            found = f"; {', '.join(others[:3])} cannot be read" if others else ""
            raise FileNotFoundError(f"expected {_SINGLE} or {_INDEX} in {directory}, found neither{found}")

    def require(
        self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Raise CheckpointError unless the checkpoint has exactly these tensors, with these shapes and a known dtype.

        Args:
            expected: names and shapes. The check stops after a few missing ones: a hostile configuration may ask
                for billions.
            optional: whether a tensor of this name may be present too. Any other tensor is an error: it is a weight
                that the network would ignore, such as a bias that the configuration does not mention.
        """
        found = {name: file[name] for name, file in self._files.items()}
        require(found, self.directory, ("F32", "F16", "BF16"), expected, optional)

    def read(self, name: str) -> Float32:
        """The tensor as a new float32 array."""
        return self._files[name].read(name)

    def stack(self, names: list[str]) -> Float32:
        """Several tensors, stacked by rows, as one new float32 array."""
        shapes = [self._files[name][name].shape for name in names]
        out = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), np.float32)
        self.fill(out, names)
        return out

    def fill(self, out: Float32, names: list[str]) -> None:
        """Read several tensors, stacked by rows, into `out`, float32 of their total shape in any memory order."""
        row = 0
        for name in names:
            stop = row + self._files[name][name].shape[0]
            self._files[name].read_into(name, out[row:stop])
            row = stop


def require(
    found: Mapping[str, Any],
    path: Path,
    dtypes: tuple[str, ...],
    expected: Iterable[tuple[str, tuple[int, ...]]],
    optional: Callable[[str], bool],
) -> None:
    """What `Checkpoint.require` does, for the tensors `found` (names to their `shape` and `dtype`) in `path`."""
    left = set(found)
    missing: list[str] = []
    for name, shape in expected:
        if name not in left:
            missing.append(name)
            if len(missing) > _FEW:
                break
            continue
        left.remove(name)
        info = found[name]
        if info.shape != shape:
            raise CheckpointError(f"{path}: {name}: expected shape {shape}, got {info.shape}")
        if info.dtype not in dtypes:
            listed = f"{', '.join(dtypes[:-1])} or {dtypes[-1]}"
            raise CheckpointError(f"{path}: {name}: expected {listed}, got {info.dtype}")
    if missing:
        raise CheckpointError(f"{path}: expected {_some(missing)}, got none")
    unexpected = sorted(name for name in left if not optional(name))
    if unexpected:
        raise CheckpointError(f"{path}: expected no others, got {_some(unexpected)}")


def _sharded(directory: Path) -> dict[str, SafetensorsFile]:
    """The shard of each tensor. The index is not trusted: a file name must not leave the directory."""
    index = directory / _INDEX
    names = read_json(index, MAX_JSON_BYTES).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: weight_map: expected an object from tensors to files, got {short(names)}")
    shards: dict[str, SafetensorsFile] = {}
    for name, shard in names.items():
        if (
            not isinstance(shard, str)
            or shard in ("", ".", "..")
            or len(shard) > _MAX_NAME
            or {"/", "\\", "\0"} & set(shard)
        ):
            raise CheckpointError(f"{index}: {name:.100}: expected the name of a file beside it, got {short(shard)}")
        if shard not in shards:
            if len(shards) == _MAX_SHARDS:
                raise CheckpointError(f"{index}: expected at most {_MAX_SHARDS} shards, got more")
            try:
                shards[shard] = SafetensorsFile(directory / shard)
            except FileNotFoundError:
                raise FileNotFoundError(f"{index}: expected the shard {shard} beside it, found none") from None
        if name not in shards[shard]:
            raise CheckpointError(f"{directory / shard}: expected the tensor {name:.100}, got none")
    for shard, file in shards.items():
        for name in file:
            if names.get(name) != shard:
                place = directory / shard
                raise CheckpointError(f"{place}: expected tensors that the index lists for it, got {name:.100}")
    return {name: shards[shard] for name, shard in names.items()}


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


def _matrix_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """The shapes of one layer's matrices: `qkv`, `output`, `gate_up`, `down`."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [(queries + 2 * pairs, hidden), (hidden, queries), (2 * intermediate, hidden), (hidden, intermediate)]


def _layer(
    checkpoint: Tensors,
    prefix: str,
    config: ModelConfig,
    qkv: Float32,
    output: Float32,
    gate_up: Float32,
    down: Float32,
) -> LayerWeights:
    """Read the layer whose tensor names begin with `prefix`, its matrices into the given arrays."""

    def read(name: str) -> Float32:
        return checkpoint.read(prefix + name)

    def stack(*names: str) -> Float32:
        return checkpoint.stack([prefix + name for name in names])

    def fill(out: Float32, *names: str) -> Float32:
        checkpoint.fill(out, [prefix + name for name in names])
        return out

    qkv_names = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
    gate_up_names = ("mlp.gate_proj.", "mlp.up_proj.")
    qk_norm = None
    if config.qk_norm:
        query, key = read("self_attn.q_norm.weight"), read("self_attn.k_norm.weight")
        qk_norm = np.stack([query] * config.num_heads + [key] * config.num_kv_heads)
    return LayerWeights(
        input_norm=read("input_layernorm.weight"),
        qkv=fill(qkv, *[name + "weight" for name in qkv_names]),
        qkv_bias=stack(*[name + "bias" for name in qkv_names]) if config.qkv_bias else None,
        qk_norm=qk_norm,
        output=fill(output, "self_attn.o_proj.weight"),
        output_bias=read("self_attn.o_proj.bias") if config.output_bias else None,
        mlp_norm=read("post_attention_layernorm.weight"),
        gate_up=fill(gate_up, *[name + "weight" for name in gate_up_names]),
        gate_up_bias=stack(*[name + "bias" for name in gate_up_names]) if config.mlp_bias else None,
        down=fill(down, "mlp.down_proj.weight"),
        down_bias=read("mlp.down_proj.bias") if config.mlp_bias else None,
    )


def _some(names: list[str]) -> str:
    """The first few names, for a message."""
    listed = ", ".join(f"{name:.100}" for name in names[:_FEW])
    return f"the tensors {listed}{' and more' if len(names) > _FEW else ''}"
