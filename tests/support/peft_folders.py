"""Folders of adapters as peft writes them: random matrices for modules of a checkpoint."""

import json
import re

import numpy as np
from seeded_weights import golden_folder
from tensor_files import pack_arrays

from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.towers import Names

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PARTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")


def modules_of(network, parts=PARTS):
    """The modules that adapters may change, with their `(out, in)`, of a golden network by its name, or of a folder."""
    checkpoint, found = Checkpoint(golden_folder(network) if isinstance(network, str) else network), {}
    for tensor in checkpoint.names():
        path, inside = tensor.removesuffix(".weight"), Names.layer_of(tensor)
        dense = inside and re.fullmatch(r"(self_attn|mlp|feed_forward)\.(\w+)\.weight", inside[1])
        if dense and dense[2] in parts:
            found[path] = checkpoint.shape(tensor)
    return found


def adapter_arrays(modules, rank=4, seed=0, dtype=np.float32):
    """The tensors of an adapter by their names in its file; `rank` may be a function of a module's path."""
    random, found = np.random.default_rng(seed), {}
    for path, (rows, columns) in modules.items():
        each = rank(path) if callable(rank) else rank
        for side, shape in (("A", (each, columns)), ("B", (rows, each))):
            found[f"base_model.model.{path}.lora_{side}.weight"] = random.normal(0, 0.2, shape).astype(dtype)
    return found


def settings_of(modules, rank=4, **settings):
    """The object of `adapter_config.json`."""
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/network", "bias": "none",
        "inference_mode": True, "lora_dropout": 0.05, "r": rank, "lora_alpha": 6, "rank_pattern": {},
        "alpha_pattern": {}, "modules_to_save": None, "use_dora": False, "use_rslora": False,
        "target_modules": sorted({path.rpartition(".")[2] for path in modules}),
    }
    return said | settings


def write_adapter(folder, modules, rank=4, seed=0, arrays=None, dtype=np.float32, **settings):
    """Write a folder; `arrays` and `settings` are its tensors and keys of its configuration in place of others."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(settings_of(modules, rank, **settings)))
    found = adapter_arrays(modules, rank, seed, dtype) if arrays is None else arrays
    (folder / TENSORS).write_bytes(pack_arrays(found))
    return folder
