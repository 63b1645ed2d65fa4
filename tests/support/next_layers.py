"""Golden networks with an MTP layer, behind their last one: published folders have such a layer.

transformers reads none, so no golden data has one. Its own tensors are drawn from the stream of the network, and all
others are like those of the layer that it is made after.
"""

import copy
import json
import shutil

import numpy as np
from seeded_weights import seeded, stored, tensors_of, write

MADE_AFTER = {
    "qwen3_5": 1, "qwen3_5_moe": 1, "qwen3_next": 1, "glm4_moe": 2, "deepseek_v3": 2, "glm4_moe_lite": 2,
    "deepseek_v32": 2,
}
OWN = {
    "qwen": ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"),
    "": ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"),
}
SILENT = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight")  # what adds to the residual stream


def with_next_layer(name, folder, knows=False, vocab_size=None):
    """Write the folder of a golden network with an MTP layer; returns it.

    Args:
        knows: no layer adds anything to the embedding, so that this layer proposes what the network says.
        vocab_size: other than that of the golden network.
    """
    shutil.copytree(seeded(name), folder)
    config, spec = (json.loads((folder / f"{each}.json").read_text()) for each in ("config", "weights"))
    if vocab_size is not None:
        config["vocab_size"] = vocab_size
        for each in {"model.embed_tokens.weight", "lm_head.weight"} & set(spec["tensors"]):
            spec["tensors"][each][0][0] = vocab_size
    own, joint, norms = add_next_layer(name, config, spec)
    (folder / "config.json").write_text(json.dumps(config))
    qwen, hidden = name.startswith("qwen"), config["hidden_size"]
    tensors = tensors_of(spec)
    if knows:
        for each, (dtype, bits, _) in tensors.items():
            if each.endswith(SILENT):
                tensors[each] = dtype, 0 * bits, None
        eye = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], 1).astype(np.float32)
        tensors[own + joint] = spec["dtype"], *stored(eye, spec["dtype"])
        for each in (norms[0], norms[2]):
            same = "model.norm.weight" if each == norms[2] else None
            flat = np.full(hidden, 0.0 if qwen else 1.0, np.float32)
            tensors[own + each] = tensors[same] if same else (spec["dtype"], *stored(flat, spec["dtype"]))
    write(folder / "model.safetensors", tensors)
    return folder


def add_next_layer(name, config, spec):
    """Add an MTP layer to a configuration and to what its tensors are drawn by; what names of its own begin with, those
    of its matrix and of its norms."""
    layers, hidden, like = config["num_hidden_layers"], config["hidden_size"], MADE_AFTER[name]
    qwen = name.startswith("qwen")
    if name != "qwen3_next":  # whose files do not say how many there are
        config["mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers"] = 1
    prefix = "mtp.layers.0." if qwen else f"model.layers.{layers}."
    for old in [each for each in spec["tensors"] if each.startswith(f"model.layers.{like}.")]:
        spec["tensors"][prefix + old.removeprefix(f"model.layers.{like}.")] = copy.deepcopy(spec["tensors"][old])
    joint, *norms = OWN["qwen" if qwen else ""]
    own = "" if qwen else prefix
    spec["tensors"][own + joint] = [[hidden, 2 * hidden], hidden**-0.5, 0.0]
    for each in norms:
        spec["tensors"][own + each] = [[hidden], 0.2, 0.0 if qwen else 1.0]
    if not qwen:  # published files have copies of these, which nothing reads
        spec["tensors"] |= {
            f"{prefix}embed_tokens.weight": spec["tensors"]["model.embed_tokens.weight"],
            f"{prefix}shared_head.head.weight": spec["tensors"]["lm_head.weight"],
        }
    return own, joint, norms
