"""Make the golden adapters: random ones of golden networks as peft writes them, and what it makes of a text.

Run by hand, once, with torch, transformers and peft installed; the tests only read its output:

    python tests/golden/make_adapters.py

Each folder of `adapters` is one that peft saved, for the golden network of `adapter_config.json`, and `golden.npz`:

    tokens   uint32 (n,)
    logits   float32 (n, vocabulary)   of peft in float64
    plain    float32 (vocabulary,)     of the last token without the adapter
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parent
ADAPTERS = GOLDEN / "adapters"
LENGTH = 21
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}),
    "patterns": ("qwen2", {
        "r": 3, "lora_alpha": 5, "use_rslora": True, "rank_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 9}, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj", "gate_proj"],
    }),
    "windows": ("gemma3", {
        "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1],
    }),
    "activated": ("llama", {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "alora_invocation_tokens": [7, 8],
    }),
}


def make(name: str, network: str, settings: dict[str, Any]) -> None:
    """Write one folder."""
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / network, dtype=torch.float64)
    rng = np.random.default_rng(3)
    tokens = rng.integers(3, model.config.vocab_size, LENGTH).astype(np.uint32)
    if invocation := settings.get("alora_invocation_tokens"):
        tokens[9 : 9 + len(invocation)] = invocation
    given = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        plain = model(given).logits[0, -1]
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1, **settings)).eval()
        for key, each in adapted.named_parameters():
            if "lora_" in key:
                each.copy_(torch.randn_like(each).mul_(0.3).to(torch.float16))
        logits = adapted(given).logits[0]
    folder = ADAPTERS / name
    shutil.rmtree(folder, ignore_errors=True)
    adapted.peft_config["default"].base_model_name_or_path = network
    adapted.half().save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    arrays = {"logits": logits, "plain": plain}
    np.savez_compressed(folder / "golden.npz", tokens=tokens, **{
        key: each.numpy().astype(np.float32) for key, each in arrays.items()
    })


if __name__ == "__main__":
    for name, (network, settings) in SETTINGS.items():
        make(name, network, settings)
