"""The grammar of values whose objects and lists are tags within tags; see `nested_values.py` for what reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvcache.errors import GrammarError
from kvcache.sampling.dialects.call_texts import resolved, types_of
from kvcache.sampling.dialects.grammar_words import GrammarWords, checked_keywords, members_of
from kvcache.sampling.dialects.nested_values import ITEM
from kvcache.sampling.dialects.tag_style import TagStyle
from kvcache.support.arguments import as_count, short

__all__ = ["NestedGrammar"]

_OBJECT = {"type", "properties", "required", "additionalProperties"}
_ARRAY = {"type", "items", "minItems", "maxItems"}


class NestedGrammar:
    """Adds the rules of a function.

    Args:
        words: of the grammar.
        style: the tags.
        root: the schema of all arguments, which references are within.
        strict: whether keywords that cannot be followed are refused, rather than ignored.
    """

    def __init__(self, words: GrammarWords, style: TagStyle, root: Mapping[str, Any], *, strict: bool) -> None:
        self._words, self._style, self._root, self._strict = words, style, root, strict
        self._rules: dict[tuple[int, str], str] = {}  # of schemas that have begun, which may have themselves within

    def element(self, key: str, schema: Any, free: str = "") -> str:
        """A tag, the value and the tag behind it; `free`: the rule of a text that it is, or ""."""
        if not re.fullmatch(self._style.key_pattern, key):
            raise GrammarError(f"grammar: expected keys that this network can write, got {short(key)}")
        words, close = self._words, self._style.close_of(key)
        value = f"{free} {words.literal(close)}" if free else self._value(resolved(schema, self._root), close)
        return f"{words.literal(self._style.tag_of_key(key, ''))} {value}"

    def _value(self, schema: Any, close: str) -> str:
        """The rule of a value and the tag behind it."""
        place = id(schema), close
        if place not in self._rules:
            self._rules[place] = name = self._words.reserve()
            self._words.define(name, self._body(schema if isinstance(schema, dict) else {}, close))
        return self._rules[place]

    def _body(self, schema: Mapping[str, Any], close: str) -> str:
        words, types = self._words, types_of(schema)
        literals = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(literals, list) and literals and not any(isinstance(each, (dict, list)) for each in literals):
            texts = [each if isinstance(each, str) else json.dumps(each) for each in literals]
            if any(close in each for each in texts):
                raise GrammarError(f"grammar: expected a schema without {close}, got one with it")
            return f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in texts)}) {words.literal(close)}"
        if not types or "string" in types:
            checked_keywords(schema, {"type", "anyOf", "oneOf"}, strict=self._strict)
            return words.text_until(close)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return " | ".join(self._value(resolved(each, self._root), close) for each in schema[key])
        if types == {"object"} and schema.get("properties"):
            checked_keywords(schema, _OBJECT, strict=self._strict)
            properties, required = members_of(schema)
            parts = [f"({self.element(key, each)}){'' if key in required else '?'}" for key, each in properties.items()]
            return f"{' '.join(parts)} {words.literal(close)}"
        if types == {"array"} and "items" in schema:
            checked_keywords(schema, _ARRAY, strict=self._strict)
            least, most = as_count(schema.get("minItems", 0), "minItems"), schema.get("maxItems")
            limits = f"{{{least},{'' if most is None else as_count(most, 'maxItems')}}}"
            return f"({self.element(ITEM, schema['items'])}){limits} {words.literal(close)}"
        found = {**schema, **{key: self._root[key] for key in ("$defs", "definitions") if key in self._root}}
        return f"{words.json(found, strict=self._strict)} {words.literal(close)}"
