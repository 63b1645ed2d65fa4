"""Make `defaults.json`: what classes of the transformers library hold where a config.json says nothing.

Run by hand with torch and transformers installed; the tests only read its output:

    python tests/golden/make_defaults.py

    families  for each model type of `FAMILIES` that the library has, the keys of a configuration that names the number
              of layers alone
    towers    for each larger network of `TOWERS`, `[own keys, keys of its text network]` for each kind of that
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcache.networks.families import FAMILIES
from kvcache.networks.towers import TOWERS

LAYERS = 8
# What some families have to name beside: their own values are none that a network can have.
NAMED = {
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "granitemoehybrid": {"num_hidden_layers": LAYERS, "layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "gemma3n_text": {"num_hidden_layers": 20},  # the last 15 read K and V of others
    "glm4_moe": {"num_hidden_layers": LAYERS, "head_dim": 128},
    "dots1": {
        "num_hidden_layers": LAYERS, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    },
}
# Keys that change no text, or no result of a trained network.
NEEDLESS = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "classifier_pdrop", "embd_pdrop", "embedding_dropout", "hidden_dropout", "hidden_dropout_prob", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "mamba_chunk_size", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop",
    "residual_dropout", "return_dict", "router_aux_loss_coef", "transformers_version",
    "use_cache", "use_mamba_kernels", "chunk_size",
}


def keys_of(config: Any) -> dict[str, Any]:
    """The keys of a configuration of the library, as it saves them."""
    return {key: value for key, value in sorted(config.to_dict().items()) if key not in NEEDLESS}


def family(model_type: str) -> dict[str, Any] | None:
    """The keys of a family; None: the library has it not."""
    if model_type not in CONFIG_MAPPING:
        return None
    return keys_of(CONFIG_MAPPING[model_type](**NAMED.get(model_type, {"num_hidden_layers": LAYERS})))


def tower(model_type: str, text: str) -> list[dict[str, Any]]:
    """The keys of a larger network, and of its text network."""
    texts = {"model_type": text, **NAMED.get(text, {"num_hidden_layers": LAYERS})}
    whole = keys_of(CONFIG_MAPPING[model_type](text_config=texts))
    inside = whole.pop("text_config")
    own = {key: value for key, value in whole.items() if not key.endswith("_config") and "token" not in key}
    return [own, {key: value for key, value in sorted(inside.items()) if key not in NEEDLESS}]


def main() -> None:
    """Write the file."""
    families = {each.model_type: family(each.model_type) for each in FAMILIES.values()}
    towers = {
        kind.model_type: {text: tower(kind.model_type, text) for text in kind.texts if text in CONFIG_MAPPING}
        for kind in TOWERS.values()
    }
    rows = [f'"transformers": {json.dumps(transformers.__version__)}']
    for name, found in (("families", families), ("towers", towers)):
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in found.items() if each)
        rows.append(f'"{name}": {{\n{lines}\n}}')
    (Path(__file__).parent / "defaults.json").write_text("{" + ",\n".join(rows) + "}\n")


if __name__ == "__main__":
    main()
