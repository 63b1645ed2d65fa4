"""The weights of a network, read from a checkpoint into the matrices of the forward pass.

The names, shapes and dtypes of all tensors are checked before anything is allocated. Then tensors are read piece by
piece, straight into their place in the fused matrices. All weights are private memory: a later change of a file does
not reach them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError, OutOfMemoryError
from kvcache.kernels.functions import log_add_exp
from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix
from kvcache.networks.config import ModelConfig
from kvcache.networks.folder import FolderTensors
from kvcache.networks.latent import IndexWeights, LatentWeights
from kvcache.networks.linear import MatrixStack, empty_matrices, stacked
from kvcache.networks.names import (
    BESIDE,
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    INPUT_NORM,
    INPUT_PROJECTION,
    INPUT_TABLE,
    JOINT,
    NEXT_NORMS,
    NORM,
    NORMS,
    STORED,
    STREAM_MATRICES,
    has_beside,
    matrices_of,
    stream_ends,
    tensors_of,
)
from kvcache.networks.quantised import open_folder
from kvcache.networks.recurrence import RecurrentWeights
from kvcache.networks.residual_streams import StreamEnds, StreamWeights
from kvcache.networks.tensors import Tensors
from kvcache.support.arguments import short, spelled
from kvcache.support.huge_pages import huge_bytes
from kvcache.support.machine_memory import machine_memory

__all__ = ["FORMATS", "LayerWeights", "MlpWeights", "Progress", "Weight", "Weights", "checked_weights"]

Float32 = NDArray[np.float32]
Weight = Matrix | MatrixStack
Progress = Callable[[int, int], None]

# What `weights=` accepts: the formats of all matrices but embedding and head, and of these.
# The head of "q4" has 8 bits: its error goes straight into the logits, and it is a small part of most networks.
FORMATS = {
    "auto": ("", ""), "f32": ("f32", "f32"), "f16": ("f16", "f16"), "bf16": ("bf16", "bf16"), "q8": ("q8_0", "q8_0"),
    "q4": ("q4_1", "q8_0"),
}
# What the first matrix of a layer begins with.
_FIRST = (
    "self_attn.q_proj", "self_attn.q_a_proj", "mixer.in_proj", "mixer.in_proj_qkv", "mixer.in_proj_q",
)
_INV_FREQ = "rotary_emb.inv_freq"  # the frequencies of RoPE: in older files, and redundant
_BAND_BYTES = 1 << 20  # of float32 values, read and converted at a time: fits the second-level cache


def checked_weights(weights: str) -> str:
    """The name of a format of matrices. ValueError: there is no such format."""
    if weights not in FORMATS:
        also = spelled(weights, FORMATS)
        raise ValueError(f"weights: expected one of {', '.join(FORMATS)}, got {short(weights)}{also}")
    return weights


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """The weights of an MLP, or of one expert: matrices `(out, in)`, vectors in float32. Absent biases are None.

    Attributes:
        gate_up: `(2 * intermediate, hidden)`: gate above up; or up alone.
        down: `(hidden, intermediate)`.
        curve: `(4,)`, the numbers of xIELU as `kvcache.kernels.layers.xielu` takes them; None in other networks.
        cutoff: `(1,)`, from where on gates count, as `sparse_gates.thin` takes it; None: all do.
        limit: `(1,)`, see `ModelConfig.limits`; None: there is none.
    """

    gate_up: Weight
    gate_up_bias: Float32 | None
    down: Weight
    down_bias: Float32 | None
    curve: Float32 | None = None
    cutoff: Float32 | None = None
    limit: Float32 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BesideWeights:
    """The weights of an MLP beside the experts of a layer, and of what tells the two apart.

    Attributes:
        mlp: the MLP.
        mlp_norm: `(hidden,)`, of what the MLP adds.
        experts_norm, experts_down_norm: `(hidden,)`, before the experts, and of what they add.
        router_norm: `(hidden,)`, before the router.
        factors: `(experts,)`, multiply the weights of the experts of a row.
    """

    mlp: MlpWeights
    mlp_norm: Float32
    experts_norm: Float32
    experts_down_norm: Float32
    router_norm: Float32
    factors: Float32


@dataclass(frozen=True, slots=True, eq=False)
class InputWeights:
    """The weights by which a layer adds its inputs: matrices `(inputs, hidden)` and `(hidden, inputs)`, a norm."""

    gate: Weight
    projection: Weight
    norm: Float32


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """The weights that give all layers their inputs of a token.

    Attributes:
        table: `(vocab, layers * inputs)`.
        projection: `(layers * inputs, hidden)`, of the embedding.
        norm: `(inputs,)`, of what this gives.
    """

    table: Weight
    projection: Weight
    norm: Float32


@dataclass(frozen=True, slots=True, eq=False)
class NextWeights:
    """The weights that an MTP layer has beside its own.

    Attributes:
        joint: `(hidden, 2 * hidden)`, of the embedding of a token, normed, and the hidden row before it, normed.
        token_norm, hidden_norm: of the two, as `LayerWeights` has norms.
        norm: of what the layer gives, before the head.
    """

    joint: Weight
    token_norm: Float32
    hidden_norm: Float32
    norm: Float32


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer: matrices `(out, in)`, vectors in float32. Absent biases and norms are None.

    Attributes:
        input_norm, output_norm: `(hidden,)`, before attention, and of what it adds; of a LayerNorm `(2, hidden)`:
            weight and bias.
        qkv: `((num_heads + 2 * num_kv_heads) * head_dim, hidden)`: queries, keys, values, stacked, as far as the layer
            has them (`LayerSizes`); in a layer with a state what its recurrence takes; None where nothing mixes tokens.
        qkv_bias: one value per row of `qkv`.
        qk_norm: `(num_heads + num_kv_heads, head_dim)`, one row for each head of queries, then of keys.
        sinks: `(num_heads,)`, see `LayerAttention`.
        latent: of a layer with latent attention; its `qkv` has the rows of the queries, or of their latent, then of the
            latent and of turned channels.
        recurrence: of a layer with a state.
        output: `(hidden, num_heads * head_dim)`, or of what the recurrence gives.
        mlp_norm, down_norm: likewise, before the MLP, and of what it adds.
        router, router_bias: `(experts, hidden)` and `(experts,)`; None without experts.
        expert_bias: `(experts,)`, of the choice of experts.
        latent_in, latent_out: `(latent, hidden)` and `(hidden, latent)`, around the experts.
        shared, shared_gate: the MLP beside the experts, and `(1, hidden)`, the gate of what it gives.
        mlps: the MLP, or those of the experts.
        beside: the MLP beside the experts.
        inputs: see there.
        scale: `(1,)`, multiplies the residual stream at the end of the layer.
        next: of an MTP layer.
        streams: of a layer that reads and writes several residual streams.
    """

    input_norm: Float32 | None
    qkv: Weight | None
    qkv_bias: Float32 | None
    qk_norm: Float32 | None
    sinks: Float32 | None
    latent: LatentWeights | None
    recurrence: RecurrentWeights | None
    output: Weight | None
    output_bias: Float32 | None
    output_norm: Float32 | None
    mlp_norm: Float32 | None
    router: Weight | None
    router_bias: Float32 | None
    expert_bias: Float32 | None
    latent_in: Weight | None
    latent_out: Weight | None
    shared: MlpWeights | None
    shared_gate: Weight | None
    mlps: tuple[MlpWeights, ...]
    down_norm: Float32 | None
    beside: BesideWeights | None
    inputs: InputWeights | None
    scale: Float32 | None
    next: NextWeights | None = None
    streams: StreamWeights | None = None

    def arrays(self) -> Iterator[Float32 | Weight | None]:
        """Every vector and matrix, None for an absent one."""
        return _arrays_in(self)


