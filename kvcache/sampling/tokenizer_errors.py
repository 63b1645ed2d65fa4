"""Errors of the `tokenizers` package, raised as errors of this library.

The package raises bare `Exception` for most faults of a tokenizer. Where its Rust code panics, it raises an exception
that is no `Exception`, which would end a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcache.errors import CheckpointError

__all__ = ["decoded", "tokenizer_errors"]

_PANIC = ("pyo3_runtime", "PanicException")  # a class that no module exports


@contextmanager
def tokenizer_errors(name: str, expected: str) -> Iterator[None]:
    """Raise what a call of the package raises, panics too, as a CheckpointError: `name: expected ..., got ...`."""
    try:
        yield
    except BaseException as error:
        is_panic = (type(error).__module__, type(error).__name__) == _PANIC
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic):
            raise
        raise CheckpointError(f"{name}: expected {expected}, got an error: {error}") from None


def decoded(tokenizer: Any, ids: Sequence[int], **options: bool) -> str:
    """The text of tokens; `options` are those of the tokenizer's `decode`. CheckpointError: it fails at them."""
    with tokenizer_errors("tokenizer", "the text of tokens"):
        return str(tokenizer.decode(ids, **options))
