"""JSON, written piece by piece while its parts are made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["JsonObject", "pieces", "written"]

_PIECE = 1 << 15  # characters, which take a few milliseconds


class JsonObject(dict[str, Any]):
    """An object of JSON whose values may be made while it is written: iterators, which become arrays, and others of its
    kind.
    """


def written(value: Any) -> Iterator[str]:
    """The JSON of a value, in parts. It is ASCII, whatever is in a text."""
    if isinstance(value, JsonObject):
        separator = "{"
        for name, each in value.items():
            yield f"{separator}{json.dumps(name)}: "
            yield from written(each)
            separator = ", "
        yield "}" if value else "{}"
    elif isinstance(value, Iterator):
        yield "["
        separator = ""
        for each in value:
            yield separator
            yield from written(each)
            separator = ", "
        yield "]"
    else:
        yield json.dumps(value)


def pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a value, in pieces that each take milliseconds to make."""
    found: list[str] = []
    size = 0
    for part in written(value):
        found.append(part)
        size += len(part)
        if size >= _PIECE:
            yield "".join(found).encode()
            found, size = [], 0
    yield "".join(found).encode()
