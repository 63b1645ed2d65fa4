"""The form that a body asks its answer to have."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvcache.errors import GrammarError
from kvcache.grammar import Grammar, json_schema
from kvcache.server.refusals import BodyError
from kvcache.support.arguments import as_instance, short

__all__ = ["INSTALL", "grammar_refused", "knows_grammars", "response_format"]

INSTALL = "pip install 'kvcache-cpu[grammar]'"


def knows_grammars() -> bool:
    """Whether llguidance is installed."""
    return find_spec("llguidance") is not None


def response_format(value: Any, name: str) -> Grammar | None:
    """Read the form that an answer is to have: text, which is None, any object of JSON, or JSON of a schema.

    Keywords of a schema that are not supported constrain nothing, unless it says `strict`.

    Raises:
        TypeError, BodyError: another form, no schema, or one beyond the limits; llguidance is not installed.
    """
    kind = as_instance(value, dict, name).get("type")
    if kind == "text":
        return None
    strict = False
    if kind == "json_object":
        schema = value.get("schema") or {"type": "object"}  # one beside it is llama.cpp's way
    elif kind == "json_schema":
        given = as_instance(value.get("json_schema"), dict, name)
        schema, strict = given.get("schema"), as_instance(given.get("strict") or False, bool, name)
    else:
        message = f"{name}: expected type text, json_object or json_schema, got {short(kind)}"
        raise BodyError(message, "unsupported_parameter")
    if not knows_grammars():
        message = f"{name}: expected type text, since the server has no llguidance ({INSTALL}), got {short(kind)}"
        raise BodyError(message, "unsupported_parameter")
    try:
        return json_schema(schema, strict=strict)
    except GrammarError as error:
        raise grammar_refused(error, name) from None


def grammar_refused(error: GrammarError, name: str = "response_format") -> BodyError:
    """The error of a grammar as that of the field that it came from."""
    return BodyError(str(error).replace("grammar", name, 1), "invalid_json_schema")
