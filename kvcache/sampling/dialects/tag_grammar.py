"""The grammar of calls in tags, by the schemas of their arguments; see `tag_calls.py` for what reads them."""

from __future__ import annotations

import re
from typing import Any

from kvcache.errors import GrammarError
from kvcache.sampling.dialects.argument_schema import ArgumentSchema
from kvcache.sampling.dialects.grammar_words import GrammarWords, members_of
from kvcache.sampling.dialects.nested_grammar import NestedGrammar
from kvcache.sampling.dialects.tag_style import TagStyle
from kvcache.sampling.dialects.value_choices import ValueChoices, choices_of
from kvcache.support.arguments import short

__all__ = ["TagGrammar"]


class TagGrammar:
    """Adds the rules of a function.

    Args:
        words: of the grammar.
        style: the tags.
        known: the schema of all arguments.
        strict: whether keywords that cannot be followed are refused, rather than ignored.
    """

    def __init__(self, words: GrammarWords, style: TagStyle, known: ArgumentSchema, *, strict: bool) -> None:
        self._words, self._style, self._known, self._strict = words, style, known, strict
        self._line = '"\\n"' if style.in_lines else '"\\n"?'
        self._wrap = "\n" if style.wraps else ""
        self._close = self._wrap + style.value[1]
        self._nested = NestedGrammar(words, style, self._known, strict=strict)

    def call(self, name: str, form: tuple[str, str] | None) -> str:
        """The rule of a call of this function; `form`: of the one text that is all arguments, or None."""
        words, style = self._words, self._style
        schema = self._known.whole()
        properties, required = members_of(schema)
        parts = []
        for key, each in properties.items():
            if not re.fullmatch(style.key_pattern, key):
                raise GrammarError(f"grammar: expected keys that this network can write, got {short(key)}")
            part = words.rule(f"({self._argument(key, each, words.formed(form))}) {self._line}")
            parts.append(part if key in required else f"{part}?")
        more = schema.get("additionalProperties")
        if not style.nests and (isinstance(more, dict) or (not parts and more is not False)):
            inner = words.other_than(map(style.written, properties), rf"[^{re.escape(style.key[1][0])}\s]+")
            value = self._tagged(inner, more if isinstance(more, dict) else {"type": "string"})
            parts.append(f"(({value}) {self._line})*")
        begin, counted, end = style.tag_of_function(name, "\0").partition("\0")
        head = f"{words.literal(begin)} {'/[1-9][0-9]*/' if counted else ''} {words.literal(end)}"
        return words.rule(f"{head} {self._line} {' '.join(parts)} {words.literal(style.end)}")

    def _argument(self, key: str, schema: Any, free: str) -> str:
        """The tag of an argument, its value and the tag behind it; `free`: the rule of a text, or ""."""
        if self._style.nests:
            return self._nested.element(key, schema, free)
        return self._tagged(self._words.literal(self._style.written(key)), schema, free)

    def _tagged(self, key: str, schema: Any, free: str = "") -> str:
        """Tags around a value; `key`: the rule of its name."""
        words, style, close = self._words, self._style, self._words.literal(self._close)

        def tag(*kinds: str) -> str:
            pairs = (style.tag_of_key("\0", kind).split("\0") for kind in kinds)
            tags = dict.fromkeys(f"{words.literal(begin)} {key} {words.literal(end)}" for begin, end in pairs)
            return f"({' | '.join(tags)}) {self._before_value}"

        if free:
            return f"{tag('string')} {free} {close}"
        choices = choices_of(schema, self._known, strict=self._strict)
        texts, others = self._texts(choices), choices.others
        found = [f"{tag('string')} ({' | '.join(texts)})"] if texts else []
        if not texts or (others and not (choices.is_text and not style.attribute)):
            wanted = schema if not texts else others[0] if len(others) == 1 else {"anyOf": others}
            kinds = frozenset[str]().union(*map(self._known.types, others or [schema])) - {"string"}
            value = words.value(self._known.contained(wanted), strict=self._strict)
            found.append(f"{tag(*sorted(kinds or style.kinds or {'null'}))} {value} {close}")
        return " | ".join(found)

    @property
    def _before_value(self) -> str:
        """The words between the name of an argument and its value."""
        opening = self._style.value[0]
        gap = f"{self._line} {self._words.literal(opening)}" if opening else ""
        return f"{gap} {self._words.literal(self._wrap)}"

    def _texts(self, choices: ValueChoices) -> list[str]:
        """The rules of the texts that a value may be as it is, and the tag behind it; see `read_value`."""
        words, tag = self._words, self._style.value[1]
        if choices.is_text:
            begin = re.escape(self._style.quotes[0])
            return [words.before(tag, (), begin) if begin else words.text_until(tag)]
        if any(tag in each for each in choices.literals):
            raise GrammarError(f"grammar: expected a schema without {tag}, got one with it")
        literals = " | ".join(words.literal(each) or '""' for each in choices.literals)
        found = [f"({literals}) {words.literal(self._close)}"] if literals else []
        return [*found, *(words.text_within(each, self._close, tag) for each in choices.limits)]
