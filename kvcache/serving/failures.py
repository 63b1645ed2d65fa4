"""Exceptions of a caller's code in a step, as errors of requests: also one that is no `Exception`.

Python runs signal handlers in the main thread. So an exception there that is no `Exception` may be an interrupt, such
as Ctrl-C, and leaves the step. In any other thread the code of a caller has raised it, and it ends requests as every
error does.
"""

from __future__ import annotations

from threading import current_thread, main_thread

__all__ = ["as_failure"]


def as_failure(error: BaseException, name: str) -> Exception:
    """The error of those whose code, called `name`, has raised `error`. What may be an interrupt is raised again."""
    if isinstance(error, Exception):
        return error
    if current_thread() is main_thread():
        raise error
    failure = RuntimeError(f"{name}: expected a result, got {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure.with_traceback(error.__traceback__)
