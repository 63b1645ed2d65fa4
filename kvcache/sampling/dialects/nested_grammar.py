"""The grammar of values whose objects and lists are tags within tags; see `nested_values.py` for what reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvcache.errors import GrammarError
from kvcache.sampling.dialects.argument_schema import ArgumentSchema
from kvcache.sampling.dialects.grammar_words import GrammarWords, checked_keywords, members_of
from kvcache.sampling.dialects.nested_values import ITEM
from kvcache.sampling.dialects.tag_style import TagStyle
from kvcache.sampling.dialects.value_choices import choices_of
from kvcache.support.arguments import as_count, short

__all__ = ["NestedGrammar"]

_OBJECT = {"type", "properties", "required", "additionalProperties"}
_ARRAY = {"type", "items", "minItems", "maxItems"}
_DEPTH = 50  # levels of a schema; deeper ones are any values


class NestedGrammar:
    """Adds the rules of a function.

    Args:
        words: of the grammar.
        style: the tags.
        known: the schema of all arguments, which references are within.
        strict: whether keywords that cannot be followed are refused, rather than ignored.
    """

    def __init__(self, words: GrammarWords, style: TagStyle, known: ArgumentSchema, *, strict: bool) -> None:
        self._words, self._style, self._known, self._strict = words, style, known, strict
        self._depth = 0
        self._rules: dict[tuple[int, str], str] = {}  # of schemas that have begun, which may have themselves within
        self._kept: list[Any] = []  # these schemas, whose ids stay their own

    def element(self, key: str, schema: Any, free: str = "") -> str:
        """A tag, the value and the tag behind it; `free`: the rule of a text that it is, or ""."""
        if not re.fullmatch(self._style.key_pattern, key):
            raise GrammarError(f"grammar: expected keys that this network can write, got {short(key)}")
        words, close = self._words, self._style.close_of(key)
        value = f"{free} {words.literal(close)}" if free else self._value(self._known.resolved(schema), close)
        return f"{words.literal(self._style.tag_of_key(key, ''))} {value}"

    def _value(self, schema: Any, close: str) -> str:
        """The rule of a value and the tag behind it."""
        place = id(schema), close
        if place not in self._rules:
            self._kept.append(schema)
            self._rules[place] = name = self._words.reserve()
            self._depth += 1
            self._words.define(name, self._body(schema if self._depth <= _DEPTH else {}, close))
            self._depth -= 1
        return self._rules[place]

    def _body(self, schema: Any, close: str) -> str:
        words, choices = self._words, choices_of(schema, self._known, strict=self._strict)
        if choices.is_text:
            return words.text_until(close)
        if any(close in each for each in choices.literals):
            raise GrammarError(f"grammar: expected a schema without {close}, got one with it")
        literals = " | ".join(words.literal(each) or '""' for each in choices.literals)
        texts = [f"({literals}) {words.literal(close)}"] if literals else []
        texts += [words.text_within(each, close, close) for each in choices.limits]
        if texts:  # where there may be a text, tags within it are one
            found = [self._json(each, close) for each in choices.others]
        else:
            found = [self._other(each, close) for each in choices.others] or [self._json(schema, close)]
        return " | ".join([*texts, *found])

    def _other(self, schema: Mapping[str, Any], close: str) -> str:
        """The rule of a value that is no text, by a schema without choices but those of types."""
        words, types, found = self._words, self._known.types(schema), list[str]()
        if "enum" in schema or "const" in schema:
            return self._json(schema, close)
        if "object" in types and schema.get("properties"):
            checked_keywords(schema, _OBJECT, strict=self._strict and types == {"object"})
            properties, required = members_of(schema)
            parts = [f"({self.element(key, each)}){'' if key in required else '?'}" for key, each in properties.items()]
            found.append(f"{' '.join(parts)} {words.literal(close)}")
            types -= {"object"}
        if "array" in types and "items" in schema:
            checked_keywords(schema, _ARRAY, strict=self._strict and types == {"array"})
            least, most = as_count(schema.get("minItems", 0), "minItems"), schema.get("maxItems")
            limits = f"{{{least},{'' if most is None else as_count(most, 'maxItems')}}}"
            found.append(f"({self.element(ITEM, schema['items'])}){limits} {words.literal(close)}")
            types -= {"array"}
        if types:
            found.append(self._json({**schema, "type": sorted(types)}, close))
        return " | ".join(found)

    def _json(self, schema: Any, close: str) -> str:
        return f"{self._words.value(self._known.contained(schema), strict=self._strict)} {self._words.literal(close)}"
