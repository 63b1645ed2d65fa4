"""`Undoing`: what a failing block has begun is undone, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Undoing"]


class Undoing:
    """Calls `undo(*args)` if what runs inside fails. A generator would call it again when it is dropped."""

    def __init__(self, undo: Callable[..., object], *args: Any) -> None:
        self._undo, self._args = undo, args

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._undo(*self._args)
