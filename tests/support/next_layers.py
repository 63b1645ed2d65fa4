"""Golden networks with an MTP layer, behind their last one: published folders have such a layer.

transformers reads none, so no golden data has one. Its own tensors are drawn from the stream of the network, and all
others are like those of the layers that it is made after.
"""

import copy
import json
import re
import shutil
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from seeded_weights import seeded, stored, tensors_of, write


class MadeAfter(NamedTuple):
    """How a network's MTP layer is made.

    Attributes:
        like: the layer of which its attention has the tensors, and the one of which its MLP has them.
        prefix: what names of its tensors begin with; "": those of a layer behind the last one.
        own: the matrix, and the norms of the token, of the hidden row and before the head; whole names if they begin
            with `mtp`.
        key: that of the number of such layers; "": files do not say it.
        renamed: parts of names that are others than in the layers before.
        says: other keys.
        less_one: whether norms are stored minus 1.
    """

    like: tuple[int, int]
    prefix: str = ""
    own: tuple[str, ...] = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    key: str = "num_nextn_predict_layers"
    renamed: tuple[str, str] = ("", "")
    says: Mapping = {}
    less_one: bool = False


_MTP = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
_NEAR_END = ("eh_proj", "enorm", "hnorm", "final_layernorm")
_QWEN = MadeAfter((1, 1), "mtp.layers.0.", _MTP, "mtp_num_hidden_layers", less_one=True)
MADE_AFTER = {
    "qwen3_5": _QWEN, "qwen3_5_moe": _QWEN, "qwen3_next": _QWEN._replace(key=""),
    **dict.fromkeys(("glm4_moe", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), MadeAfter((2, 2))),
    **dict.fromkeys(("hy_v3", "bailing_hybrid"), MadeAfter((3, 3), own=_NEAR_END)),
    "exaone_moe": MadeAfter((1, 0), "mtp.layers.0.", _MTP),  # with the window of the first layer
    "cohere2_moe": MadeAfter((4, 4)),  # of a layer that does not turn, where this one does
    "mimo_v2_flash": MadeAfter((1, 0), "model.mtp.layers.0.", _NEAR_END, "", ("post_attention", "pre_mlp")),
    "step3p7": MadeAfter((1, 0), own=("eh_proj", "enorm", "hnorm", "transformer.shared_head.norm"), says={
        "mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"],
    }, less_one=True),
}
SILENT = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight")  # what adds to the residual stream
_OF_MLP = re.compile(r"(mlp|moe|share_expert)\.")


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
    joint, *norms = add_next_layer(name, config, spec)
    (folder / "config.json").write_text(json.dumps(config))
    hidden = config.get("text_config", config)["hidden_size"]
    tensors = tensors_of(spec)
    if knows:
        for each, (dtype, bits, _) in tensors.items():
            if each.endswith(SILENT):
                tensors[each] = dtype, 0 * bits, None
        eye = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], 1).astype(np.float32)
        tensors[joint] = spec["dtype"], *stored(eye, spec["dtype"])
        for each in (norms[0], norms[2]):
            same = "model.norm.weight" if each == norms[2] else None
            flat = np.full(hidden, 0.0 if MADE_AFTER[name].less_one else 1.0, np.float32)
            tensors[each] = tensors[same] if same else (spec["dtype"], *stored(flat, spec["dtype"]))
    write(folder / "model.safetensors", tensors)
    return folder


def add_next_layer(name, config, spec):
    """Add an MTP layer to a configuration and to what its tensors are drawn by; the names of its matrix and norms."""
    row, texts = MADE_AFTER[name], config.get("text_config", config)
    layers, hidden = texts["num_hidden_layers"], texts["hidden_size"]
    texts |= row.says | ({row.key: 1} if row.key else {})
    prefix = row.prefix or f"model.layers.{layers}."
    for like, of_mlp in zip(row.like, (False, True), strict=True):
        stem = f"model.layers.{like}."
        for part in [each.removeprefix(stem) for each in spec["tensors"] if each.startswith(stem)]:
            if (_OF_MLP.match(part) is not None) == of_mlp:
                spec["tensors"][prefix + part.replace(*row.renamed)] = copy.deepcopy(spec["tensors"][stem + part])
    own = [f"{'' if each.startswith('mtp') else prefix}{each}.weight" for each in row.own]
    spec["tensors"][own[0]] = [[hidden, 2 * hidden], hidden**-0.5, 0.0]
    for each in own[1:]:
        spec["tensors"][each] = [[hidden], 0.2, 0.0 if row.less_one else 1.0]
    if "shared_head.norm" in row.own:  # published files have copies of these, which nothing reads
        head = spec["tensors"].get("lm_head.weight", spec["tensors"]["model.embed_tokens.weight"])
        spec["tensors"] |= {
            f"{prefix}embed_tokens.weight": spec["tensors"]["model.embed_tokens.weight"],
            f"{prefix}shared_head.head.weight": head,
        }
    return own
