"""The form that a body asks its answer to have."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvcache.errors import GrammarError
from kvcache.grammar import Grammar, json_schema
from kvcache.server.refusals import BodyError
from kvcache.support.arguments import as_instance, short

__all__ = ["INSTALL", "form_of", "grammar_refused", "knows_grammars", "response_format"]

INSTALL = "pip install 'kvcache-cpu[grammar]'"


def knows_grammars() -> bool:
    """Whether llguidance is installed."""
    return find_spec("llguidance") is not None


def response_format(value: Any, name: str) -> Grammar | None:
    """Read `response_format` of chat completions; see `form_of`. A schema of any object is llama.cpp's way."""
    kind = as_instance(value, dict, name).get("type")
    given = as_instance(value.get("json_schema"), dict, name) if kind == "json_schema" else value
    return form_of(kind, given.get("schema"), given.get("strict"), name)


def form_of(kind: Any, schema: Any, strict: Any, name: str = "response_format") -> Grammar | None:
    """The form that an answer is to have: text, which is None, any object of JSON, or JSON of a schema.

    Keywords of a schema that are not supported constrain nothing, unless it is `strict`.

    Raises:
        TypeError, BodyError: another form, no schema, or one beyond the limits; llguidance is not installed.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        schema, strict = schema or {"type": "object"}, False
    elif kind != "json_schema":
        message = f"{name}: expected type text, json_object or json_schema, got {short(kind)}"
        raise BodyError(message, "unsupported_parameter")
    if not knows_grammars():
        message = f"{name}: expected type text, since the server has no llguidance ({INSTALL}), got {short(kind)}"
        raise BodyError(message, "unsupported_parameter")
    try:
        return json_schema(schema, strict=as_instance(strict or False, bool, name))
    except GrammarError as error:
        raise grammar_refused(error, name) from None


def grammar_refused(error: GrammarError, name: str = "response_format") -> BodyError:
    """The error of a grammar as that of the field that it came from."""
    return BodyError(str(error).replace("grammar", name, 1), "invalid_json_schema")
