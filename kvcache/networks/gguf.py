"""A network in a GGUF file: its configuration and its tensors, by the names of a Hugging Face checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.gguf.blocks import FORMATS, LOADABLE, parts, row_bytes, values
from kvcache.gguf.file import MAGIC, GgufFile, TensorInfo
from kvcache.gguf.vocabulary import end_tokens
from kvcache.networks.config import ModelConfig
from kvcache.networks.entries import Entries
from kvcache.networks.families import FAMILIES
from kvcache.networks.gguf_architectures import NEXT_LAYERS
from kvcache.networks.gguf_config import architecture_of, network_of
from kvcache.networks.gguf_places import TENSOR_NAMES, GgufPlaces
from kvcache.networks.names import (
    JOINT,
    Place,
    bias_rows,
    paired_norm,
    refuse_more_layers,
    stored_tensors,
    unread_of,
)
from kvcache.networks.rope import Rope
from kvcache.networks.rope_entries import long_attention_factor
from kvcache.networks.tensors import StoredRows, require
from kvcache.networks.vector_layout import GGUF_TENSORS
from kvcache.support.arguments import short
from kvcache.support.regular_files import open_regular, read_at

__all__ = ["GgufCheckpoint", "is_gguf"]

Float32 = NDArray[np.float32]

_MAX_DIVISOR = 1e9  # of RoPE frequencies
_INFINITE = 1e30  # what files say for pairs that do not turn
# The tensors of other networks in the same file: for sounds, for images, and what leads from these to texts.
_OTHERS = ("a.", "v.", "mm.")
_ROPE, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
_FLOATS = ("F32", "F16", "BF16")  # of vectors
_COPIES = (".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight")  # matrices of the network, once more
_CURVE = re.compile(r"model\.layers\.(\d+)\.mlp\.act_fn\.(\w+)")  # of xIELU: entries of the metadata


def is_gguf(path: str | Path) -> bool:
    """Whether a checkpoint's path names a GGUF file: it is no directory, and ends in .gguf, in any case, or is one."""
    path = Path(path)
    if os.path.isdir(path):
        return False
    return path.suffix.lower() == ".gguf" or (os.path.isfile(path) and _begins_as_gguf(path))


def _begins_as_gguf(path: Path) -> bool:
    start = bytearray(len(MAGIC))
    with suppress(OSError, CheckpointError):
        file, size = open_regular(path, CheckpointError)
        try:
            return size >= len(start) and read_at(file.fd, [start], 0) and start == MAGIC
        finally:
            file.close()
    return False


