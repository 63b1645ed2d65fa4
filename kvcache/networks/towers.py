"""Text networks inside larger ones: the part of a `config.json` that describes them, and the names of their tensors.

A checkpoint that also takes images or sounds has a tower for each kind of input. That of texts is one of `FAMILIES`:
`text_config` describes it, and its tensors have a prefix. Without an image the others take no part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.support.arguments import short

__all__ = ["TOWERS", "Names", "text_config_of"]


@dataclass(frozen=True, slots=True)
class Tower:
    """One row of the table.

    Attributes:
        model_type: the name in config.json.
        texts: the model types that the text network may have, and the families that these are. If `text_config` does
            not say, it is the first one.
        tied: whether the head is the embedding, if neither part of config.json says.
        flat: whether older files have the keys of `text_config` beside it.
        fixed: keys of the family that `text_config` does not have.
        defaults: of keys that `text_config` leaves out, where they are others than those of the family.
    """

    model_type: str
    texts: Mapping[str, str]
    tied: bool = False
    flat: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


TOWERS = {
    "Gemma4ForConditionalGeneration": Tower("gemma4", {"gemma4_text": "gemma4_text"}, tied=True),
    "Gemma4UnifiedForConditionalGeneration": Tower(
        "gemma4_unified", {"gemma4_unified_text": "gemma4_unified_text"}, tied=True
    ),
    "Gemma3ForConditionalGeneration": Tower("gemma3", {"gemma3_text": "gemma3_text"}, tied=True),
    **{name: Tower("kimi_k25", {"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"}, tied=True) for name in (
        "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration",  # as published, as transformers names it
    )},
    "Llama4ForConditionalGeneration": Tower("llama4", {"llama4_text": "llama4_text"}),
    "Mistral3ForConditionalGeneration": Tower(
        "mistral3", {"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"}, tied=True
    ),
    "Qwen2_5_VLForConditionalGeneration": Tower(
        "qwen2_5_vl", {"qwen2_5_vl_text": "qwen2"}, flat=True,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "MuseGlimmerForConditionalGeneration": Tower("muse_glimmer", {"muse_glimmer_text": "muse_glimmer_text"}),
    "Qwen3_5ForConditionalGeneration": Tower("qwen3_5", {"qwen3_5_text": "qwen3_5_text"}),
    "Qwen3_5MoeForConditionalGeneration": Tower("qwen3_5_moe", {"qwen3_5_moe_text": "qwen3_5_moe_text"}),
    "Qwen3VLForConditionalGeneration": Tower(
        "qwen3_vl", {"qwen3_vl_text": "qwen3"}, defaults={"rope_theta": 5e5},
    ),
    "Qwen3VLMoeForConditionalGeneration": Tower(
        "qwen3_vl_moe", {"qwen3_vl_moe_text": "qwen3_moe"}, fixed={"norm_topk_prob": True}, defaults={
            "num_key_value_heads": 16, "rope_theta": 5e5, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
    ),
}
_BY_TYPE = {tower.model_type: tower for tower in TOWERS.values()}
# Keys of the whole network, which come before those of its text network.
_OF_THE_WHOLE = ("quantization_config", "compression_config", "eos_token_id")
# From the names of a text network to those in a checkpoint: as transformers 4 and 5 write them.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")  # the last one: saved without a head
_HEADS = {"language_model.model.": "language_model.lm_head.weight"}
_LAYERS = ("layers.", "blocks.")  # the second one of Kimi K2.5, as transformers writes it
# A tensor of a layer of the text network; the last prefix is Nemotron's.
_INSIDE = re.compile(rf"(?:{'|'.join(map(re.escape, (*_PREFIXES, 'backbone.')))})(?:layers|blocks)\.(\d{{1,9}})\.(.+)")
_TOWERS = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector.", "visual.", "audio_tower.",
    "embed_vision.", "embed_audio.", "vision_adapter.", "vision_projection.",
)
_MTP = "mtp."  # MTP layers
_OTHERS = (*_TOWERS, *(f"model.{name}" for name in _TOWERS), _MTP, "model.mtp_", "model.mtp.")  # of ERNIE, MiMo


def text_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text network: `text_config` of a checkpoint with several towers, else `config`.

    Raises:
        CheckpointError: `text_config` is no object, or describes a network that is not known for this checkpoint.
    """
    named, model_type = config.get("architectures"), config.get("model_type")
    if named:
        one = isinstance(named, list) and len(named) == 1 and isinstance(named[0], str)
        tower = TOWERS.get(named[0]) if one else None
    else:
        tower = _BY_TYPE.get(model_type) if isinstance(model_type, str) else None
    if tower is None:
        return config
    text = config.get("text_config")
    if text is None and tower.flat:
        text = {key: value for key, value in config.items() if key != "model_type"}
    if not isinstance(text, dict):
        raise CheckpointError(f"text_config: expected an object, got {short(text)}")
    found = text.get("model_type") or next(iter(tower.texts))
    if not isinstance(found, str) or found not in tower.texts:
        raise CheckpointError(f"text_config.model_type: expected {' or '.join(tower.texts)}, got {short(found)}")
    absent = {key: value for key, value in tower.defaults.items() if key not in text}
    whole = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    tied = config.get("tie_word_embeddings")
    whole["tie_word_embeddings"] = tower.tied or text.get("tie_word_embeddings") if tied is None else tied
    return {**text, **absent, **whole, **tower.fixed, "architectures": None, "model_type": tower.texts[found]}


class Names:
    """The names in a checkpoint of the tensors of its text network.

    Args:
        has: whether the checkpoint has a tensor of a name.

    Attributes:
        is_headless: whether the network was saved without its head, as those that make vectors of texts are.
    """

    def __init__(self, has: Callable[[str], bool]) -> None:
        self._prefix = next((prefix for prefix in _PREFIXES if has(f"{prefix}embed_tokens.weight")), _PREFIXES[0])
        self.is_headless = not self._prefix and not has("lm_head.weight")
        others = (each for each in _LAYERS if has(f"{self._prefix}{each}0.input_layernorm.weight"))
        self._layers = next(others, _LAYERS[0])

    def __call__(self, name: str) -> str:
        """The name in the checkpoint of the text network's tensor `name`."""
        if name.startswith(_PREFIXES[0]):
            inside = name.removeprefix(_PREFIXES[0])
            if inside.startswith(_LAYERS[0]):
                inside = self._layers + inside.removeprefix(_LAYERS[0])
            return self._prefix + inside
        if name.startswith(_MTP):
            return name
        return _HEADS.get(self._prefix, name)

    @staticmethod
    def layer_of(name: str) -> tuple[int, str] | None:
        """The layer of the text network that a tensor of a checkpoint belongs to, and its name there; None: none."""
        found = _INSIDE.match(name)
        return (int(found[1]), found[2]) if found else None

    @staticmethod
    def is_of_another_tower(name: str) -> bool:
        """Whether the tensor of this name belongs to a network for images, or to one for draft tokens."""
        return name.startswith(_OTHERS)
