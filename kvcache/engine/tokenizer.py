"""The checkpoint's tokenizer, loaded with the optional `tokenizers` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcache.engine.files import read_file
from kvcache.errors import CheckpointError

__all__ = ["load_tokenizer"]

_MAX_BYTES = 256 * 2**20  # vocabularies of 256 000 tokens take 40 MB


def load_tokenizer(directory: Path) -> Any:
    """Load the `tokenizers.Tokenizer` of `tokenizer.json` in `directory`, or return None without such a file.

    Raises:
        ImportError: the package is not installed.
        CheckpointError: not a regular file, too large, or damaged.
    """
    path = directory / "tokenizer.json"
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
