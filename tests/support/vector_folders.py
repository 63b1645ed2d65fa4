"""Folders of networks that make vectors, or scores, of texts: a golden layout, and the weights of a golden network."""

import json
import shutil

from places import GOLDEN
from tensor_files import pack_arrays

from kvcache.networks.safetensors import SafetensorsFile

VECTORS = GOLDEN / "vectors"
# Layouts of networks whose tokens see later ones: EmbeddingGemma, and others without and with windows.
BOTH_WAYS = ("gemma", "both", "windows")
_NETWORKS = {"gemma": "gemma3", "windows": "mistral_window"}
TEXTS = json.loads((VECTORS / "texts.json").read_text())


def vector_folder(folder, layout):
    """A folder of a layout; all but `rerank` have a network without its head."""
    made, network = folder / layout, GOLDEN / _NETWORKS.get(layout, "qwen3_tied")
    shutil.copytree(VECTORS / layout, made)
    if layout == "rerank":
        for name in ("config.json", "model.safetensors"):
            shutil.copy(network / name, made / name)
        return made
    file = SafetensorsFile(network / "model.safetensors")
    arrays = {name.removeprefix("model."): file.read(name) for name in file}
    (made / "model.safetensors").write_bytes(pack_arrays(arrays))
    return made


def changed(folder, file, **entries):
    """Change entries of a file of JSON; None removes one."""
    path = folder / file
    content = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
