"""The text side of a checkpoint: its tokenizer, for the optional `tokenizers` package, and its chat template."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from kvcache.core.arguments import short
from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile
from kvcache.gguf.tokenizer import build_tokenizer
from kvcache.gguf.vocabulary import chat_template
from kvcache.networks.files import read_file, read_json

__all__ = ["CheckpointText", "GgufText"]

_MAX_BYTES = 256 * 2**20  # vocabularies of 256 000 tokens take 40 MB


class CheckpointText:
    """Tokenizer and chat template of a Hugging Face checkpoint directory, each loaded on first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of `tokenizer.json`, or None without such a file.

        Raises:
            ImportError: the package is not installed.
            CheckpointError: not a regular file, too large, or damaged.
        """
        path = self._directory / "tokenizer.json"
        if not path.exists():
            return None
        data = read_file(path, _MAX_BYTES)
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError(f"{path} needs the tokenizers package: pip install 'kvcache-cpu[text]'") from None
        try:
            return Tokenizer.from_buffer(bytes(data))
        except Exception as error:  # the package raises bare Exception for any fault of the file
            raise CheckpointError(f"{path}: expected a tokenizer of the tokenizers package, got {error}") from None

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja template of `tokenizer_config.json`, or None. Of several, the one named "default".

        Raises:
            CheckpointError: a damaged file.
        """
        path = self._directory / "tokenizer_config.json"
        found = read_json(path, _MAX_BYTES).get("chat_template") if path.exists() else None
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        if not isinstance(found, (str, type(None))):
            raise CheckpointError(f"{path}: chat_template: expected a string, got {short(found)}")
        return found


class GgufText:
    """Tokenizer and chat template of a GGUF file, each loaded on first use."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of the file, or None if it has none; raises as that of `CheckpointText`."""
        return build_tokenizer(GgufFile(self._path))

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja template of the file, or None; raises as that of `CheckpointText`."""
        return chat_template(GgufFile(self._path))