class GgufCheckpoint:
    """The tensors of a GGUF file, or of all files that it was split into.

    They have the names and the row order of a Hugging Face checkpoint.

    In files of the architecture `llama` and some others, rows of q and k are ordered for interleaved RoPE
    (`paired_rows`). They are put back as they are read. The experts of a layer are stacked.

    Raises FileNotFoundError, or CheckpointError that names the file and the fault.
    """

    def __init__(self, path: str | Path) -> None:
        self.file = GgufFile(path)
        self._architecture = architecture_of(self.file)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of tensors whose shape in the file has other axes of one row

    @property
    def _places(self) -> GgufPlaces:
        """The places of the tensors; an MTP layer changes the configuration."""
        return GgufPlaces(self.config, self._architecture, self.file.__contains__)

    @cached_property
    def config(self) -> ModelConfig:
        """The network's configuration. Raises CheckpointError naming the entry and its value."""
        ends = end_tokens(self.file)
        try:
            config = network_of(self.file, eos_token_id=ends)
        except CheckpointError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None

        biased = {layer[2] for name in self.file if name.endswith(".bias") and (layer := _BLOCK.match(name))}

        def has_bias(name: str) -> bool:
            """Whether any layer has it: the first ones may not attend, or have experts."""
            return f"{name}.bias" in biased

        family = FAMILIES[config.architecture]
        tiled = config.recurrence is not None and config.recurrence.kind == "delta" and not family.by_key_heads
        return replace(
            config,
            qkv_bias=config.qkv_bias or any(
                map(has_bias, ("attn_q", "attn_qkv") if config.latent is None else ("attn_kv_a_mqa",))
            ),
            output_bias=has_bias("attn_output"),
            head_bias=config.head_bias and "output.bias" in self.file,
            mlp_bias=config.mlp_bias or has_bias("ffn_down"),
            rope=self._rope(config),
            recurrence=config.recurrence and replace(config.recurrence, tiled=tiled),  # value heads as ggml broadcasts
            # The divisors of Gemma 4 and of Step are those of layers without a window.
            window_rope=config.window_rope or (
                config.rope if family.layers_differ or self._architecture.half_turned else None
            ),
        )

    def take_draft_layer(self) -> None:
        """Read the MTP layer as the last one of the network, if the file has one."""
        longer = self.config.with_draft_layer()
        if f"blk.{longer.num_layers - 1}.{TENSOR_NAMES[JOINT.removesuffix('.weight')]}.weight" in self.file:
            self.config = longer

    def _rope(self, config: ModelConfig) -> Rope:
        """The rotary embedding: that of the metadata, and the divisors in tensors where these are there."""
        if _SHORT in self.file or _LONG in self.file:
            prefix = f"{self.file.metadata['general.architecture']}.rope.scaling."
            read = Entries(self.file.metadata, f"{self.file.path}: ")
            positions = config.max_position_embeddings
            original = read.size(f"{prefix}original_context_length", positions)
            factor = max(positions / original, 1.0)
            return Rope(
                "longrope",
                config.rope.theta,
                factor,
                original,
                attention_factor=read.number(f"{prefix}attn_factor", long_attention_factor(factor, original)),
                divisors=self._divisors(_SHORT, config),
                long_divisors=self._divisors(_LONG, config),
            )
        if _ROPE not in self.file:
            return config.rope
        return Rope("divided", config.rope.theta, divisors=self._divisors(_ROPE, config))

    def _divisors(self, name: str, config: ModelConfig) -> tuple[float, ...]:
        """The numbers in a tensor that the frequencies are divided by."""
        path, size = self.file.path, config.rotary_dim // 2
        info = self.file.get(name)
        if info is None:
            raise CheckpointError(f"{path}: expected the tensor {name}, got none")
        padded = self._architecture.half_turned and info.shape == (config.head_dim // 2,)  # of heads that turn whole
        if not (padded or info.shape == (size,)) or info.dtype != "F32":
            raise CheckpointError(f"{path}: {name}: expected F32 ({size},), got {info.dtype} {info.shape}")
        if config.rope.kind != "default":
            raise CheckpointError(f"{path}: {name}: expected no other scaling beside it, got {config.rope.kind}")
        divisors = np.empty(info.shape, "<f4")
        self.file.read([divisors], name)
        divisors = divisors[:size]
        still = (divisors >= _INFINITE) & FAMILIES[config.architecture].layers_differ
        wrong = ~((divisors > 0) & (divisors <= _MAX_DIVISOR) | still)
        if wrong.any():
            worst = divisors[wrong][0]
            raise CheckpointError(f"{path}: {name}: expected positive numbers up to {_MAX_DIVISOR:g}, got {worst}")
        divisors[still] = np.inf
        return tuple(divisors.tolist())

    def __contains__(self, name: str) -> bool:
        """See `Tensors.__contains__`."""
        return self._places.place(name).name in self.file

    def require(
        self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = lambda _: False
    ) -> None:
        """See `Tensors.require`; messages have the file's names of tensors."""
        refuse_more_layers(
            ((int(layer[1]), layer[2]) if (layer := _BLOCK.match(name)) else None for name in self.file), self.config,
            f"{TENSOR_NAMES[JOINT.removesuffix('.weight')]}.",
            f"{self.file.path}: {self.file.metadata['general.architecture']}.block_count",
        )
        wanted = stored_tensors((each for each in expected if not _CURVE.fullmatch(each[0])), self._places.place)

        def stored() -> Iterator[tuple[str, tuple[int, ...]]]:
            """The tensors of the file, with its own shape where that has more or fewer axes of one row before it."""
            for name, shape in wanted:
                info = self.file.get(name)
                if info is not None and len(shape) == 1 and info.dtype in LOADABLE and info.dtype not in _FLOATS:
                    raise CheckpointError(
                        f"{self.file.path}: {name:.100}: expected F32, F16 or BF16 for a vector, got {info.dtype}"
                    )
                if info is not None and info.shape != shape and _bare(info.shape) == _bare(shape):
                    self._shapes[name], shape = shape, info.shape
                yield name, shape

        known = {_ROPE, _SHORT, _LONG, *GGUF_TENSORS}
        known |= {self._places.place(name).name for name in unread_of(self.config)}
        next_layers = f"{self.file.metadata['general.architecture']}.{NEXT_LAYERS}"

        def unread(name: str) -> bool:
            """Whether nothing reads it: of another network, or of an MTP layer."""
            layer = _BLOCK.match(name) if next_layers in self.file.metadata else None
            behind = layer is not None and int(layer[1]) >= self.config.num_layers
            behind |= layer is not None and int(layer[1]) >= self.config.trunk_layers and name.endswith(_COPIES)
            others = name.startswith(_OTHERS) or self._is_factor(name)
            return name in known or behind or others or optional(name)

        require(self.file, self.file.path, LOADABLE, stored(), unread)

    def read(self, name: str) -> Float32:
        """See `Tensors.read`."""
        if curve := _CURVE.fullmatch(name):
            return self._number(f"xielu.{curve[2]}", int(curve[1]))
        info = self._info(self._places.place(name).name)
        if (count := bias_rows(self.config, name, self._places.place(name))) is not None:
            info = info._replace(shape=(count,))
        found = values(info.dtype, self._rows(name, 0, info.shape[0]), _columns(info.shape)).reshape(info.shape)
        return paired_norm(self.config, name, found) if self._architecture.permuted else found

    def _info(self, name: str) -> TensorInfo:
        """A tensor of the file, with the shape that `require` found it to stand for."""
        info = self.file[name]
        return info._replace(shape=self._shapes.get(name, info.shape))

    def _number(self, key: str, layer: int) -> Float32:
        """An entry of the metadata with a number for each layer, or one for all."""
        found = self.file.metadata.get(key)
        each = np.full(self.config.num_layers, found) if isinstance(found, float) else found
        if not isinstance(each, np.ndarray) or each.dtype.kind != "f" or len(each) != self.config.num_layers:
            expected = f"a number for each of {self.config.num_layers} layers"
            raise CheckpointError(f"{self.file.path}: {key}: expected {expected}, got {short(found)}")
        return each[layer : layer + 1].astype(np.float32)

    def format(self, name: str) -> str:
        """See `Tensors.format`."""
        return FORMATS[self.file[self._places.place(name).name].dtype]

    def rows(self, name: str, first: int, stop: int) -> StoredRows:
        """See `Tensors.rows`."""
        info = self._info(self._places.place(name).name)
        raw, columns = self._rows(name, first, stop), _columns(info.shape)
        if info.dtype in ("F16", "BF16"):
            return StoredRows(self.format(name), raw.view(np.uint16))
        if info.dtype == "F32":
            return StoredRows("f32", values(info.dtype, raw, columns))
        found = parts(info.dtype, raw, columns)
        if info.dtype == "NVFP4" and found.units is not None:
            found = found._replace(units=found.units * self._factor(self._places.place(name)))
        return StoredRows(self.format(name), *found)

    def _is_factor(self, name: str) -> bool:
        """Whether a tensor has factors of a matrix in NVFP4: `_factor` reads them; those of activations are unused."""
        stem, _, kind = name.rpartition(".")
        matrix = self.file.get(f"{stem}.weight")
        return kind in ("scale", "input_scale") and matrix is not None and matrix.dtype == "NVFP4"

    def _factor(self, place: Place) -> np.float32:
        """The factor of all scales of a matrix in NVFP4, or of one of several; 1 where the file has none."""
        name, shape = f"{place.name.removesuffix('weight')}scale", self.file[place.name].shape
        if name not in self.file:
            return np.float32(1)
        count, info = shape[0] if len(shape) == 3 else 1, self.file[name]
        if info.dtype != "F32" or info.shape != (count,):
            raise CheckpointError(f"{self.file.path}: {name}: expected F32 ({count},), got {info.dtype} {info.shape}")
        factors = np.empty(count, "<f4")
        self.file.read([factors], name)
        return np.float32(factors[place.first // shape[-2] if count > 1 else 0])

    def _rows(self, name: str, first: int, stop: int) -> NDArray[np.uint8]:
        """The stored bytes of rows in the original order: `(stop - first, bytes of a row)`."""
        place = self._places.place(name)
        info = self._info(place.name)
        size = row_bytes(info.dtype, _columns(info.shape))
        order = self._places.order(name, first, stop, place)
        begin, end = (first, stop) if order is None or first == stop else (int(order.min()), int(order.max()) + 1)
        stored = np.empty((end - begin, size), np.uint8)
        self.file.read([stored], place.name, (begin + place.first) * size)
        return stored if order is None else stored[order - begin]


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of one row before its last one."""
    first = next((i for i, size in enumerate(shape[:-1]) if size > 1), len(shape) - 1)
    return shape[first:]


def _columns(shape: tuple[int, ...]) -> int:
    """Values per row: of the last axis; the values of a vector are rows."""
    return shape[-1] if len(shape) > 1 else 1
