"""Values of MiniMax-M3, whose objects and lists are tags within tags: `<key>..</key>`, `<item>..</item>`."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvcache.sampling.dialects.argument_schema import ANY_TYPE, ArgumentSchema
from kvcache.sampling.dialects.argument_values import read_value
from kvcache.sampling.dialects.call_errors import NoCall
from kvcache.sampling.dialects.tag_style import NESTED_WORD

__all__ = ["ITEM", "nested_value"]

ITEM = "item"  # the name of what a list has
_MOST_LEVELS = 64
_TAG = re.compile(rf"{re.escape(NESTED_WORD)}<(/?)([^<>/\s](?:[^<>\n]*[^<>\s])?)>")


class _Element(NamedTuple):
    """A tag, its text and the tags within it."""

    name: str
    texts: list[str]
    inner: list[_Element]


def nested_value(text: str, schema: Any, known: ArgumentSchema) -> Any:
    """The value that stands between two tags.

    Args:
        text: between them.
        schema: of the value: one that may be a text is all of it.
        known: what its references lead to.

    Raises:
        NoCall: tags that do not close each other, or beside a text.
    """
    outer = _Element("", [], [])
    open_ones, at = [outer], 0
    for found in _TAG.finditer(text):
        open_ones[-1].texts.append(text[at : found.start()])
        at = found.end()
        if not found[1]:
            element = _Element(found[2], [], [])
            open_ones[-1].inner.append(element)
            open_ones.append(element)
        elif open_ones.pop().name != found[2] or not open_ones:
            raise NoCall
        if len(open_ones) > _MOST_LEVELS:
            raise NoCall
    outer.texts.append(text[at:])
    if len(open_ones) != 1:
        raise NoCall
    return _value_of(outer, schema, known)


def _value_of(element: _Element, schema: Any, known: ArgumentSchema) -> Any:
    types, text = known.types(schema), "".join(element.texts)
    if not element.inner:
        if not text.strip() and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        return read_value(text, schema, known, guesses=True)
    if text.strip():
        raise NoCall
    if all(each.name == ITEM for each in element.inner) and (types == ANY_TYPE or "array" in types):
        return [_value_of(each, known.items_of(schema), known) for each in element.inner]
    return {each.name: _value_of(each, known.property_of(each.name, schema), known) for each in element.inner}
