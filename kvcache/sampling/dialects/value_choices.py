"""The ways in which a value may be written, by its schema: as texts, which some families write as they are, or not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcache.errors import GrammarError
from kvcache.sampling.dialects.argument_fit import ArgumentFit
from kvcache.sampling.dialects.argument_schema import ANY_TYPE, ArgumentSchema
from kvcache.sampling.dialects.grammar_words import TextLimits, checked_keywords
from kvcache.support.arguments import as_count

__all__ = ["ValueChoices", "choices_of"]

_OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength", "pattern"}
_OF_OTHERS = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "minItems",
    "maxItems", "uniqueItems", "contains", "properties", "required", "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties",
}
# Patterns that mean the same everywhere: no look-around, references, or anchors but those around the whole.
_ESCAPE = r"\\[dws.+*?()\[\]{}|/\\^$tnr-]"
_PLAIN = re.compile(rf"(?:[^\\^$(\[]|{_ESCAPE}|\((?!\?)|\(\?:|\[(?:[^\\\[\]]|{_ESCAPE})*\])*")
_ANY = r"(.|\n)*"
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}


class ValueChoices(NamedTuple):
    """The ways.

    Attributes:
        is_any: whether it may be any value.
        is_text: whether it may be any text.
        literals: texts that it may be.
        limits: of other texts.
        others: schemas of values that are no texts.
    """

    is_any: bool
    is_text: bool
    literals: list[str]
    limits: list[TextLimits]
    others: list[dict[str, Any]]


def choices_of(schema: Any, known: ArgumentSchema, *, strict: bool) -> ValueChoices:
    """The ways in which a value of a schema may be written.

    Args:
        schema: of the value.
        known: what its references lead to.
        strict: whether keywords about texts that cannot be followed are refused, rather than ignored.

    Raises:
        GrammarError: there are such keywords, or too many choices.
    """
    is_any, is_text, literals, limits, others = False, False, list[str](), list[TextLimits](), list[dict[str, Any]]()
    try:
        alternatives = known.alternatives(schema)
    except GrammarError:
        if strict:
            raise
        types = known.types(schema)
        return ValueChoices(types == ANY_TYPE, "string" in types, [], [], [schema] if types - {"string"} else [])
    fit = ArgumentFit(known, known.steps)  # behind the alternatives, which take some
    for each in alternatives:
        types, values = known.types(each), [each["const"]] if "const" in each else each.get("enum")
        if isinstance(values, list):
            values = [value for value in values if fit.fits(value, each)]
            known.steps = max(0, fit.left)
            if strict and values and (fit.left < 0 or not fit.is_sure):
                raise GrammarError(
                    "grammar: expected a schema of values beside few limits, without patterns, got others"
                )
            literals += [value for value in values if isinstance(value, str)]
            if rest := [value for value in values if not isinstance(value, str)]:
                others.append({"enum": rest})
            continue
        is_any = is_any or types == ANY_TYPE
        if "string" in types:
            checked_keywords(each, _OF_TEXTS | (set() if types == {"string"} else _OF_OTHERS), strict=strict)
            found = _limits_of(each, strict=strict)
            is_text = is_text or found == (0, None, ())
            limits.append(found)
        if types - {"string"}:
            kinds = types - {"string", "integer"} if "number" in types else types - {"string"}
            others.append({**each, "type": sorted(kinds)})
    return ValueChoices(is_any, is_text, list(dict.fromkeys(literals)), limits, others)


def _limits_of(schema: Mapping[str, Any], *, strict: bool) -> TextLimits:
    most = schema.get("maxLength")
    patterns = list[str]()
    if isinstance(pattern := schema.get("pattern"), str):
        if (whole := _whole(pattern)) is not None:
            patterns.append(whole)
        else:
            checked_keywords({"pattern": pattern}, set(), strict=strict)
    least = as_count(schema.get("minLength", 0), "minLength")
    return TextLimits(least, None if most is None else as_count(most, "maxLength"), tuple(patterns))


def _whole(pattern: str) -> str | None:
    """The regular expression of the whole texts in which a pattern is found; None: it may mean another one."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    body = pattern[begins : len(pattern) - ends]
    if not _PLAIN.fullmatch(body) or ((begins or ends) and _divides(body)):
        return None
    text = re.sub(
        r"\\.|\[[^\]]*\]", lambda found: _spelled(found[0]), body, flags=re.DOTALL
    )
    return f"{'' if begins else _ANY}({text}){'' if ends else _ANY}"


def _spelled(part: str) -> str:
    """An escape or a class of characters, in which digits and letters are those of ASCII."""
    if part.startswith("["):
        return re.sub(r"\\.", lambda found: _CLASSES.get(found[0], found[0]), part, flags=re.DOTALL)
    return f"[{_CLASSES[part]}]" if part in _CLASSES else part


def _divides(body: str) -> bool:
    """Whether there is `|` outside of groups, and so anchors that hold on one side alone."""
    level = 0
    for part in re.findall(r"\\.|\[[^\]]*\]|.", body, re.DOTALL):
        level += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and level == 0:
            return True
    return False
