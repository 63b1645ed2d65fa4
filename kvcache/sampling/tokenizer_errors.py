"""Errors of the `tokenizers` package, raised as errors of this library."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.support.rust_errors import rust_errors

__all__ = ["decoded", "tokenizer_errors"]


def tokenizer_errors(name: str, expected: str) -> AbstractContextManager[None]:
    """Raise what a call of the package raises, panics too, as a CheckpointError: `name: expected ..., got ...`."""
    return rust_errors(lambda error: CheckpointError(f"{name}: expected {expected}, got an error: {error}"))


def decoded(tokenizer: Any, ids: Sequence[int], **options: bool) -> str:
    """The text of tokens; `options` are those of the tokenizer's `decode`. CheckpointError: it fails at them."""
    try:  # without a context: each token of a stream passes here
        return str(tokenizer.decode(ids, **options))
    except BaseException:
        with tokenizer_errors("tokenizer", "the text of tokens"):
            raise
