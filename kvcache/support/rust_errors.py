"""Errors of packages in Rust, such as `tokenizers` and `llguidance`, raised as errors of this library.

They raise bare `Exception`s for most faults. Where Rust code panics, it raises an exception that is no `Exception`,
which would end a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["rust_errors"]

_PANIC = ("pyo3_runtime", "PanicException")  # a class that no module exports


@contextmanager
def rust_errors(as_error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise what a call of such a package raises, panics too, as the error that `as_error` makes of its text.

    A MemoryError stays one, and so does what is neither an `Exception` nor a panic.
    """
    try:
        yield
    except BaseException as error:
        is_panic = (type(error).__module__, type(error).__name__) == _PANIC
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic):
            raise
        raise as_error(str(error)) from None
