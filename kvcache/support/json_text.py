"""JSON of others: read so that other threads run meanwhile, with a limit of lists and objects."""

from __future__ import annotations

import json
import json.scanner
import re
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["MAX_NESTED", "TooManyNested", "begun_object", "json_fault", "read_json_text"]

MAX_NESTED = 1 << 16  # lists and objects of a large text
_LARGE = 1 << 16  # bytes of JSON, which take the scanner in C a few milliseconds
# A text up to its end or to a half escape, and whether it has ended; or a sign.
_PIECE = re.compile(r'"(?:[^"\\]+|\\[^u]|\\u[0-9a-fA-F]{4})*("?)|[{}\[\],:]', re.DOTALL)
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # of a character beyond U+FFFF


# The kind of an error, a part of its words, and what is said in their place.
_FAULTS: tuple[tuple[type[Exception], str, Callable[[Any], str]], ...] = (
    (UnicodeDecodeError, "", lambda error: f"bytes that are no {error.encoding}, from byte {error.start} on"),
    (RecursionError, "", lambda error: "too many lists and objects within one another"),
    (ValueError, "int_max_str_digits", lambda error: "a number of too many digits"),
)


class TooManyNested(ValueError):
    """A text has more lists and objects than may be."""


def read_json_text(data: str | bytes | bytearray) -> Any:
    """The value that a text of JSON stands for.

    Raises:
        TooManyNested: more than 65,536 lists and objects in a text of more than 64 KiB.
        ValueError, RecursionError: no JSON.
    """
    return json.loads(data, cls=_Patient if len(data) > _LARGE else None)


def json_fault(error: Exception) -> str:
    """The fault of a text that is no JSON, for the end of a message; no words of Python about its own limits.

    Args:
        error: that a reader of JSON raised.
    """
    said = str(error)
    return next((tell(error) for kind, part, tell in _FAULTS if isinstance(error, kind) and part in said), said)


def begun_object(text: str, *, whole: bool = False) -> dict[str, Any] | None:
    """The object that a text of JSON begins, which may end anywhere: what is open at the end is closed there.

    Args:
        text: of JSON.
        whole: leave out the value in which the text ends, of which nobody knows how it goes on.

    Returns:
        None: the text begins no object, or says more behind it.
    """
    closing, end, is_key, cut = list[str](), 0, False, ""
    for piece in _PIECE.finditer(text):
        sign = piece[0]
        if sign in "{[":
            closing.append("}" if sign == "{" else "]")
        elif sign in "}]" and (not closing or closing.pop() != sign):
            return None
        elif sign[0] == '"' and not piece[1]:
            cut = "" if is_key else _HALF.sub("", text[: piece.end()]) + '"'
            break
        if sign == ",":
            end = piece.start()
        elif sign != ":" and not (sign[0] == '"' and is_key):
            end = piece.end()
        is_key = sign == "{" or (sign == "," and bool(closing) and closing[-1] == "}")
        if not closing:
            break
    if not closing and text[end:].strip():
        return None
    ends = "".join(reversed(closing))
    for head in (text[:end],) if whole or not closing else (cut or text, text[:end]):
        try:
            if isinstance(found := read_json_text(head + ends), dict):
                return found
        except (ValueError, RecursionError):
            continue
    return None


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
