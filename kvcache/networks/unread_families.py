"""Networks that are known and not read: the parts that each has and this library has not."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["UNREAD", "UnreadFamily", "parts_missing"]


class UnreadFamily(NamedTuple):
    """One row of the table.

    Attributes:
        name: of the network, as its makers write it.
        classes: what `architectures` of its config.json may have.
        model_types: what `model_type` may have, of the whole network and of its text network.
        gguf: its architecture in GGUF files; "": llama.cpp has none.
        parts: what is missing.
    """

    name: str
    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    gguf: str
    parts: str


UNREAD = (
    UnreadFamily(
        "DeepSeek V4", ("DeepseekV4ForCausalLM",), ("deepseek_v4",), "deepseek4",
        "attention over compressed groups of tokens, hyper-connections and experts chosen by the token",
    ),
    UnreadFamily(
        "GLM-5.3-Flash", ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"), ("glm5_next", "glm5_next_text"),
        "",
        "latent attention over pooled groups that an indexer chooses, and hyper-connections",
    ),
    UnreadFamily(
        "Qwen4-Exp", ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"), ("qwen4_exp", "qwen4_exp_text"), "",
        "attention over blocks that an indexer chooses, hyper-connections and embeddings of n-grams",
    ),
)
_PARTS = {each: row.parts for row in UNREAD for each in (*row.classes, *row.model_types, row.gguf) if each}


def parts_missing(name: object) -> str:
    """The parts of the network of this class, model type or architecture of GGUF files; "": it is not in the table."""
    return _PARTS.get(name, "") if isinstance(name, str) else ""
