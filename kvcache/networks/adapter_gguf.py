"""Adapters in GGUF files, as llama.cpp has them: `general.type` is "adapter", tensors `blk.N.attn_q.weight.lora_a`."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.gguf.blocks import LOADABLE, row_bytes, values
from kvcache.gguf.file import GgufFile
from kvcache.networks.adapter import PROJECTIONS, Adapter, LowRank, adapted_shapes
from kvcache.networks.config import ModelConfig
from kvcache.networks.entries import Entries
from kvcache.networks.gguf_config import architecture_of
from kvcache.networks.gguf_places import GgufPlaces
from kvcache.networks.names import Place
from kvcache.support.arguments import BFLOAT16, short
from kvcache.support.machine_memory import machine_memory
from kvcache.support.regular_files import file_version

__all__ = ["open_adapter", "read_gguf_adapter"]

_ALPHA, _TOKENS = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
_KNOWN = {"adapter.type", _ALPHA, _TOKENS, "adapter.lora.task_name", "adapter.lora.prompt_prefix"}
_FLOATS: dict[str, Any] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_SIDES = (".lora_a", ".lora_b")


def read_gguf_adapter(path: str | PathLike[str], config: ModelConfig, name: str | None = None) -> Adapter:
    """Read an adapter from a GGUF file.

    Args:
        path: of the file.
        config: the network that it is for; whether its own files are GGUF does not matter.
        name: of the adapter, for messages; None: that of the file.

    Raises:
        FileNotFoundError: there is no file.
        CheckpointError: as of `read_adapter`.
    """
    file = open_adapter(path)
    version = file_version(path)
    try:
        matrices = dict(_Reader(file, config).matrices())
        if file_version(path) != version:
            raise CheckpointError(f"{path}: expected a file that stays as it is while it is read, got a changed one")
        tokens = _tokens(file, config)
    except CheckpointError:
        raise
    except ValueError as error:  # a scale of codes that is not finite
        raise CheckpointError(f"{path}: {error}") from None
    finally:
        file.close()
    try:
        return Adapter(matrices, tokens, name or Path(path).stem)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def open_adapter(path: str | PathLike[str]) -> GgufFile:
    """Open a file that has an adapter; raises as `read_gguf_adapter`."""
    file = GgufFile(Path(path))
    try:
        architecture_of(file, "adapter")
        if (kind := file.metadata.get("adapter.type")) != "lora":
            raise CheckpointError(f"{path}: adapter.type: expected lora, got {short(kind)}")
    except CheckpointError:
        file.close()
        raise
    return file


def _tokens(file: GgufFile, config: ModelConfig) -> tuple[int, ...] | None:
    found = file.metadata.get(_TOKENS)
    if found is None:
        return None
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise CheckpointError(f"{file.path}: {_TOKENS}: expected an array of token ids, got {short(found)}")
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < config.vocab_size:
        expected = f"token ids below {config.vocab_size}"
        raise CheckpointError(f"{file.path}: {_TOKENS}: expected {expected}, got {short(found.tolist())}")
    return tuple(found.tolist())


class _Reader:
    """Finds the matrices of a network in the tensors of a file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file, self._config = file, config
        architecture = architecture_of(file, "adapter")
        if unknown := sorted(key for key in file.metadata if key.startswith("adapter.") and key not in _KNOWN):
            raise self._error(f"{unknown[0]:.100}: expected none, since it is not supported, got one")
        self._alpha = Entries(file.metadata, f"{file.path}: ").number(_ALPHA)
        self._places = GgufPlaces(config, architecture, lambda name: f"{name}{_SIDES[0]}" in file)

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {message}")

    def matrices(self) -> Iterator[tuple[tuple[int, str], LowRank]]:
        """Each matrix that is changed; the names and sizes of all are checked before the first one is read."""
        found, left = {}, set(self._file)
        for (layer, part), shape in adapted_shapes(self._config).items():
            tensor = f"model.layers.{layer}.{PROJECTIONS[part]}.weight"
            place = self._places.place(tensor)
            there = [side for side in _SIDES if place.name + side in self._file]
            left -= {place.name + side for side in there}
            if len(there) == 1:
                raise self._error(f"{place.name}: expected lora_a and lora_b, got {there[0][1:]} alone")
            if there:
                self._expect_sizes(place, shape)
                found[layer, part] = tensor, place, shape[0]
        if left:
            raise self._error(f"{min(left):.200}: expected a matrix of the network that adapters change, got another")
        size = sum(info.stop - info.start for info in self._file.values())
        if size > (memory := machine_memory().total):
            raise self._error(f"expected tensors that fit the memory of this machine, {memory} bytes, got {size}")
        for key, each in found.items():
            yield key, self._read(*each)

    def _expect_sizes(self, place: Place, shape: tuple[int, int]) -> None:
        rows = shape[0] if place.shape is None else place.shape[0]
        a, b = (self._file[place.name + side] for side in _SIDES)
        rank = a.shape[0] if a.shape else 0
        for side, info, want in ((_SIDES[0], a, (rank, shape[1])), (_SIDES[1], b, (rows, rank))):
            if info.dtype not in LOADABLE:
                raise self._error(f"{place.name}{side}: expected one of {', '.join(LOADABLE)}, got {info.dtype}")
            if info.shape != want:
                raise self._error(f"{place.name}{side}: expected shape {want}, got {info.shape}")

    def _read(self, tensor: str, place: Place, count: int) -> LowRank:
        a, b = (self._stored(place.name + side) for side in _SIDES)
        if a.dtype != b.dtype:
            a, b = (self._floats(place.name + side) for side in _SIDES)
        order = self._places.order(tensor, 0, count, place)
        rows = np.arange(count) if order is None else order
        return LowRank(a, b[place.first + rows], self._alpha / len(a) if self._alpha else 1.0)

    def _raw(self, name: str) -> NDArray[np.uint8]:
        info = self._file[name]
        raw = np.empty((info.shape[0], row_bytes(info.dtype, info.shape[1])), np.uint8)
        self._file.read([raw], name)
        return raw

    def _stored(self, name: str) -> NDArray[Any]:
        """A tensor in its own type, or in float32 where it is quantised."""
        kind = _FLOATS.get(self._file[name].dtype)
        return self._floats(name) if kind is None else self._raw(name).view(kind)

    def _floats(self, name: str) -> NDArray[np.float32]:
        info = self._file[name]
        return values(info.dtype, self._raw(name), info.shape[1])
