"""The tensors of a Hugging Face folder by the names of `names`, however its family names and stores them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.functions import exp
from kvcache.kernels.matrix import MATRIX_FORMATS
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.config import ModelConfig
from kvcache.networks.expert_kinds import StackedExperts
from kvcache.networks.families import FAMILIES
from kvcache.networks.names import (
    DELTA_PART,
    EXPERT,
    EXPERT_BIASES,
    HEAD_PART,
    JOINT,
    LAYER,
    NORM,
    Place,
    bias_rows,
    fused_place,
    key_head_place,
    key_head_rows,
    latent_order,
    paired_norm,
    paired_rows,
    refuse_more_layers,
    stored_tensors,
    unread_of,
)
from kvcache.networks.quantised import QuantisedTensors
from kvcache.networks.tensors import StoredRows
from kvcache.networks.towers import Names

__all__ = ["FolderTensors"]

Float32 = NDArray[np.float32]

_SHARED = re.compile(r"mlp\.shared_expert\.(gate|up)_proj\.weight")
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
        self._names = Names(checkpoint.__contains__)
        self._places: dict[str, Place] = {}  # of tensors that were asked for
        self._stacks: dict[str, StackedExperts | None] = {}  # of each layer with experts, by what its names begin with
        self._slab: tuple[tuple[str, int], StoredRows] | None = None  # the last expert that was read

    @property
    def is_headless(self) -> bool:
        """See `Names`."""
        return self._names.is_headless

    def __contains__(self, name: str) -> bool:
        """See `Tensors.__contains__`."""
        return self._place(name).name in self._checkpoint

    def require(
        self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = lambda _: False
    ) -> None:
        """See `Tensors.require`; messages have the names of the files."""
        refuse_more_layers(
            map(self._names.layer_of, self._checkpoint.names()), self._config, JOINT.removesuffix("weight"),
            "num_hidden_layers",
        )
        others, layers = self._names.is_of_another_tower, self._config.num_layers
        unread = {self._place(name).name for name in unread_of(self._config)}
        self._checkpoint.require(
            stored_tensors(expected, self._place),
            lambda name: name in unread or others(name) or optional(name) or self._is_behind(name, layers),
        )

    def _is_behind(self, name: str, layers: int) -> bool:
        """Whether a tensor is of a layer behind the last one that is read; such a layer has copies of two matrices."""
        found = self._names.layer_of(name) if self._family.next_layers and not self._family.next_prefix else None
        if found is None:
            return False
        return found[0] >= layers or (found[0] >= self._config.trunk_layers and found[1] in _COPIES)

    def read(self, name: str) -> Float32:
        """See `Tensors.read`."""
        place = self._place(name)
        found = self._checkpoint.read(place.name)
        if (count := bias_rows(self._config, name, place)) is not None:
            found = found[place.first : place.first + count]
        order = self._order(name, 0, len(found), place) if name.endswith(".bias") else None
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
        if biases and biases[1] != "down" and (stack := self._stack_of(name)) and stack.in_turn:
            return np.ascontiguousarray(found[:, biases[1] == "up" :: 2])
        return found

    def format(self, name: str) -> str:
        """See `Tensors.format`."""
        stored = self._checkpoint.format(self._place(name).name)
        transposed = (part := self._head_part(name)) is not None and part[0] == "k_b"
        return "f32" if transposed and MATRIX_FORMATS[stored].packed else stored

    def _head_part(self, name: str) -> tuple[str, int] | None:
        """Which part of latent attention a name is, of which head; None: it is none."""
        inside = LAYER.fullmatch(name)
        found = HEAD_PART.fullmatch(inside[2]) if inside else None
        return (found[1], int(found[2])) if found else None

    def _transposed_keys(self, name: str, first: int, stop: int) -> StoredRows:
        """Rows of the transposed key matrix of a head."""
        assert self._config.latent is not None
        place, size = self._place(name), self._config.latent.plain
        if self._slab is None or self._slab[0] != (place.name, place.first):
            stored = self._checkpoint.rows(place.name, place.first, place.first + size)
            self._slab = (place.name, place.first), stored
        slab, wanted = self._slab[1], self.format(name)
        values = slab.values if wanted == slab.format else slab.to_float32()
        return StoredRows(wanted, np.ascontiguousarray(values[:, first:stop].T))

    def rows(self, name: str, first: int, stop: int) -> StoredRows:
        """See `Tensors.rows`."""
        place = self._place(name)
        inside = LAYER.fullmatch(name)
        expert = EXPERT.fullmatch(inside[2]) if inside else None
        if expert and (stack := self._stack_of(name)) and (stack.turned or (stack.in_turn and expert[2] != "down")):
            return self._from_stack(stack, place.name, expert, first, stop)
        if (part := self._head_part(name)) is not None and part[0] == "k_b":
            return self._transposed_keys(name, first, stop)
        order = self._order(name, first, stop, place)
        if order is None:
            return self._checkpoint.rows(place.name, place.first + first, place.first + stop)
        begin = int(order.min())
        stored = self._checkpoint.rows(place.name, place.first + begin, place.first + int(order.max()) + 1)
        return stored.taken(order - begin)

    def _order(self, name: str, first: int, stop: int, place: Place) -> NDArray[np.int64] | None:
        """The rows of a file, from `place.first` on, for some of a tensor; None: they follow each other."""
        if self._family.neighbours:
            return paired_rows(self._config, name, first, stop)
        inside = LAYER.fullmatch(name)
        if self._config.latent is not None and inside is not None:
            return latent_order(self._config, inside[2], first, stop)
        found = DELTA_PART.search(name) if self._family.by_key_heads else None
        if found is None or self._config.recurrence is None:
            return None
        return key_head_rows(self._config.recurrence, found[1], first, stop) - place.first

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

    def _place(self, name: str) -> Place:
        if name not in self._places:
            place = self._place_of_texts(name)
            found = self._names(place.name)
            if found not in self._checkpoint:
                others = (found.replace(own, other) for own, other in self._family.other_names.items())
                found = next((other for other in others if other in self._checkpoint), found)
            self._places[name] = place._replace(name=found)
        return self._places[name]

    def _place_of_texts(self, name: str) -> Place:
        """The place of a tensor, as a checkpoint of the text network alone names it."""
        inside = LAYER.fullmatch(name)
        if not inside:
            return Place(self._renamed(name))
        layer, part = self._layer(inside), inside[2]
        if (ahead := int(inside[1]) - self._config.trunk_layers) >= 0:
            stem, _, kind = part.rpartition(".")
            if (own := self._family.next_names.get(stem, "")) and "mtp" in own:
                return Place(f"{own}.{kind}")
        place = self._expert(part, layer)
        if part == "mixer.rate" and (states := self._config.recurrence) is not None and self._family.rate_axes:
            place = Place(part, 0, (1, 1, states.heads, 1))
        found = DELTA_PART.search(part) if self._family.by_key_heads else None
        if found and self._config.recurrence is not None:
            names = "linear_attn.in_proj_ba.weight", "linear_attn.in_proj_qkvz.weight"
            place = key_head_place(self._config.recurrence, self._config.hidden_size, found[1], *names)
        if (head := HEAD_PART.fullmatch(part)) and (sizes := self._config.latent) is not None:
            each, heads = sizes.plain + sizes.value, self._config.num_heads
            begin = int(head[2]) * each + (sizes.plain if head[1] == "v_b" else 0)
            place = Place("self_attn.kv_b_proj.weight", begin, (heads * each, sizes.latent))
        place = place or fused_place(self._config, part, *self._family.fused) or Place(part)
        return place._replace(name=layer + self._renamed(place.name, self._family.next_names if ahead >= 0 else None))

    def _layer(self, inside: re.Match[str]) -> str:
        """The start of the names of a layer's tensors in files of the text network alone."""
        ahead = int(inside[1]) - self._config.trunk_layers
        own = self._family.next_prefix if ahead >= 0 else ""
        if own:
            return f"{own}{ahead}."
        return f"{self._family.prefix}layers.{int(inside[1]) // (2 if self._family.paired else 1)}."

    def _renamed(self, name: str, more: Mapping[str, str] | None = None) -> str:
        """The name of a tensor in files of the family, or one of `more`; that of its layer is left out."""
        if name in self._family.names:
            return self._family.names[name]
        stem, dot, kind = name.rpartition(".")
        return f"{(more or {}).get(stem) or self._family.names.get(stem, stem)}{dot}{kind}"

    def _stack_of(self, name: str) -> StackedExperts | None:
        """How files stack the experts of the layer of this tensor."""
        inside = LAYER.fullmatch(name)
        return self._stack(self._layer(inside)) if inside else None

    def _stack(self, layer: str) -> StackedExperts | None:
        """How files stack the experts of a layer; None: they do not."""
        kind, sizes = self._family.experts, self._config.experts
        if kind is None or sizes is None or not kind.stacks:
            return None
        if layer not in self._stacks:
            turned, found = (sizes.size, self._config.hidden_size), None if kind.each else kind.stacks[-1]
            for stack in reversed(kind.stacks):
                there = (name := self._names(f"{layer}{stack.down}")) in self._checkpoint
                if there and (not stack.turned or self._checkpoint.shape(name)[1:] == turned):
                    found = stack
            self._stacks[layer] = found
        return self._stacks[layer]

    def _expert(self, part: str, layer: str) -> Place | None:
        """The place of a tensor of a layer's experts that files name or store in another way; None: of any other."""
        kind, sizes, experts = self._family.experts, self._config.experts, self._config.num_experts
        if kind is None or sizes is None:
            return None
        hidden, inner, stack = self._config.hidden_size, sizes.size, self._stack(layer)
        if (expert := EXPERT.fullmatch(part)) and stack is None:
            return Place(kind.each.format(expert[1], kind.parts[("gate", "up", "down").index(expert[2])]))
        if expert and stack and expert[2] == "down":
            shape = (inner, hidden) if stack.turned else (hidden, inner)
            return Place(stack.down, int(expert[1]) * hidden, (experts, *shape))
        if expert and stack and stack.apart:
            return Place(stack.gate_up.format(expert[2]), int(expert[1]) * inner, (experts, inner, hidden))
        if expert and stack:
            shape = (hidden, 2 * inner) if stack.turned else (2 * inner, hidden)
            return Place(stack.gate_up, (2 * int(expert[1]) + (expert[2] == "up")) * inner, (experts, *shape))
        if stack and (biases := EXPERT_BIASES.fullmatch(part)):
            if biases[1] == "down":
                return Place(stack.biases[1])
            return Place(stack.biases[0], biases[1] == "up", (experts, 2 * inner))
        if kind.shared_stack and (shared := _SHARED.fullmatch(part)):
            return Place(kind.shared_stack, sizes.shared * (shared[1] == "up"), (2 * sizes.shared, hidden))
        return Place(part, 0, (1, experts)) if kind.bias_row and part == "mlp.expert_bias" else None
