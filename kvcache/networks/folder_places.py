"""Where the tensors of a network are in a Hugging Face folder, and in which order their rows are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.config import ModelConfig
from kvcache.networks.expert_kinds import StackedExperts
from kvcache.networks.families import FAMILIES
from kvcache.networks.names import (
    DELTA_PART,
    EXPERT,
    EXPERT_BIASES,
    HEAD_PART,
    LAYER,
    Place,
    fused_place,
    key_head_place,
    key_head_rows,
    latent_order,
    paired_rows,
)
from kvcache.networks.towers import Names

__all__ = ["FolderPlaces"]

_SHARED = re.compile(r"mlp\.shared_expert\.(gate|up)_proj\.weight")


class FolderPlaces:
    """Finds the tensors of `names` in the files of a family.

    Args:
        config: the network.
        has: whether the files have a tensor of a name.
        shape: of such a tensor.

    Attributes:
        names: from the names of a text network to those of the files.
    """

    def __init__(
        self, config: ModelConfig, has: Callable[[str], bool], shape: Callable[[str], tuple[int, ...]]
    ) -> None:
        self._config, self._has, self._shape = config, has, shape
        self._family = FAMILIES[config.architecture]
        self.names = Names(has)
        self._places: dict[str, Place] = {}  # of tensors that were asked for
        self._stacks: dict[str, StackedExperts | None] = {}  # of each layer with experts, by what its names begin with

    def place(self, name: str) -> Place:
        """Where a tensor is in the files; that of a matrix of stacked experts is the whole stack's."""
        if name not in self._places:
            place = self._place_of_texts(name)
            found = self.names(place.name)
            if not self._has(found):
                others = (found.replace(own, other) for own, other in self._family.other_names.items())
                found = next((other for other in others if self._has(other)), found)
            self._places[name] = place._replace(name=found)
        return self._places[name]

    def order(self, name: str, first: int, stop: int, place: Place) -> NDArray[np.int64] | None:
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

    def head_part(self, name: str) -> tuple[str, int] | None:
        """Which part of latent attention a name is, of which head; None: it is none."""
        inside = LAYER.fullmatch(name)
        found = HEAD_PART.fullmatch(inside[2]) if inside else None
        return (found[1], int(found[2])) if found else None

    def stack_of(self, name: str) -> StackedExperts | None:
        """How files stack the experts of the layer of this tensor."""
        inside = LAYER.fullmatch(name)
        return self._stack(self._layer(inside)) if inside else None

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

    def _stack(self, layer: str) -> StackedExperts | None:
        """How files stack the experts of a layer; None: they do not."""
        kind, sizes = self._family.experts, self._config.experts
        if kind is None or sizes is None or not kind.stacks:
            return None
        if layer not in self._stacks:
            turned, found = (sizes.size, self._config.hidden_size), None if kind.each else kind.stacks[-1]
            for stack in reversed(kind.stacks):
                there = self._has(name := self.names(f"{layer}{stack.down}"))
                if there and (not stack.turned or self._shape(name)[1:] == turned):
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
