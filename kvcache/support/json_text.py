"""JSON of others: read so that other threads run meanwhile, with a limit of lists and objects."""

from __future__ import annotations

import json
import json.scanner
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["MAX_NESTED", "TooManyNested", "read_json_text"]

MAX_NESTED = 1 << 16  # lists and objects of a large text
_LARGE = 1 << 16  # bytes of JSON, which take the scanner in C a few milliseconds


class TooManyNested(ValueError):
    """A text has more lists and objects than may be."""


def read_json_text(data: str | bytes | bytearray) -> Any:
    """The value that a text of JSON stands for.

    Raises:
        TooManyNested: more than 65,536 lists and objects in a text of more than 64 KiB.
        ValueError, RecursionError: no JSON.
    """
    return json.loads(data, cls=_Patient if len(data) > _LARGE else None)


class _Patient(json.JSONDecoder):
    """Reads JSON with the scanner in Python, which lets other threads run; the one in C holds the GIL for a second.

    A collection of hundreds of thousands of lists would hold it too.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._left = MAX_NESTED
        self.parse_array = partial(self._counted, self.parse_array)  # type: ignore[has-type]
        self.parse_object = partial(self._counted, self.parse_object)  # type: ignore[has-type]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, read: Callable[..., Any], *arguments: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TooManyNested(f"expected at most {MAX_NESTED} lists and objects, got more")
        return read(*arguments)
