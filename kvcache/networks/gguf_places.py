"""Where the tensors of a network are in a GGUF file, and in which order their rows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.config import ModelConfig
from kvcache.networks.expert_sizes import ExpertSizes
from kvcache.networks.families import FAMILIES
from kvcache.networks.gguf_architectures import Architecture
from kvcache.networks.names import (
    DELTA_PART,
    EXPERT,
    HEAD_PART,
    LAYER,
    STREAM_END,
    Place,
    fused_place,
    key_head_place,
    key_head_rows,
    latent_order,
    paired_rows,
)
from kvcache.networks.recurrent_sizes import RecurrentSizes

__all__ = ["TENSOR_NAMES", "GgufPlaces"]

_BY_KEY_HEADS = ("ssm_ba.weight", "ssm_in.weight")  # of Qwen3-Next; the second one in its older files
_PARTS = ("gate", "up", "down")
TENSOR_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm", "input_layernorm": "attn_norm",
    "altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm",
    "altup.prediction_coefs": "altup_predict_coef", "altup.correction_coefs": "altup_correct_coef",
    "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm": "laurel_post_norm",
    "post_attention_layernorm": "ffn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "q_a", "q_b")},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in ("q", "k")},
    **{f"self_attn.{part}_a_layernorm": f"attn_{part}_a_norm" for part in ("q", "kv")},
    "self_attn.o_proj": "attn_output", "self_attn.gate_proj": "attn_gate",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k", "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in _PARTS},
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in _PARTS},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in _PARTS},
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.latent_in": "ffn_latent_down",
    "mlp.latent_out": "ffn_latent_up",
    **{name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm")}, "head_norm": "nextn.shared_head_norm",
    "mixer.in_proj": "ssm_in", "mixer.in_proj_qkv": "attn_qkv", "mixer.in_proj_z": "attn_gate",
    "mixer.in_proj_b": "ssm_beta", "mixer.in_proj_a": "ssm_alpha", "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm", "mixer.out_proj": "ssm_out",
}
# Whole names of vectors of a layer.
_WHOLE = {
    "mlp.expert_bias": "exp_probs_b.bias", "mixer.rate": "ssm_a", "mixer.dt_bias": "ssm_dt.bias", "mixer.D": "ssm_d",
    "self_attn.sinks": "attn_sinks.weight", "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}


class GgufPlaces(NamedTuple):
    """Finds the tensors of `names` in a file.

    Attributes:
        config: the network.
        architecture: of the file.
        has: whether the file has a tensor of a name.
    """

    config: ModelConfig
    architecture: Architecture
    has: Callable[[str], bool]

    def order(self, name: str, first: int, stop: int, place: Place) -> NDArray[np.int64] | None:
        """The rows of the file, from `place.first` on, for some of a tensor; None: they follow each other."""
        order = paired_rows(self.config, name, first, stop) if self.architecture.permuted else None
        if self.config.latent is not None and (inside := LAYER.fullmatch(name)):
            order = latent_order(self.config, inside[2], first, stop)
        if place.name.endswith(_BY_KEY_HEADS) and (part := DELTA_PART.search(name)) and self.config.recurrence:
            order = key_head_rows(self.config.recurrence, part[1], first, stop) - place.first
        return order

    def place(self, name: str) -> Place:
        """Where the tensor of a Hugging Face name is."""
        inside = LAYER.fullmatch(name)
        config = self.config
        if not inside and (end := STREAM_END.fullmatch(name)) and config.streams is not None:
            size, kind = config.hidden_size, {"projections": "proj", "unembed_projections": "unembd_proj"}[end[1]]
            return Place(f"altup_{kind}.weight", int(end[2]) * size, (config.streams.count - 1, size, size))
        if not inside:
            return Place(self._named(name))
        block, part = f"blk.{int(inside[1]) // (2 if config.paired else 1)}.", inside[2]
        if config.recurrence is not None and part.startswith("mixer."):
            return self._mixer(block, part, config.recurrence)
        if (expert := EXPERT.fullmatch(part)) and config.experts is not None:
            return self._expert(block, int(expert[1]), expert[2], config.experts)
        if (head := HEAD_PART.fullmatch(part)) and (sizes := config.latent) is not None:
            shape = {"k_b": (sizes.latent, sizes.plain), "v_b": (sizes.value, sizes.latent)}[head[1]]
            return Place(f"{block}attn_{head[1]}.weight", int(head[2]) * shape[0], (config.num_heads, *shape))
        qkv, gate_up = FAMILIES[config.architecture].fused
        gate_up = "" if self.has(f"{block}ffn_gate.weight") else gate_up
        qkv = qkv or "attn_qkv" * self.has(f"{block}attn_qkv.weight")
        fused = fused_place(config, part, qkv and f"{block}attn_qkv", gate_up and f"{block}ffn_up")
        if fused is not None:
            return fused
        if part in _WHOLE:
            return Place(f"{block}{_WHOLE[part]}")
        if part == "post_attention_layernorm.weight" and not config.mixers[int(inside[1])]:
            return Place(f"{block}attn_norm.weight")  # of a layer that is an MLP alone
        # llama.cpp's name for it in most networks, where it is before the MLP, is `ffn_norm`.
        after = config.norms_of(int(inside[1])) != "before" or self.architecture.post_attention_norm
        if part == "post_attention_layernorm.weight" and after:
            return Place(f"{block}post_attention_norm.weight")
        return Place(f"{block}{_WHOLE.get(part) or self._named(part)}")

    def _expert(self, block: str, expert: int, part: str, sizes: ExpertSizes) -> Place:
        """Where a matrix of an expert is: files stack all experts of a layer, some gate above up."""
        experts, width, rows = self.config.num_experts, sizes.latent or self.config.hidden_size, sizes.size
        if part == "down":
            return Place(f"{block}ffn_down_exps.weight", expert * width, (experts, width, rows))
        if self.has(both := f"{block}ffn_gate_up_exps.weight"):
            return Place(both, (2 * expert + (part == "up")) * rows, (experts, 2 * rows, width))
        return Place(f"{block}ffn_{part}_exps.weight", expert * rows, (experts, rows, width))

    def _mixer(self, block: str, part: str, sizes: RecurrentSizes) -> Place:
        """Where a tensor of a layer with a state is; some have other shapes than in folders."""
        delta, both = DELTA_PART.search(part), [f"{block}{each}" for each in _BY_KEY_HEADS]
        if delta and FAMILIES[self.config.architecture].by_key_heads and self.has(both[delta[1] not in "ba"]):
            return key_head_place(sizes, self.config.hidden_size, delta[1], *both)
        name, column = f"{block}{_WHOLE.get(part) or self._named(part)}", (sizes.heads, 1)
        shapes: dict[str, tuple[int, ...]] = {"mixer.conv1d.weight": (sizes.channels, sizes.taps)}
        if sizes.kind == "kimi":
            shapes["mixer.rate"] = column
        if sizes.kind == "mamba":
            shapes |= {"mixer.rate": column, "mixer.D": column}
            shapes["mixer.norm.weight"] = (sizes.groups, sizes.inner // sizes.groups)
        return Place(name, 0, shapes.get(part))

    def _named(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        return f"{self.architecture.parts.get(stem) or TENSOR_NAMES[stem]}.{kind}"
