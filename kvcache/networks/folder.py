"""The tensors of a Hugging Face folder by the names of `names`, however its family names and stores them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.config import ModelConfig
from kvcache.networks.families import FAMILIES
from kvcache.networks.names import EXPERT, LAYER
from kvcache.networks.tensors import StoredRows, Tensors

__all__ = ["FolderTensors"]

Float32 = NDArray[np.float32]

_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


class _Place(NamedTuple):
    """Where a tensor is: in which one of the file, from which row on, and that one's shape (None: the same)."""

    name: str
    first: int = 0
    shape: tuple[int, ...] | None = None


class FolderTensors:
    """The tensors of a folder, translated.

    - Norms: some families store the weight minus 1.
    - Mixtral has other names for its experts.
    - Phi-3 has queries, keys and values in one tensor, gate and up in another.
    - gpt-oss has all experts of a layer in two tensors `(experts, in, out)`, rows of gate and up in turn.

    Args:
        checkpoint: the tensors as they are named and stored.
        config: the network.
    """

    def __init__(self, checkpoint: Tensors, config: ModelConfig) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._family = FAMILIES[config.architecture]
        self._slab: tuple[tuple[str, int], StoredRows] | None = None  # the last expert that was read

    def require(
        self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = lambda _: False
    ) -> None:
        """See `Tensors.require`; messages have the names of the files."""

        def stored() -> Iterator[tuple[str, tuple[int, ...]]]:
            for name, shape in expected:
                place = self._place(name)
                if not place.first:  # the first part of a tensor stands for all of it
                    yield place.name, place.shape or shape

        self._checkpoint.require(stored(), optional)

    def read(self, name: str) -> Float32:
        """See `Tensors.read`."""
        found = self._checkpoint.read(self._place(name).name)
        if self._family.norms_less_one and name.endswith("norm.weight"):
            found = found + np.float32(1)
        if self._family.experts == "gpt_oss":
            if name.endswith("gate_proj.bias"):
                return np.ascontiguousarray(found[:, 0::2])
            if name.endswith("up_proj.bias"):
                return np.ascontiguousarray(found[:, 1::2])
        return found

    def format(self, name: str) -> str:
        """See `Tensors.format`."""
        return self._checkpoint.format(self._place(name).name)

    def rows(self, name: str, first: int, stop: int) -> StoredRows:
        """See `Tensors.rows`."""
        place = self._place(name)
        inside = LAYER.fullmatch(name)
        expert = EXPERT.fullmatch(inside[2]) if inside else None
        if expert and self._family.experts == "gpt_oss":
            return self._transposed(place.name, int(expert[1]), expert[2], first, stop)
        return self._checkpoint.rows(place.name, place.first + first, place.first + stop)

    def _transposed(self, name: str, expert: int, part: str, first: int, stop: int) -> StoredRows:
        """Rows of an expert that is stored `(in, out)`."""
        inputs = self._config.intermediate_size if part == "down" else self._config.hidden_size
        if self._slab is None or self._slab[0] != (name, expert):
            self._slab = (name, expert), self._checkpoint.rows(name, expert * inputs, (expert + 1) * inputs)
        slab = self._slab[1]
        columns = {"gate": slice(2 * first, 2 * stop, 2), "up": slice(2 * first + 1, 2 * stop + 1, 2)}
        values = slab.values[:, columns.get(part, slice(first, stop))]
        return StoredRows(slab.format, np.ascontiguousarray(values.T))

    def _place(self, name: str) -> _Place:
        inside = LAYER.fullmatch(name)
        if not inside:
            return _Place(name)
        layer, part = name[: inside.start(2)], inside[2]
        place = self._fused(part) if self._family.fused else self._expert(part) if self._family.experts else None
        return _Place(name) if place is None else place._replace(name=layer + place.name)

    def _fused(self, part: str) -> _Place | None:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if found := re.fullmatch(r"self_attn\.([qkv])_proj\.weight", part):
            first = {"q": 0, "k": queries, "v": queries + pairs}[found[1]]
            return _Place("self_attn.qkv_proj.weight", first, (queries + 2 * pairs, hidden))
        if found := re.fullmatch(r"mlp\.(gate|up)_proj\.weight", part):
            return _Place("mlp.gate_up_proj.weight", inner if found[1] == "up" else 0, (2 * inner, hidden))
        return None

    def _expert(self, part: str) -> _Place | None:
        config, expert = self._config, EXPERT.fullmatch(part)
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        if self._family.experts == "mixtral":
            if expert:
                return _Place(f"block_sparse_moe.experts.{expert[1]}.{_MIXTRAL[expert[2]]}.weight")
            return _Place("block_sparse_moe.gate.weight") if part == "mlp.gate.weight" else None
        if self._family.experts == "gpt_oss":
            if expert and expert[2] == "down":
                return _Place("mlp.experts.down_proj", int(expert[1]), (experts, inner, hidden))
            if expert:
                turn = 2 * int(expert[1]) + (expert[2] == "up")
                return _Place("mlp.experts.gate_up_proj", turn, (experts, hidden, 2 * inner))
            if part in ("mlp.gate.weight", "mlp.gate.bias"):
                return _Place(part.replace("gate", "router"))
            if found := re.fullmatch(r"mlp\.experts\.(gate|up|down)_proj\.bias", part):
                if found[1] == "down":
                    return _Place("mlp.experts.down_proj_bias")
                return _Place("mlp.experts.gate_up_proj_bias", found[1] == "up", (experts, 2 * inner))
        return None
