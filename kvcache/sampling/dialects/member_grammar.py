"""The grammar of Gemma's words for values, by their schema; see `gemma_values.py` for what reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvcache.errors import GrammarError
from kvcache.sampling.dialects.call_texts import resolved
from kvcache.sampling.dialects.grammar_words import GrammarWords, checked_keywords, members_of
from kvcache.support.arguments import as_count

__all__ = ["MemberGrammar"]

_KEY = re.compile(r"[^:{}\[\],\s\"<]+")
_ANY_KEY = r"/[^:{}\[\],\s\"<]+/"
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KNOWN = {"type", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "definitions"}
_OF_TYPES: dict[str, set[str]] = {
    "integer": _NUMBERS, "number": _NUMBERS, "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_DEPTH = 50  # levels of a schema; deeper ones are any values


class MemberGrammar:
    """Adds the rules of values.

    Args:
        words: of the grammar; the first mark of its dialect that counts within calls quotes texts.
        root: the schema of all.
        strict: whether keywords that it cannot follow are refused, rather than ignored.
    """

    def __init__(self, words: GrammarWords, root: Mapping[str, Any], *, strict: bool) -> None:
        self._words, self._root, self._strict = words, root, strict
        self._quote = words.marks.dialect.more[0]
        self._known: dict[str, str] = {}  # the rule of each reference, which may be one to itself
        self._any = ""

    def object(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """The rule of an object."""
        if not isinstance(schema.get("properties"), dict) or not schema["properties"]:
            is_empty = schema.get("additionalProperties") is False
            return self._words.rule('"{" "}"') if is_empty else self._rule_of_any("object")
        properties, required = members_of(schema)
        pairs = [
            (f"{self._key(key)} {self.value(each, depth + 1)}", key in required) for key, each in properties.items()
        ]
        behind, rests = "", [""]  # what may follow behind each pair
        for pair, is_required in reversed(pairs):
            behind = self._words.rule(f'"," {pair} {behind}' if is_required else f'("," {pair})? {behind}')
            rests.insert(0, behind)
        firsts = []
        for number, (pair, is_required) in enumerate(pairs):
            firsts.append(f"{pair} {rests[number + 1]}")
            if is_required:
                break
        else:
            firsts.append('""')
        return self._words.rule(f'"{{" ({" | ".join(firsts)}) "}}"')

    def of_text(self, key: str, text: str) -> str:
        """The rule of an object of one text."""
        quote = self._words.mark(self._quote)
        return self._words.rule(f'"{{" {self._key(key)} {quote} {text} {quote} "}}"')

    def _key(self, key: str) -> str:
        if _KEY.fullmatch(key):
            return json.dumps(f"{key}:", ensure_ascii=False)
        return f'{self._text(key)} ":"'

    def _text(self, text: str) -> str:
        """A text between quotes. GrammarError: it has one."""
        if self._quote in text:
            raise GrammarError(f"grammar: expected a schema without {self._quote}, got one with it")
        quote = self._words.mark(self._quote)
        return f"{quote} {json.dumps(text, ensure_ascii=False)} {quote}" if text else f"{quote} {quote}"

    def value(self, schema: Any, depth: int) -> str:
        """The rule of a value."""
        if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            if reference not in self._known:
                self._known[reference] = name = self._words.reserve()
                self._words.define(name, self.value(resolved(schema, self._root), depth + 1))
            return self._known[reference]
        if not isinstance(schema, dict) or depth > _DEPTH:
            return self._rule_of_any("value")
        types = schema.get("type")
        kinds = [types] if isinstance(types, str) else [each for each in types or () if isinstance(each, str)]
        checked_keywords(schema, _KNOWN.union(*(_OF_TYPES.get(kind, set()) for kind in kinds)), strict=self._strict)
        if "const" in schema or isinstance(schema.get("enum"), list):
            return self._choice(map(self._literal, [schema["const"]] if "const" in schema else schema["enum"]))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self._choice(self.value(each, depth + 1) for each in schema[key])
        if not kinds:
            return self._rule_of_any("value")
        return self._choice(self._of_kind(kind, schema, depth) for kind in kinds)

    def _choice(self, rules: Iterable[str]) -> str:
        return self._words.rule(" | ".join(dict.fromkeys(rules)))

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, (dict, list)):
            raise GrammarError("grammar: expected texts and numbers in enum, got another value")
        return json.dumps(json.dumps(value))

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return f"{self._words.mark(self._quote)} {self._words.text_until(self._quote)}"
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        limits = {key: schema[key] for key in _NUMBERS & set(schema)}
        return self._words.json({"type": kind, **limits}, strict=self._strict)

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        item = self.value(schema.get("items"), depth + 1)
        least = as_count(schema.get("minItems", 0), "minItems")
        most = schema.get("maxItems")
        rest = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else max(as_count(most, "maxItems") - 1, 0)}}}'
        if most == 0:
            return self._words.rule('"[" "]"')
        return self._words.rule(f'"[" {item} {rest} "]"' if least else f'"[" ({item} {rest})? "]"')

    def _rule_of_any(self, kind: str) -> str:
        """The rule of any value, or of any object."""
        words = self._words
        if not self._any:
            self._any = name = words.reserve()
            text = f"{words.mark(self._quote)} {words.text_until(self._quote)}"
            scalar = words.json({"type": ["number", "boolean", "null"]}, strict=True)
            pair = words.rule(f'{_ANY_KEY} ":" {name}')
            words.define(f"{name}_object", f'"{{" ({pair} ("," {pair})*)? "}}"')
            words.define(name, f'{name}_object | "[" ({name} ("," {name})*)? "]" | {text} | {scalar}')
        return self._any if kind == "value" else f"{self._any}_object"
