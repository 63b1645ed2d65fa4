"""How far a call over many texts is: a bar in a terminal, or a function of the caller's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Progress", "shown"]

Progress = bool | Callable[[int, int], object]

_WIDTH = 40  # characters of the bar


@contextmanager
def shown(progress: Progress, total: int) -> Iterator[Callable[[int], object]]:
    """A function of how many of `total` are done, that shows it as `progress` says.

    Raises:
        TypeError: neither a bool nor a function.
    """
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress: expected a bool or a function, got {type(progress).__name__}")
    if callable(progress):
        yield lambda done: progress(done, total)
    elif progress and total and sys.stderr.isatty():
        _draw(0, total)
        try:
            yield lambda done: _draw(done, total)
        finally:
            print(file=sys.stderr)
    else:
        yield lambda _: None


def _draw(done: int, total: int) -> None:
    filled = _WIDTH * done // total
    print(f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {done} of {total}", end="", file=sys.stderr, flush=True)
