"""The grammar of calls in tags, by the schemas of their arguments; see `tag_calls.py` for what reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvcache.errors import GrammarError
from kvcache.sampling.dialects.call_texts import resolved, types_of
from kvcache.sampling.dialects.grammar_words import GrammarWords, checked_keywords, members_of
from kvcache.sampling.dialects.nested_grammar import NestedGrammar
from kvcache.sampling.dialects.tag_style import TagStyle
from kvcache.support.arguments import short

__all__ = ["TagGrammar"]

_SIMPLE = {"string", "integer", "number", "boolean", "null"}


class TagGrammar:
    """Adds the rules of a function.

    Args:
        words: of the grammar.
        style: the tags.
        schema: of all arguments.
        strict: whether keywords that cannot be followed are refused, rather than ignored.
    """

    def __init__(self, words: GrammarWords, style: TagStyle, schema: Mapping[str, Any], *, strict: bool) -> None:
        self._words, self._style, self._schema, self._strict = words, style, schema, strict
        self._line = '"\\n"' if style.in_lines else '"\\n"?'
        self._wrap = "\n" if style.wraps else ""
        self._close = self._wrap + style.value[1]
        self._nested = NestedGrammar(words, style, schema, strict=strict)

    def call(self, name: str, form: tuple[str, str] | None) -> str:
        """The rule of a call of this function; `form`: of the one text that is all arguments, or None."""
        words, style = self._words, self._style
        properties, required = members_of(self._schema)
        parts = []
        for key, each in properties.items():
            if not re.fullmatch(style.key_pattern, key):
                raise GrammarError(f"grammar: expected keys that this network can write, got {short(key)}")
            part = words.rule(f"({self._argument(key, each, words.formed(form))}) {self._line}")
            parts.append(part if key in required else f"{part}?")
        if not parts and self._schema.get("additionalProperties") is not False:
            inner = rf"[^{re.escape(style.key[1][0])}\s]+".replace("/", r"\/")
            begin, end = style.tag_of_key("\0", "string").split("\0")
            head = f"{words.literal(begin)} /{inner}/ {words.literal(end)} {self._before_value}"
            parts = [] if style.nests else [f"({head} {self._text()} {self._line})*"]
        begin, counted, end = style.tag_of_function(name, "\0").partition("\0")
        head = f"{words.literal(begin)} {'/[1-9][0-9]*/' if counted else ''} {words.literal(end)}"
        return words.rule(f"{head} {self._line} {' '.join(parts)} {words.literal(style.end)}")

    def _argument(self, key: str, schema: Any, free: str) -> str:
        """The tag of an argument, its value and the tag behind it; `free`: the rule of a text, or ""."""
        words, style = self._words, self._style
        if style.nests:
            return self._nested.element(key, schema, free)
        found = resolved(schema, self._schema)
        types, close = types_of(found), words.literal(self._close)

        def tag(*kinds: str) -> str:
            tags = dict.fromkeys(words.literal(style.tag_of_key(key, kind)) for kind in kinds)
            return f"({' | '.join(tags)}) {self._before_value}"

        others = sorted((types or set(style.kinds)) - {"string"})
        if free or not style.attribute or types == {"string"}:
            return f"{tag('string')} {f'{free} {close}' if free else self._value(schema)}"
        if types and "string" not in types:
            return f"{tag(*others)} {self._value(schema)}"
        text = f"{tag('string')} {self._value(schema)}"
        return f"{text} | {tag(*others)} {words.json({'type': others}, strict=False)} {close}"

    @property
    def _before_value(self) -> str:
        """The words between the name of an argument and its value."""
        opening = self._style.value[0]
        gap = f"{self._line} {self._words.literal(opening)}" if opening else ""
        return f"{gap} {self._words.literal(self._wrap)}"

    def _text(self) -> str:
        """Any text, and the tag behind it."""
        return self._words.text_until(self._style.value[1])

    def _value(self, schema: Any) -> str:
        """A value and the tag behind it: a text as it is, or JSON; see `typed` of `call_texts.py`."""
        words, root, tag = self._words, self._schema, self._style.value[1]
        close = words.literal(self._close)
        found = resolved(schema, root)
        found = found if isinstance(found, dict) else {}
        literals = [found["const"]] if "const" in found else found.get("enum")
        types = types_of(found)
        if isinstance(literals, list) and literals and all(isinstance(each, str) for each in literals):
            if any(tag in each for each in literals):
                raise GrammarError(f"grammar: expected a schema without {tag}, got one with it")
            return f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in literals)}) {close}"
        if types and "string" not in types:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            return f"{words.json({**found, **definitions}, strict=self._strict)} {close}"
        checked_keywords(found, {"type", "anyOf", "oneOf"}, strict=self._strict)
        if types - _SIMPLE and self._strict:
            raise GrammarError("grammar: expected a schema of a text or of another value, got one of both")
        return self._text()
