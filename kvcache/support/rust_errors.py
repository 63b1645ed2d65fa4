"""Errors of packages in Rust, such as `tokenizers` and `llguidance`, raised as errors of this library.

They raise bare `Exception`s for most faults. Where Rust code panics, it raises an exception that is no `Exception`,
which would end a thread.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["rust_errors"]

_PANIC = ("pyo3_runtime", "PanicException")  # a class that no module exports


class rust_errors:  # not by contextlib: each token of a stream passes through it
    """Raise what a call of a package in Rust raises, panics too, as the error that `as_error` makes of its text.

    A MemoryError stays one, and so does what is neither an `Exception` nor a panic.
    """

    __slots__ = ("_as_error",)

    def __init__(self, as_error: Callable[[str], Exception]) -> None:
        self._as_error = as_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or issubclass(kind, MemoryError):
            return
        if issubclass(kind, Exception) or (kind.__module__, kind.__name__) == _PANIC:
            raise self._as_error(str(error)) from None
