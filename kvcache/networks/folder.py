"""The tensors of a Hugging Face folder by the names of `names`, however its family names and stores them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.functions import exp
from kvcache.kernels.matrix import MATRIX_FORMATS
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.config import ModelConfig
from kvcache.networks.expert_kinds import StackedExperts
from kvcache.networks.families import FAMILIES
from kvcache.networks.folder_places import FolderPlaces
from kvcache.networks.names import (
    EXPERT,
    EXPERT_BIASES,
    JOINT,
    LAYER,
    NORM,
    bias_rows,
    paired_norm,
    refuse_more_layers,
    stored_tensors,
    unread_of,
)
from kvcache.networks.quantised import QuantisedTensors
from kvcache.networks.tensors import StoredRows

__all__ = ["FolderTensors"]

Float32 = NDArray[np.float32]

# Matrices of the network, in MTP layers; the last one of Step.
_COPIES = ("embed_tokens.weight", "shared_head.head.weight", "transformer.shared_head.output.weight")


class FolderTensors:
    """The tensors of a folder, translated.

    - The text network of a checkpoint with several towers: its names have a prefix, the other towers are left out.
    - Norms: some families store the weight minus 1.
    - Some families have other names for parts of a layer, Mixtral for its experts.
    - Phi-3 has queries, keys and values in one tensor, gate and up in another.
    - Rows of queries and keys may be in the order of rotary embeddings that turn neighbours (`paired_rows`).
    - Some families have all experts of a layer in two tensors `(experts, out, in)`, gate above up.
    - Qwen3-VL has these, or `(experts, in, out)`, gate beside up.
    - Latent attention has the key and value matrices of all heads in one tensor `(heads * (plain + value), latent)`.
    - Step has all experts of a layer in three tensors, gate and up apart.
    - gpt-oss has all experts of a layer in two tensors `(experts, in, out)`, columns of gate and up in turn; quantised
      `(experts, out, in)`, rows in turn.

    Args:
        checkpoint: the tensors as they are named and stored.
        config: the network.
    """

    def __init__(self, checkpoint: Checkpoint | QuantisedTensors, config: ModelConfig) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._family = FAMILIES[config.architecture]
        self._places = FolderPlaces(config, checkpoint.__contains__, checkpoint.shape)
        self._slab: tuple[tuple[str, int], StoredRows] | None = None  # the last expert that was read

    @property
    def is_headless(self) -> bool:
        """See `Names`."""
        return self._places.names.is_headless

    def __contains__(self, name: str) -> bool:
        """See `Tensors.__contains__`."""
        return self._places.place(name).name in self._checkpoint

    def require(
        self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = lambda _: False
    ) -> None:
        """See `Tensors.require`; messages have the names of the files."""
        refuse_more_layers(
            map(self._places.names.layer_of, self._checkpoint.names()), self._config, JOINT.removesuffix("weight"),
            "num_hidden_layers",
        )
        others, layers = self._places.names.is_of_another_tower, self._config.num_layers
        unread = {self._places.place(name).name for name in unread_of(self._config)}
        self._checkpoint.require(
            stored_tensors(expected, self._places.place),
            lambda name: name in unread or others(name) or optional(name) or self._is_behind(name, layers),
        )

    def _is_behind(self, name: str, layers: int) -> bool:
        """Whether a tensor is of a layer behind the last one that is read; such a layer has copies of two matrices."""
        found = self._places.names.layer_of(name) if self._family.next_layers and not self._family.next_prefix else None
        if found is None:
            return False
        return found[0] >= layers or (found[0] >= self._config.trunk_layers and found[1] in _COPIES)

    def read(self, name: str) -> Float32:
        """See `Tensors.read`."""
        place = self._places.place(name)
        found = self._checkpoint.read(place.name)
        if (count := bias_rows(self._config, name, place)) is not None:
            found = found[place.first : place.first + count]
        order = self._places.order(name, 0, len(found), place) if name.endswith(".bias") else None
        if order is not None:
            found = found[order]
        if self._family.neighbours:
            found = paired_norm(self._config, name, found)
        if name.endswith("mlp.expert_bias"):
            return found.reshape(-1)
        if name.endswith("mixer.rate"):  # files have its logarithm
            return (-exp(found)).astype(np.float32)
        less_one = self._family.norms_less_one is True or name != f"{NORM}.weight"
        less_one &= name.endswith("norm.weight") and not name.endswith("mixer.norm.weight")
        if self._family.norms_less_one and less_one:
            found = found + np.float32(1)
        biases = EXPERT_BIASES.search(name)
        if biases and biases[1] != "down" and (stack := self._places.stack_of(name)) and stack.in_turn:
            return np.ascontiguousarray(found[:, biases[1] == "up" :: 2])
        return found

    def format(self, name: str) -> str:
        """See `Tensors.format`."""
        stored = self._checkpoint.format(self._places.place(name).name)
        transposed = (part := self._places.head_part(name)) is not None and part[0] == "k_b"
        return "f32" if transposed and MATRIX_FORMATS[stored].packed else stored

    def _transposed_keys(self, name: str, first: int, stop: int) -> StoredRows:
        """Rows of the transposed key matrix of a head."""
        assert self._config.latent is not None
        place, size = self._places.place(name), self._config.latent.plain
        if self._slab is None or self._slab[0] != (place.name, place.first):
            stored = self._checkpoint.rows(place.name, place.first, place.first + size)
            self._slab = (place.name, place.first), stored
        slab, wanted = self._slab[1], self.format(name)
        values = slab.values if wanted == slab.format else slab.to_float32()
        return StoredRows(wanted, np.ascontiguousarray(values[:, first:stop].T))

    def rows(self, name: str, first: int, stop: int) -> StoredRows:
        """See `Tensors.rows`."""
        place = self._places.place(name)
        inside = LAYER.fullmatch(name)
        expert = EXPERT.fullmatch(inside[2]) if inside else None
        stack = self._places.stack_of(name) if expert else None
        if expert and stack and (stack.turned or (stack.in_turn and expert[2] != "down")):
            return self._from_stack(stack, place.name, expert, first, stop)
        if (part := self._places.head_part(name)) is not None and part[0] == "k_b":
            return self._transposed_keys(name, first, stop)
        order = self._places.order(name, first, stop, place)
        if order is None:
            return self._checkpoint.rows(place.name, place.first + first, place.first + stop)
        begin = int(order.min())
        stored = self._checkpoint.rows(place.name, place.first + begin, place.first + int(order.max()) + 1)
        return stored.taken(order - begin)

    def _from_stack(self, stack: StackedExperts, name: str, expert: re.Match[str], first: int, stop: int) -> StoredRows:
        """Rows of an expert, of a stack that has them as columns, or those of gate and up in turn."""
        assert self._config.experts is not None
        number, down, up = int(expert[1]), expert[2] == "down", expert[2] == "up"
        hidden, inner = self._config.hidden_size, self._config.experts.size
        size = 2 * inner if not stack.turned else inner if down else hidden
        if self._slab is None or self._slab[0] != (name, number):
            self._slab = (name, number), self._checkpoint.rows(name, number * size, (number + 1) * size)
        slab, wanted = self._slab[1], slice(first + inner * up, stop + inner * up)
        if stack.in_turn and not down:
            wanted = slice(2 * first + up, 2 * stop, 2)
        if not stack.turned:
            return slab.rows(wanted)
        return StoredRows(slab.format, np.ascontiguousarray(slab.values[:, wanted].T))
