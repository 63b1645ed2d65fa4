"""The checkpoint's tokenizer, through the `tokenizers` package where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcache.errors import CheckpointError

__all__ = ["load_tokenizer"]


def load_tokenizer(directory: Path) -> Any:
    """The `tokenizers.Tokenizer` of `tokenizer.json` in `directory`, or None where there is no such file.

    Raises:
        ImportError: the package is not installed.
        CheckpointError: the file is damaged.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError(f"{path} needs the tokenizers package: pip install 'kvcache[text]'") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for whatever is wrong with the file
        raise CheckpointError(f"{path}: {error}") from None
