"""The value that a text says by a schema, as networks write values in tags and bare words."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

from kvcache.sampling.dialects.argument_fit import ArgumentFit
from kvcache.sampling.dialects.argument_schema import ANY_TYPE, ArgumentSchema, is_of
from kvcache.sampling.dialects.call_errors import CALL_ERRORS
from kvcache.sampling.dialects.python_words import python_value

__all__ = ["DECODER", "json_value", "read_value"]


def _finite(digits: str) -> float | str:
    return found if math.isfinite(found := float(digits)) else digits


def _no_number(name: str) -> Any:
    raise ValueError(f"value: expected one of JSON, got {name}")


# Reads JSON; each value that it returns can be written as JSON again.
DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_number, strict=False)


def read_value(text: str, schema: Any, known: ArgumentSchema, *, guesses: bool = False) -> Any:
    """The value of a text: the first of its readings that is one by the schema, or else of one of its types.

    Its readings are JSON of another type than a text, the text itself, Python's words (True, None, .5, +3, 1_000, lists
    in them), and JSON of a text.

    Args:
        text: as it is written.
        schema: of the value.
        known: what its references lead to.
        guesses: whether JSON counts where the schema names no type; it is a text otherwise.
    """
    types = known.types(schema)
    if types == {"string"} or (types == ANY_TYPE and not guesses):
        return text
    found = _json_of(text)
    readings = [each for each in found if not isinstance(each, str)]
    readings += [text] if "string" in types else []
    readings += [] if found else _python_of(text)
    readings += [each for each in found if isinstance(each, str)]
    fit = ArgumentFit(known)
    for each in readings:
        if any(is_of(each, kind) for kind in types) and fit.fits(each, schema):
            return each
    typed = [each for each in readings if any(is_of(each, kind) for kind in types)]
    return next(iter((*typed, *found)), text)


def json_value(text: str) -> Any:
    """The value of a text in JSON, in which new lines and tabs within strings are taken as they are.

    A number beyond those of 64 bits is a text: it would come back as Infinity, which is no JSON.

    Raises:
        ValueError: it is none, or has half of a pair of surrogates, which clients cannot send back.
    """
    found = DECODER.decode(text)
    if "\\u" in text:
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _json_of(text: str) -> list[Any]:
    """The value in JSON; none: it is not JSON."""
    with suppress(ValueError, RecursionError):
        return [json_value(text.strip(" \t\r\n"))]
    return []


def _python_of(text: str) -> list[Any]:
    """The value in Python's words; none: there is none."""
    with suppress(*CALL_ERRORS):
        return [python_value(text)]
    return []