def _arrays_in(weights: Any) -> Iterator[Float32 | Weight | None]:
    """The arrays of a dataclass of weights, and of those in it."""
    for field in fields(weights):
        value = getattr(weights, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if is_dataclass(each):
                yield from _arrays_in(each)
            else:
                yield each


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights: `embedding` and `head` `(vocab, hidden)` (one matrix if tied), layers, last norm, `TokenInputs`.

    `head_bias` is `(vocab,)`, None in most networks; `ends` is None where the residual stream is one.

    A head that is stored beside an embedding of other values is not tied to it, whatever the configuration says.
    """

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    norm: Float32
    head: Weight
    inputs: TokenInputs | None
    head_bias: Float32 | None
    ends: StreamEnds | None = None

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, config: ModelConfig, weights: str = "auto", progress: Progress | None = None
    ) -> Weights:
        """Load the weights of the network that `config` describes from a checkpoint directory; see `read`."""
        return cls.read(FolderTensors(open_folder(directory), config), config, weights, progress)

    @staticmethod
    def with_draft_layer(directory: str | Path, config: ModelConfig) -> ModelConfig:
        """The configuration with the MTP layer, if the directory has one."""
        longer = config.with_draft_layer()
        name = f"model.layers.{longer.num_layers - 1}.{JOINT}"
        return longer if name in FolderTensors(open_folder(directory), longer) else config

    @classmethod
    def read(
        cls, checkpoint: Tensors, config: ModelConfig, weights: str = "auto", progress: Progress | None = None
    ) -> Weights:
        """Load the weights of the network that `config` describes from an open checkpoint.

        Args:
            checkpoint: where the tensors are.
            config: the network.
            weights: the format of the matrices, one of `FORMATS`. "auto" keeps them as they are stored, without loss
                (`kvcache/guides/checkpoints.md` says what types of GGUF and of quantised folders become). "q8" and "q4"
                quantise those of more bits; what the file has in codes of as many bits or fewer stays as it is stored,
                such as experts in MXFP4.
            progress: called with the bytes of the matrices that are loaded, and those of all.

        Raises:
            FileNotFoundError: no safetensors files, or a shard is missing.
            CheckpointError: a file is damaged; a tensor is missing, unexpected, of the wrong shape or dtype, or has
                numbers that the format cannot hold.
            OutOfMemoryError: the weights need more bytes than the machine has or than can be allocated.
            ValueError: unknown `weights`.
        """
        checked_weights(weights)
        if getattr(checkpoint, "is_headless", False):
            config = replace(config, tie_word_embeddings=True)
        stored = config
        if config.tie_word_embeddings and HEAD in checkpoint:
            stored = replace(config, tie_word_embeddings=False)
        checkpoint.require(tensors_of(stored), optional=lambda name: name.endswith(_INV_FREQ))
        if stored is not config and not _same_rows(checkpoint, config):
            config = stored
        return _Loader(checkpoint, config, weights, progress or (lambda *_: None)).load()

    def arrays(self) -> Iterator[Float32 | Weight]:
        """Every vector and matrix; one that two names share comes twice."""
        yield from (self.embedding, self.norm, self.head)
        if self.head_bias is not None:
            yield self.head_bias
        if self.inputs is not None:
            yield from (self.inputs.table, self.inputs.projection, self.inputs.norm)
        if self.ends is not None:
            yield from (*self.ends.begin, *self.ends.end)
        for layer in self.layers:
            yield from (array for array in layer.arrays() if array is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; those that two names share count once."""
        return sum({id(array): array.nbytes for array in self.arrays()}.values())

    @property
    def huge_bytes(self) -> int:
        """How many of these lie on huge pages now; see `huge_bytes` of support/huge_pages.py."""
        matrices = {id(array): array for array in self.arrays() if not isinstance(array, np.ndarray)}
        return huge_bytes(span for matrix in matrices.values() for span in matrix.spans())

    @property
    def scratch_bytes(self) -> int:
        """The most bytes that a product with one of the matrices has taken so far, and freed when it ended."""
        return max(array.scratch_bytes for array in self.arrays() if not isinstance(array, np.ndarray))


def _too_large(size: int, available: int) -> OutOfMemoryError:
    error = OutOfMemoryError(size, available, "bytes")
    error.purpose = "weights"
    return error


@dataclass(frozen=True, slots=True)
class _Part:
    """The matrices and vectors of one layer, by their names in it.

    Attributes:
        prefix: the layer's, of names of tensors.
        matrices: those of the network; one that stacks several tensors has the names of all.
        checkpoint, shapes: where the vectors are, and which tensors there are.
    """

    prefix: str
    matrices: Mapping[str, Weight]
    checkpoint: Tensors
    shapes: Mapping[str, tuple[int, ...]]

    def __getitem__(self, name: str) -> Weight:
        return self.matrices[f"{self.prefix}{name}.weight"]

    def find(self, *names: str) -> Weight | None:
        """The matrix of the first of these names that the layer has; None: it has none."""
        there = (f"{self.prefix}{name}.weight" for name in names)
        return next((self.matrices[name] for name in there if name in self.matrices), None)

    def mlp(self, stem: str, limit: float = 0.0) -> MlpWeights:
        """An MLP without biases."""
        return MlpWeights(self[f"{stem}.up_proj"], None, self[f"{stem}.down_proj"], None, limit=_limit(limit))

    def vector(self, *names: str) -> Float32:
        """The vectors of these names as one."""
        return np.concatenate([self.checkpoint.read(f"{self.prefix}{name}") for name in names])

    def optional(self, name: str) -> Float32 | None:
        """The vector of this name; None: the layer has none."""
        return self.vector(name) if f"{self.prefix}{name}" in self.shapes else None


class _Loader:
    """One load: plans all matrices, allocates them together, and fills one after another."""

    def __init__(self, checkpoint: Tensors, config: ModelConfig, weights: str, progress: Progress) -> None:
        self._checkpoint, self._config, self._progress = checkpoint, config, progress
        self._shapes = dict(tensors_of(config))
        layers, head = FORMATS[weights]
        self._plans = [self._parts([EMBEDDING], head)]
        if config.layer_inputs:
            self._plans += [self._parts([INPUT_TABLE], head), self._parts([INPUT_PROJECTION], layers)]
        self._ends = stream_ends(config)
        self._plans += [self._parts([name], layers) for names in self._ends for name in names]
        for i in range(config.num_layers):
            for names in matrices_of(config, i):
                self._plans.append(self._parts([f"model.layers.{i}.{name}" for name in names], layers))
        if not config.tie_word_embeddings:
            self._plans.append(self._parts([HEAD], head))

    def _parts(self, names: list[str], format: str) -> list[tuple[list[str], tuple[int, int, str]]]:
        """The names above each other that one matrix can hold, with its rows, columns and format ("": as stored)."""
        parts = []
        for kind, same in groupby(names, key=lambda name: self._format(name, format)):
            inside = list(same)
            rows = sum(self._shapes[name][0] for name in inside)
            parts.append((inside, (rows, self._shapes[inside[0]][1], kind)))
        return parts

    def _format(self, name: str, format: str) -> str:
        stored = self._checkpoint.format(name)
        kinds = MATRIX_FORMATS[stored], MATRIX_FORMATS[format or stored]
        smaller = all(kind.packed for kind in kinds) and kinds[0].bits <= kinds[1].bits
        return stored if not format or smaller or name.endswith(STORED) else format

    def load(self) -> Weights:
        shapes = [shape for plan in self._plans for _, shape in plan]
        size = sum(Matrix.num_bytes(*shape) for shape in shapes)
        # A sparse file costs nothing on disk; reading it could exhaust the memory of all processes.
        if size > (memory := machine_memory().total):
            raise _too_large(size, memory)
        try:
            matrices, inputs = self._fill(iter(empty_matrices(shapes)), size), None
            if self._config.layer_inputs:
                inputs = TokenInputs(matrices[INPUT_TABLE], matrices[INPUT_PROJECTION], self._vector(INPUT_NORM))
            layers = tuple(self._layer(i, matrices) for i in range(self._config.num_layers))
            embedding, bias = matrices[EMBEDDING], self._vector(HEAD_BIAS) if self._config.head_bias else None
            parts = [tuple(matrices[name] for name in names) for names in self._ends]
            ends = StreamEnds(*parts) if parts else None
            weights = Weights(embedding, layers, self._norm(NORM), matrices.get(HEAD, embedding), inputs, bias, ends)
        except MemoryError:
            raise _too_large(size, 0) from None
        for array in weights.arrays():
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        return weights

    def _fill(self, empty: Iterator[Matrix], size: int) -> dict[str, Weight]:
        """All matrices by the names of the tensors in them, which may be several."""
        done, filled = 0, dict[str, Weight]()
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
            filled |= dict.fromkeys((name for names, _ in plan for name in names), stacked(parts))
        self._progress(size, size)
        return filled

    def _put(self, name: str, matrix: Matrix, row: int) -> None:
        for first, stop in _bands(*self._shapes[name]):
            stored = self._checkpoint.rows(name, first, stop)
            try:
                stored.put_into(matrix, row + first)
            except ValueError as error:  # not finite, or too large
                raise CheckpointError(f"{name}: {error}") from None

    def _vector(self, *names: str) -> Float32:
        return np.concatenate([self._checkpoint.read(name) for name in names])

    def _norm(self, name: str) -> Float32:
        weight = self._checkpoint.read(f"{name}.weight")
        if self._config.norm == "rms":
            return weight
        return np.stack([weight, self._checkpoint.read(f"{name}.bias") if self._config.norm_bias else 0 * weight])

    def _layer(self, layer: int, matrices: Mapping[str, Weight]) -> LayerWeights:
        config, mixer = self._config, self._config.mixers[layer]
        part = _Part(f"model.layers.{layer}.", matrices, self._checkpoint, self._shapes)
        parts = (mixer, mixer, config.mlps[layer], config.mlps[layer])
        before, after, before_mlp, after_mlp = (
            None if name is None or not has else self._norm(part.prefix + name)
            for name, has in zip(NORMS[config.norms_of(layer)], parts, strict=True)
        )
        attends, experts = mixer == "attention", config.mlps[layer] == "experts"
        output_bias = part.optional("mixer.out_proj.bias" if mixer == "state" else "self_attn.o_proj.bias")
        if (found := config.multipliers) is not None and before is not None:
            before = before * np.float32(found.attention_in if attends else found.state_in)
            added = np.float32(found.attention_out if attends else found.state_out)
            output_bias = None if output_bias is None else output_bias * added
        return LayerWeights(
            input_norm=before,
            qkv=part.find(*_FIRST),
            qkv_bias=self._qkv_bias(layer, part),
            qk_norm=self._qk_norm(layer, part.vector) if config.qk_norm and attends else None,
            sinks=part.optional("self_attn.sinks"),
            latent=self._latent(part) if config.latent and attends else None,
            recurrence=self._recurrence(part) if mixer == "state" else None,
            output=part.find("self_attn.o_proj", "mixer.out_proj"),
            output_bias=output_bias,
            output_norm=after,
            mlp_norm=before_mlp,
            beside=self._beside(part) if has_beside(config) else None,
            router=part.find("mlp.gate"),
            router_bias=part.optional("mlp.gate.bias"),
            expert_bias=part.optional("mlp.expert_bias"),
            latent_in=part.find("mlp.latent_in"),
            latent_out=part.find("mlp.latent_out"),
            shared=self._shared(layer, part) if experts else None,
            shared_gate=part.find("mlp.shared_expert_gate"),
            mlps=tuple(self._mlps(layer, part)),
            down_norm=after_mlp,
            inputs=self._inputs(part) if config.layer_inputs else None,
            scale=part.optional("layer_scalar"),
            next=self._next(part) if layer >= config.trunk_layers else None,
            streams=self._streams(part, config.streams.scaled) if config.streams else None,
        )

    def _streams(self, part: _Part, scaled: bool) -> StreamWeights:
        norm = part.vector("altup.router_norm.weight") * np.float32(1 / self._config.hidden_size)
        router, predict, correct, left, right = (part[name.removesuffix(".weight")] for name in STREAM_MATRICES)
        scale = part.vector("altup.correct_output_scale") if scaled else None
        low_norm = part.vector("laurel.post_laurel_norm.weight")
        return StreamWeights(router, norm, predict, correct, scale, left, right, low_norm)

    def _next(self, part: _Part) -> NextWeights:
        norms = (self._norm(part.prefix + name) for name in NEXT_NORMS)
        return NextWeights(part[JOINT.removesuffix(".weight")], *norms)

    def _shared(self, layer: int, part: _Part) -> MlpWeights | None:
        sizes = self._config.experts
        if sizes is None or not sizes.shared:
            return None
        return part.mlp("mlp.shared_expert", self._config.limits[layer][0])

    def _latent(self, part: _Part) -> LatentWeights:
        heads, own = range(self._config.num_heads), part.find("self_attn.q_b_proj")
        keys, values = ([part[f"self_attn.{each}.{head}"] for head in heads] for each in ("k_b", "v_b"))
        parts = [matrix for matrix in keys + values if isinstance(matrix, Matrix)]
        assert len(parts) == 2 * len(heads), "the matrix of a head is one tensor"
        return LatentWeights(
            own, part.optional("self_attn.q_a_layernorm.weight"), part.vector("self_attn.kv_a_layernorm.weight"),
            tuple(parts[: len(heads)]), tuple(parts[len(heads) :]), self._index(part),
        )

    def _index(self, part: _Part) -> IndexWeights | None:
        """The weights of a layer's own indexer; its norm in the order of its keys."""
        sizes, queries = self._config.index, part.find("self_attn.indexer.wq_b")
        if sizes is None or queries is None:
            return None
        norm = np.stack([part.vector(f"self_attn.indexer.k_norm.{each}") for each in ("weight", "bias")])
        order = sizes.file_rows("self_attn.indexer.wk.weight", 0, sizes.dim)
        return IndexWeights(queries, part["self_attn.indexer.wk"], norm if order is None else norm[:, order])

    def _beside(self, part: _Part) -> BesideWeights:
        after, before, after_experts, router, factors = (part.vector(name) for name in BESIDE)
        router *= np.float32(1 / math.sqrt(self._config.hidden_size))
        return BesideWeights(part.mlp("mlp"), after, before, after_experts, router, factors)

    def _inputs(self, part: _Part) -> InputWeights:
        gate, projection = part["per_layer_input_gate"], part["per_layer_projection"]
        return InputWeights(gate, projection, part.vector("post_per_layer_input_norm.weight"))

    def _qkv_bias(self, layer: int, part: _Part) -> Float32 | None:
        mixer = self._config.mixers[layer]
        if mixer != "attention" or not self._config.qkv_bias:
            return part.optional("mixer.in_proj.bias") if mixer == "state" else None
        biases = []
        for name in next(matrices_of(self._config, layer)):
            bias, (rows, *_) = part.optional(name.replace(".weight", ".bias")), self._shapes[part.prefix + name]
            biases.append(np.zeros(rows, np.float32) if bias is None else bias)
        return np.concatenate(biases)

    def _recurrence(self, part: _Part) -> RecurrentWeights:
        sizes = self._config.recurrence
        assert sizes is not None
        prefix = f"{part.prefix}mixer."

        def vector(name: str, shape: tuple[int, ...] = (-1,)) -> Float32:
            return self._checkpoint.read(f"{prefix}{name}").reshape(shape)

        names = [f"conv1d_{each}.weight" for each in "qkv"] if sizes.apart else ["conv1d.weight"]
        taps = np.ascontiguousarray(np.concatenate([vector(name, (-1, sizes.taps)) for name in names]).T)
        bias = vector("conv1d.bias") if sizes.conv_bias else None
        if sizes.kind == "conv":
            return RecurrentWeights(taps, bias)
        shape, skip = ((sizes.groups, -1), vector("D")) if sizes.kind == "mamba" else ((-1,), None)
        norm = None if sizes.gating == "alone" else vector("norm.weight", shape)
        return RecurrentWeights(
            taps, bias, vector("rate"), vector("dt_bias"), skip, norm, part.find("mixer.decay_proj"),
            part.find("mixer.gate_proj"),
        )

    def _qk_norm(self, layer: int, vector: Callable[..., Float32]) -> Float32 | None:
        config, sizes = self._config, self._config.sizes[layer]
        names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        if config.qk_norm == "all":
            return vector(*names).reshape(-1, sizes.head_dim)
        if config.qk_norm == "unit" and not config.rotated[layer]:
            return None
        if config.qk_norm in ("plain", "unit"):
            return np.ones((sizes.num_heads + sizes.num_kv_heads, sizes.head_dim), np.float32)
        if config.qk_norm == "layer":
            return vector(*names)
        queries = [vector(names[0])] * sizes.num_heads
        return np.stack(queries if sizes.kv_layer is not None else queries + [vector(names[1])] * sizes.num_kv_heads)

    def _mlps(self, layer: int, part: _Part) -> Iterator[MlpWeights]:
        """The MLP of a layer, or its experts, whose biases are rows; or none."""
        kind = self._config.mlps[layer]
        if not kind:
            return
        count, stem = (self._config.num_experts, "mlp.experts") if kind == "experts" else (1, "mlp")
        names = ("gate", "up", "down")[not self._config.mlp_gate :]
        gate_up: list[Float32 | None] = [None] * count
        down: list[Float32 | None] = [None] * count
        if self._config.mlp_bias:
            biases = [part.vector(f"{stem}.{name}_proj.bias").reshape(count, -1) for name in names]
            if self._config.multipliers is not None:
                biases[-1] *= np.float32(self._config.multipliers.down)
            gate_up, down = list(np.concatenate(biases[:-1], axis=1)), list(biases[-1])
        limit = _limit(self._config.limits[layer][kind == "experts"])
        curve = self._curve(f"{part.prefix}{stem}.") if self._config.activation == "xielu" else None
        cutoff = self._config.sizes[layer].cutoff
        least = None if cutoff is None else np.array([cutoff], np.float32)
        for i in range(count):
            own = f"{stem}.{i}" if kind == "experts" else stem
            two = part[f"{own}.up_proj"], gate_up[i], part[f"{own}.down_proj"], down[i]
            yield MlpWeights(*two, curve, least, limit)

    def _curve(self, prefix: str) -> Float32:
        """The numbers of xIELU: files have two of them before their softplus."""
        names = ("alpha_p", "alpha_n", "beta", "eps")
        found = [float(self._checkpoint.read(f"{prefix}act_fn.{name}").reshape(-1)[0]) for name in names]
        if not np.isfinite(found).all() or found[-1] >= 0:
            raise CheckpointError(f"{prefix}act_fn: expected finite numbers and eps below 0, got {found}")
        above, below = (float(log_add_exp(0.0, each)) for each in found[:2])
        return np.array([above, found[2] + below, *found[2:]], np.float32)


def _limit(number: float) -> Float32 | None:
    """A bound of SwiGLU, as weights have it."""
    return np.array([number], np.float32) if number else None


def _bands(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are read at a time."""
    band = max(1, _BAND_BYTES // (4 * columns))
    return ((first, min(first + band, rows)) for first in range(0, rows, band))


def _same_rows(checkpoint: Tensors, config: ModelConfig) -> bool:
    """Whether the stored head is a second copy of the embedding, as in older files."""
    return all(
        np.array_equal(checkpoint.rows(EMBEDDING, *band).to_float32(), checkpoint.rows(HEAD, *band).to_float32())
        for band in _bands(config.vocab_size, config.hidden_size)
    )
