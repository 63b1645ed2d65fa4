"""Values of MiniMax-M3, whose objects and lists are tags within tags: `<key>..</key>`, `<item>..</item>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcache.sampling.dialects.call_texts import NoCall, resolved, typed, types_of
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


def nested_value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that stands between two tags.

    Args:
        text: between them.
        schema: of the value: one that may be a text is all of it.
        root: the schema that references are within.

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
    return _value_of(outer, schema, root)


def _value_of(element: _Element, schema: Any, root: Mapping[str, Any]) -> Any:
    found, text = resolved(schema, root), "".join(element.texts)
    types, found = types_of(found), found if isinstance(found, dict) else {}
    if not element.inner:
        if not text.strip() and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        return typed(text, found, guesses=True)
    if text.strip():
        raise NoCall
    if all(each.name == ITEM for each in element.inner) and (not types or "array" in types):
        return [_value_of(each, found.get("items"), root) for each in element.inner]
    properties = found.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {each.name: _value_of(each, known.get(each.name), root) for each in element.inner}
