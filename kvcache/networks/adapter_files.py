"""Adapters in the folders of peft: `adapter_config.json` and `adapter_model.safetensors`, for untrusted files.

Tensors are named as the modules of transformers that they change, `base_model.model.<path>.lora_A.weight`; where these
lie in the network is what `FolderPlaces` says of its own files. All is read into memory once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.networks.adapter import PROJECTIONS, Adapter, LowRank, adapted_shapes
from kvcache.networks.adapter_settings import AdapterSettings
from kvcache.networks.config import ModelConfig
from kvcache.networks.files import ADAPTER_CONFIG, MAX_CONFIG_BYTES, json_object, read_file
from kvcache.networks.folder_places import FolderPlaces
from kvcache.networks.names import EMBEDDING, Place, unread_of
from kvcache.networks.safetensors import SafetensorsFile
from kvcache.networks.towers import Names
from kvcache.support.arguments import BFLOAT16, short
from kvcache.support.machine_memory import machine_memory

__all__ = ["read_adapter", "read_settings"]

_TENSORS = "adapter_model.safetensors"
_SIDE = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_TYPES: dict[str, Any] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_PARTS = {tensor: name for name, tensor in PROJECTIONS.items()}


class _Module(NamedTuple):
    """A module that an adapter changes, and the names of its tensors in the file by side, "A" and "B"."""

    path: str
    sides: dict[str, str]


class _Target(NamedTuple):
    """A matrix of the network: its layer and part in files, where its rows are there, and its shape."""

    layer: int
    part: str
    tensor: str
    place: Place
    shape: tuple[int, int]


def read_adapter(folder: str | PathLike[str], config: ModelConfig, name: str | None = None) -> Adapter:
    """Read an adapter from a folder.

    Args:
        folder: of `peft`'s `save_pretrained`.
        config: the network that it is for.
        name: of the adapter, for messages; None: the last part of the folder's path.

    Raises:
        FileNotFoundError: a file is not there.
        CheckpointError: a file is damaged, or changes while it is read; a setting is not supported, or of the wrong
            type; the adapter has modules, sizes or ranks that its network or its settings do not have, a module without
            one of its two matrices, or numbers that are not finite.
    """
    settings, content = _settings(folder)
    folder, path = Path(folder), Path(folder, ADAPTER_CONFIG)
    if not (folder / _TENSORS).exists() and (others := sorted(each.name for each in folder.glob("adapter_model.*"))):
        raise FileNotFoundError(f"{folder}: expected {_TENSORS}, found {', '.join(others[:3])}, which cannot be read")
    file = SafetensorsFile(folder / _TENSORS)
    matrices = dict(_Reader(file, config, settings).matrices())
    if file.is_changed() or read_file(path, MAX_CONFIG_BYTES) != content:
        raise CheckpointError(f"{folder}: expected files that stay as they are while they are read, got changed ones")
    tokens = settings.invocation_tokens
    if tokens is not None and max(tokens, default=0) >= config.vocab_size:
        raise CheckpointError(
            f"{path}: alora_invocation_tokens: expected token ids below {config.vocab_size}, got {max(tokens)}"
        )
    try:
        return Adapter(matrices, tokens, name or folder.absolute().name)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error}") from None


def read_settings(folder: str | PathLike[str]) -> AdapterSettings:
    """Read the settings of an adapter alone; raises as `read_adapter`."""
    return _settings(folder)[0]


def _settings(folder: str | PathLike[str]) -> tuple[AdapterSettings, bytearray]:
    """The settings, and the content of their file."""
    path = Path(folder, ADAPTER_CONFIG)
    said = json_object(path, content := read_file(path, MAX_CONFIG_BYTES))
    try:
        return AdapterSettings.of(said), content
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


class _Reader:
    """Finds the matrices of a network in the tensors of an adapter."""

    def __init__(self, file: SafetensorsFile, config: ModelConfig, settings: AdapterSettings) -> None:
        self._file, self._config, self._settings = file, config, settings
        self._modules = self._found()
        there = {f"{layer}.{part}.weight" for layer, part in self._modules}
        self._places = FolderPlaces(config, lambda name: name == EMBEDDING or _inside(name) in there, lambda _: ())

    def matrices(self) -> Iterator[tuple[tuple[int, str], LowRank]]:
        """Each matrix that is changed; the names, sizes and ranks of all are checked before the first one is read."""
        targets = {(layer, name): self._target(layer, name, shape) for (layer, name), shape in self._shapes()}
        self._expect_targets([*targets.values()])
        changed = {key: each for key, each in targets.items() if (each.layer, each.part) in self._modules}
        for each in changed.values():
            self._expect_sizes(each)
        size = sum(info.stop - info.start for info in self._file.values())
        if size > (memory := machine_memory().total):
            raise self._error(f"expected tensors that fit the memory of this machine, {memory} bytes, got {size}")
        for key, each in changed.items():
            yield key, self._read(each)

    def _shapes(self) -> list[tuple[tuple[int, str], tuple[int, int]]]:
        return list(adapted_shapes(self._config).items())

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {message}")

    def _found(self) -> dict[tuple[int, str], _Module]:
        """The modules that the file has tensors of, by layer and part."""
        found: dict[tuple[int, str], _Module] = {}
        for name in self._file:
            side = _SIDE.fullmatch(name)
            inside = Names.layer_of(side[1]) if side else None
            if side is None or (inside is None and not Names.is_of_another_tower(side[1])):
                raise self._error(f"{name:.200}: expected lora_A.weight or lora_B.weight of a layer's module, got none")
            if inside is None:  # of a network for images
                continue
            module = found.setdefault(inside, _Module(side[1], {}))
            if module.path != side[1] or side[2] in module.sides:
                raise self._error(f"{name:.200}: expected each matrix of a module once, got two")
            module.sides[side[2]] = name
        return found

    def _target(self, layer: int, name: str, shape: tuple[int, int]) -> _Target:
        tensor = f"model.layers.{layer}.{PROJECTIONS[name]}.weight"
        place = self._places.place(tensor)
        inside = Names.layer_of(place.name.removesuffix(".weight"))
        assert inside is not None, "it is a tensor of a layer"
        return _Target(*inside, tensor, place, shape)

    def _expect_targets(self, targets: list[_Target]) -> None:
        """Raise CheckpointError unless modules of the file are those of the network that the settings name."""
        settings, left = self._settings, dict(self._modules)
        paths = dict[str, tuple[str, str]]()  # of each part, what its path begins and ends with
        for (layer, part), module in self._modules.items():
            begin, _, _ = module.path.rpartition(f"{layer}.{part}")
            paths.setdefault(part, (begin, part))
            if not settings.changes(module.path):
                raise self._error(f"{module.path:.200}: expected a module that target_modules names, got another")
        for each in targets:
            left.pop((each.layer, each.part), None)
            if (each.layer, each.part) not in self._modules and each.part in paths:
                path = f"{paths[each.part][0]}{each.layer}.{each.part}"
                if settings.changes(path):
                    raise self._error(f"{path}: expected matrices of a module that target_modules names, got none")
        unread = {self._places.place(name).name.removesuffix(".weight") for name in unread_of(self._config)}
        for layer, part in left:
            if f"{layer}.{part}" in map(_inside, unread):
                continue
            known = sorted({each.part for each in targets if each.layer == layer})
            if not known:
                layers = sorted({each.layer for each in targets})
                expected = f"one of {len(layers)} layers that adapters change, {short(layers)}"
                raise self._error(f"{self._modules[layer, part].path:.200}: expected {expected}, got layer {layer}")
            raise self._error(f"{self._modules[layer, part].path:.200}: expected {' or '.join(known)}, got {part:.100}")

    def _expect_sizes(self, target: _Target) -> None:
        module = self._modules[target.layer, target.part]
        rank = self._settings.rank_of(module.path)
        rows = target.shape[0] if target.place.shape is None else target.place.shape[0]
        for side, want in (("A", (rank, target.shape[1])), ("B", (rows, rank))):
            if side not in module.sides:
                raise self._error(f"{module.path}: expected lora_A and lora_B, got no lora_{side}")
            info = self._file[name := module.sides[side]]
            if info.dtype not in _TYPES:
                raise self._error(f"{name}: expected {', '.join(_TYPES)}, got {info.dtype}")
            if len(info.shape) == 2 and info.shape[side == "B"] != rank:
                got = info.shape[side == "B"]
                raise self._error(f"{name}: expected rank {rank}, as {ADAPTER_CONFIG} says, got {got}")
            if info.shape != want:
                raise self._error(f"{name}: expected shape {want}, got {info.shape}")

    def _read(self, target: _Target) -> LowRank:
        module, place, count = self._modules[target.layer, target.part], target.place, target.shape[0]
        a, b = (self._stored(module.sides[side]) for side in "AB")
        if a.dtype != b.dtype:
            a, b = (self._file.read(module.sides[side]) for side in "AB")
        order = self._places.order(target.tensor, 0, count, place)
        rows = np.arange(count) if order is None else order
        return LowRank(a, b[place.first + rows], self._settings.scale_of(module.path))

    def _stored(self, name: str) -> NDArray[Any]:
        info = self._file[name]
        return self._file.rows(name, 0, info.shape[0]).view(_TYPES[info.dtype])


def _inside(name: str) -> str:
    """The name of a layer's tensor from the number of the layer on; "": it is of none."""
    found = Names.layer_of(name)
    return "" if found is None else f"{found[0]}.{found[1]}"
