"""The tensors of a Hugging Face checkpoint directory: one safetensors file, or shards with an index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.networks.files import MAX_JSON_BYTES, read_json
from kvcache.networks.safetensors import SafetensorsFile, TensorInfo
from kvcache.networks.tensors import StoredRows, require
from kvcache.support.arguments import short

__all__ = ["Checkpoint"]

Float32 = NDArray[np.float32]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_NAME = 255  # characters of a file name; no file system takes more
_MAX_SHARDS = 512  # all shards are open while a checkpoint is read; a process may have 1024 files open
_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}  # dtypes that can be loaded


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
            raise FileNotFoundError(f"expected {_SINGLE} or {_INDEX} in {directory}, got neither{found}")

    dtypes = tuple(_FORMATS)

    def __contains__(self, name: str) -> bool:
        """See `Tensors.__contains__`."""
        return name in self._files

    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        return iter(self._files)

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor."""
        return self._files[name][name]

    def stored(self, name: str, first: int, stop: int) -> NDArray[Any]:
        """Rows of a tensor of any dtype that `SafetensorsFile.rows` reads."""
        return self._files[name].rows(name, first, stop)

    def is_zero(self, name: str) -> bool:
        """Whether there is a tensor of floats of this name, and all of it is zero."""
        return name in self._files and self.info(name).dtype in _FORMATS and not self.read(name).any()

    def require(
        self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = lambda _: False
    ) -> None:
        """See `Tensors.require`."""
        found = {name: file[name] for name, file in self._files.items()}
        require(found, self.directory, self.dtypes, expected, optional)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        return self.info(name).shape

    def read(self, name: str) -> Float32:
        """See `Tensors.read`."""
        return self._files[name].read(name)

    def format(self, name: str) -> str:
        """See `Tensors.format`."""
        return _FORMATS[self._files[name][name].dtype]

    def rows(self, name: str, first: int, stop: int) -> StoredRows:
        """See `Tensors.rows`."""
        return StoredRows(self.format(name), self._files[name].rows(name, first, stop))


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
