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
from kvcache.networks.expert_sizes import ExpertSizes
from kvcache.networks.families import FAMILIES
from kvcache.networks.names import (
    DELTA_PART,
    EXPERT,
    HEAD_PART,
    JOINT,
    LAYER,
    Place,
    fused_place,
    key_head_place,
    key_head_rows,
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

_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# The names of stacked experts, `(experts, out, in)`: gate above up, and down.
_STACKS = {
    "gemma4": ("experts.gate_up_proj", "experts.down_proj"),
    "shared": (_GATE_UP, _DOWN),
    "deepseek": (_GATE_UP, _DOWN),
    "ernie": (_GATE_UP, _DOWN),
    "granite": ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # those of the network, in MTP layers
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


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
        quantised = self._names("model.layers.0.mlp.experts.down_proj_blocks")
        self._blocks = self._family.experts == "gpt_oss" and quantised in checkpoint
        self._slab: tuple[tuple[str, int], StoredRows] | None = None  # the last expert that was read

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
        order = self._order(name, 0, len(found), place) if name.endswith(".bias") else None
        if order is not None:
            found = found[order]
        if name.endswith("mlp.expert_bias"):
            return found.reshape(-1)
        if name.endswith("mixer.rate"):  # files have its logarithm
            return (-exp(found)).astype(np.float32)
        if self._family.norms_less_one and name.endswith("norm.weight") and not name.endswith("mixer.norm.weight"):
            found = found + np.float32(1)
        if self._family.experts == "gpt_oss":
            if name.endswith("gate_proj.bias"):
                return np.ascontiguousarray(found[:, 0::2])
            if name.endswith("up_proj.bias"):
                return np.ascontiguousarray(found[:, 1::2])
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
        if expert and self._has_columns(place.name):
            return self._transposed(place.name, int(expert[1]), expert[2], first, stop)
        if expert and self._family.experts == "gpt_oss" and expert[2] != "down":
            return self._in_turn(place.name, int(expert[1]), expert[2], first, stop)
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
            return self._config.latent.file_rows(inside[2], first, stop)
        found = DELTA_PART.search(name) if self._family.by_key_heads else None
        if found is None or self._config.recurrence is None:
            return None
        return key_head_rows(self._config.recurrence, found[1], first, stop) - place.first

    def _transposed(self, name: str, expert: int, part: str, first: int, stop: int) -> StoredRows:
        """Rows of an expert that is stored `(in, out)`."""
        inputs = self._config.intermediate_size if part == "down" else self._config.hidden_size
        slab = self._expert_of(name, expert, inputs)
        inner = self._config.intermediate_size
        if part == "down":
            columns = slice(first, stop)
        elif self._family.experts == "gpt_oss":
            columns = slice(2 * first + (part == "up"), 2 * stop, 2)
        else:
            columns = slice(first + inner * (part == "up"), stop + inner * (part == "up"))
        values = slab.values[:, columns]
        return StoredRows(slab.format, np.ascontiguousarray(values.T))

    def _in_turn(self, name: str, expert: int, part: str, first: int, stop: int) -> StoredRows:
        """Rows of an expert that is stored `(out, in)`, rows of gate and up in turn."""
        slab = self._expert_of(name, expert, 2 * self._config.intermediate_size)
        return slab.rows(slice(2 * first + (part == "up"), 2 * stop, 2))

    def _expert_of(self, name: str, expert: int, size: int) -> StoredRows:
        """All rows of an expert, `size` of them."""
        if self._slab is None or self._slab[0] != (name, expert):
            self._slab = (name, expert), self._checkpoint.rows(name, expert * size, (expert + 1) * size)
        return self._slab[1]

    def _place(self, name: str) -> Place:
        place = self._place_of_texts(name)
        return place._replace(name=self._names(place.name))

    def _place_of_texts(self, name: str) -> Place:
        """The place of a tensor, as a checkpoint of the text network alone names it."""
        inside = LAYER.fullmatch(name)
        if not inside:
            return Place(self._renamed(name))
        layer, part = f"{self._family.prefix}{name[6 : inside.start(2)]}", inside[2]
        if (ahead := int(inside[1]) - self._config.trunk_layers) >= 0:
            layer = f"{self._family.next_prefix}{ahead}." if self._family.next_prefix else layer
            stem, _, kind = part.rpartition(".")
            if (own := self._family.next_names.get(stem, "")) and "mtp" in own:
                return Place(f"{own}.{kind}")
        place = self._expert(part, layer) if self._family.experts else None
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

    def _renamed(self, name: str, more: Mapping[str, str] | None = None) -> str:
        """The name of a tensor in files of the family, or one of `more`; that of its layer is left out."""
        if name in self._family.names:
            return self._family.names[name]
        stem, dot, kind = name.rpartition(".")
        return f"{(more or {}).get(stem) or self._family.names.get(stem, stem)}{dot}{kind}"

    def _stacked(
        self, expert: int, part: str, layer: str, stacks: tuple[str, str], sizes: ExpertSizes
    ) -> Place | None:
        """The place of an expert's matrix where files stack all experts, gate above up; None: they do not."""
        experts, hidden, inner = self._config.num_experts, self._config.hidden_size, sizes.size
        if self._names(f"{layer}{stacks[1]}") not in self._checkpoint:
            return None
        if part == "down":
            return Place(stacks[1], expert * hidden, (experts, hidden, inner))
        return Place(stacks[0], (2 * expert + (part == "up")) * inner, (experts, 2 * inner, hidden))

    def _has_columns(self, name: str) -> bool:
        """Whether a tensor has all experts, `(experts, in, out)`: files of Qwen3-VL may have them so."""
        if self._family.experts != "qwen":
            return self._family.experts == "gpt_oss" and name.endswith((_GATE_UP, _DOWN))
        down = name.replace(_GATE_UP, _DOWN)
        if not down.endswith(_DOWN) or down not in self._checkpoint:
            return False
        return self._checkpoint.shape(down)[1:] == (self._config.intermediate_size, self._config.hidden_size)

    def _in_columns(self, expert: int, part: str) -> Place:
        """The place of an expert's matrix where files stack all experts, `(experts, in, out)`."""
        experts, hidden, inner = self._config.num_experts, self._config.hidden_size, self._config.intermediate_size
        if part == "down":
            return Place(_DOWN, expert, (experts, inner, hidden))
        return Place(_GATE_UP, 2 * expert + (part == "up"), (experts, hidden, 2 * inner))

    def _expert(self, part: str, layer: str) -> Place | None:
        config, expert = self._config, EXPERT.fullmatch(part)
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        if expert and config.experts is not None and (stacks := _STACKS.get(self._family.experts)) is not None:
            return self._stacked(int(expert[1]), expert[2], layer, stacks, config.experts)
        beside = re.fullmatch(r"mlp\.shared_expert\.(gate|up)_proj\.weight", part)
        if beside and config.experts is not None and self._family.experts == "granite":
            shared = config.experts.shared
            return Place("shared_mlp.input_linear.weight", shared * (beside[1] == "up"), (2 * shared, hidden))
        if expert and config.experts is not None and self._family.experts == "qwen":
            if self._has_columns(self._names(layer + _DOWN)):
                return self._in_columns(int(expert[1]), expert[2])
            return self._stacked(int(expert[1]), expert[2], layer, (_GATE_UP, _DOWN), config.experts)
        if expert and self._family.experts == "lfm2":
            return Place(f"feed_forward.experts.{expert[1]}.{_MIXTRAL[expert[2]]}.weight")
        if expert and self._family.experts == "nemotron":
            return Place(f"mixer.experts.{expert[1]}.{expert[2]}_proj.weight")
        if self._family.experts == "ernie" and part == "mlp.expert_bias":
            return Place("mlp.moe_statics.e_score_correction_bias", 0, (1, experts))
        if self._family.experts in ("mixtral", "minimax"):
            if expert:
                return Place(f"block_sparse_moe.experts.{expert[1]}.{_MIXTRAL[expert[2]]}.weight")
            return Place("block_sparse_moe.gate.weight") if part == "mlp.gate.weight" else None
        if self._family.experts == "gpt_oss":
            if expert and self._blocks and expert[2] == "down":
                return Place("mlp.experts.down_proj_blocks", int(expert[1]) * hidden, (experts, hidden, inner))
            if expert and self._blocks:
                turn = 2 * int(expert[1]) + (expert[2] == "up")
                return Place("mlp.experts.gate_up_proj_blocks", turn, (experts, 2 * inner, hidden))
            if expert:
                return self._in_columns(int(expert[1]), expert[2])
            if part in ("mlp.gate.weight", "mlp.gate.bias"):
                return Place(part.replace("gate", "router"))
            if found := re.fullmatch(r"mlp\.experts\.(gate|up|down)_proj\.bias", part):
                if found[1] == "down":
                    return Place("mlp.experts.down_proj_bias")
                return Place("mlp.experts.gate_up_proj_bias", found[1] == "up", (experts, 2 * inner))
        return None
