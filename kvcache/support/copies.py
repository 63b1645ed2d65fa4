"""Objects with memory and locks of their own, which `copy` and `pickle` refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["refuse_copies"]


def refuse_copies(instead: str) -> Callable[[Any, Any], NoReturn]:
    """A `__reduce_ex__` that raises TypeError: a copy would be a second object over the same memory and lock.

    Args:
        instead: what to do, the end of the message.
    """

    def __reduce_ex__(self: Any, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: expected no copy and no pickle of it, got a call for one; {instead}")

    return __reduce_ex__
