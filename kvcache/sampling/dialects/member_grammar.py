"""The grammar of Gemma's words for values, by their schema; see `gemma_values.py` for what reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvcache.errors import GrammarError
from kvcache.sampling.dialects.argument_schema import ArgumentSchema
from kvcache.sampling.dialects.grammar_words import GrammarWords, checked_keywords, members_of
from kvcache.sampling.dialects.value_choices import ValueChoices, choices_of
from kvcache.support.arguments import as_count

__all__ = ["MemberGrammar"]

_KEY = re.compile(r"[^:{}\[\],\s\"<]+")
_ANY_KEY = r"[^:{}\[\],\s\"<\x00-\x1f]+"
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_TYPES: dict[str, set[str]] = {
    "integer": _NUMBERS, "number": _NUMBERS, "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"}, "string": {"minLength", "maxLength", "pattern"},
}
_DEPTH = 50  # levels of a schema; deeper ones are any values


class MemberGrammar:
    """Adds the rules of values.

    Args:
        words: of the grammar; the first mark of its dialect that counts within calls quotes texts.
        known: the schema of all arguments.
        strict: whether keywords that it cannot follow are refused, rather than ignored.
    """

    def __init__(self, words: GrammarWords, known: ArgumentSchema, *, strict: bool) -> None:
        self._words, self._known, self._strict = words, known, strict
        self._quote = words.marks.dialect.more[0]
        self._rules: dict[int, str] = {}  # of schemas that have begun, which may have themselves within
        self._kept: list[Any] = []  # these schemas, whose ids stay their own
        self._any = ""

    def object(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """The rule of an object."""
        properties, required = members_of(schema)
        more = schema.get("additionalProperties")
        if not properties and not isinstance(more, dict):
            return self._words.rule('"{" "}"') if more is False else self._rule_of_any("object")
        pairs = [
            (f"{self._key(key)} {self.value(each, depth + 1)}", key in required) for key, each in properties.items()
        ]
        behind, rests = "", [""]  # what may follow behind each pair
        other = ""
        if isinstance(more, dict):
            other = f'{self._words.other_than(properties, _ANY_KEY)} ":" {self.value(more, depth + 1)}'
            rests = [behind := self._words.rule(f'("," {other})*')]
        for pair, is_required in reversed(pairs):
            behind = self._words.rule(f'"," {pair} {behind}' if is_required else f'("," {pair})? {behind}')
            rests.insert(0, behind)
        firsts = []
        for number, (pair, is_required) in enumerate(pairs):
            firsts.append(f"{pair} {rests[number + 1]}")
            if is_required:
                break
        else:
            firsts += [f"{other} {rests[-1]}", '""'] if other else ['""']
        return self._words.rule(f'"{{" ({" | ".join(firsts)}) "}}"')

    def of_text(self, key: str, text: str) -> str:
        """The rule of an object of one text."""
        quote = self._words.mark(self._quote)
        return self._words.rule(f'"{{" {self._key(key)} {quote} {text} {quote} "}}"')

    def _key(self, key: str) -> str:
        if _KEY.fullmatch(key):
            return self._words.literal(f"{key}:")
        return f'{self._text(key)} ":"'

    def _text(self, text: str) -> str:
        """A text between quotes. GrammarError: it has one."""
        if self._quote in text:
            raise GrammarError(f"grammar: expected a schema without {self._quote}, got one with it")
        quote = self._words.mark(self._quote)
        return f"{quote} {self._words.literal(text)} {quote}"

    def value(self, schema: Any, depth: int) -> str:
        """The rule of a value."""
        schema = self._known.resolved(schema)
        if id(schema) not in self._rules:
            if not isinstance(schema, dict) or depth > _DEPTH:
                return self._rule_of_any("value")
            self._kept.append(schema)
            self._rules[id(schema)] = name = self._words.reserve()
            ways = dict.fromkeys(self._ways(choices_of(schema, self._known, strict=self._strict), depth))
            if self._strict and not ways:
                raise GrammarError("grammar: expected a schema of some values, got one of none")
            self._words.define(name, " | ".join(ways) or self._rule_of_any("value"))
        return self._rules[id(schema)]

    def _ways(self, choices: ValueChoices, depth: int) -> Iterable[str]:
        """The rules of each way in which a value may be written."""
        if choices.is_any:
            yield self._rule_of_any("value")
            return
        quote = self._words.mark(self._quote)
        if choices.is_text:
            yield f"{quote} {self._words.text_until(self._quote)}"
        else:
            yield from map(self._text, choices.literals)
            for each in choices.limits:
                yield f"{quote} {self._words.text_within(each, self._quote, self._quote)}"
        for schema in choices.others:
            if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
                yield from map(self._literal, values)
                continue
            kinds = self._known.types(schema)
            allowed = {"type"}.union(*(_OF_TYPES.get(kind, set()) for kind in (*kinds, "string")))
            checked_keywords(schema, allowed, strict=self._strict)
            yield from (self._of_kind(kind, schema, depth) for kind in sorted(kinds))

    def _literal(self, value: Any) -> str:
        if isinstance(value, (dict, list)):
            raise GrammarError("grammar: expected texts and numbers in enum, got another value")
        return json.dumps(json.dumps(value))

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        limits = {key: schema[key] for key in _NUMBERS & set(schema)}
        return self._words.value({"type": kind, **limits}, strict=self._strict)

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
            scalar = words.value({"type": ["number", "boolean", "null"]}, strict=True)
            pair = words.rule(f'/{_ANY_KEY}/ ":" {name}')
            words.define(f"{name}_object", f'"{{" ({pair} ("," {pair})*)? "}}"')
            words.define(name, f'{name}_object | "[" ({name} ("," {name})*)? "]" | {text} | {scalar}')
        return self._any if kind == "value" else f"{self._any}_object"
