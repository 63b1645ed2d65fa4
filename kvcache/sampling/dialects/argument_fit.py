"""Whether a value is one by a schema (JSON Schema, draft 2020-12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcache.sampling.dialects.argument_schema import ArgumentSchema, is_of, same_text

__all__ = ["ArgumentFit"]

_UNREAD = {
    "pattern", "patternProperties", "propertyNames", "contains", "uniqueItems", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties", "unevaluatedItems", "if",
}
_MOST_STEPS = 5_000  # which take 10 ms


class ArgumentFit:
    """Compares values with schemas, in bounded time.

    Patterns are not read: they are a client's, and a regular expression may take any time. Formats say nothing.

    Args:
        known: what references lead to.
        steps: schemas that it may ask.

    Attributes:
        left: of these; below 0: it had too few, and takes each value for one.
        is_sure: whether no schema had a keyword that is not read.
    """

    def __init__(self, known: ArgumentSchema, steps: int = _MOST_STEPS) -> None:
        self._known, self.left, self.is_sure = known, steps, True

    def fits(self, value: Any, schema: Any) -> bool:
        """Whether it is one; True as well if that takes too long to say."""
        try:
            return self._fits(value, schema)
        except (_TooLong, RecursionError):
            return True
        except (TypeError, ValueError, ArithmeticError, AttributeError):  # of a keyword with a value of another kind
            return True

    def _fits(self, value: Any, schema: Any) -> bool:
        self.left -= 1
        if self.left < 0:
            raise _TooLong
        if not isinstance(schema, dict):
            return schema is not False
        self.is_sure = self.is_sure and _UNREAD.isdisjoint(schema)
        return all(
            check(self, value, schema[key], schema) for key, check in _CHECKS.items() if key in schema
        )

    def _reference(self, value: Any, reference: Any, _: Any) -> bool:
        return self._fits(value, self._known.resolved({"$ref": reference}))

    def _const(self, value: Any, _: Any, schema: Mapping[str, Any]) -> bool:
        return same_text(value) in self._known.values_of(schema, "const")

    def _enum(self, value: Any, _: Any, schema: Mapping[str, Any]) -> bool:
        return same_text(value) in self._known.values_of(schema, "enum")

    def _all(self, value: Any, some: Any, _: Any) -> bool:
        return all(self._fits(value, each) for each in some)

    def _any(self, value: Any, some: Any, _: Any) -> bool:
        return any(self._fits(value, each) for each in some)

    def _one(self, value: Any, some: Any, _: Any) -> bool:
        return sum(self._fits(value, each) for each in some) == 1

    def _not(self, value: Any, schema: Any, _: Any) -> bool:
        return not self._fits(value, schema)

    def _members(self, value: Any, _: Any, schema: Mapping[str, Any]) -> bool:
        """Whether the members of an object are those that properties, and what is said of others, allow."""
        if not isinstance(value, dict):
            return True
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if schema.get("patternProperties"):
            others = True
        return all(self._fits(each, properties.get(key, others)) for key, each in value.items())

    def _items(self, value: Any, _: Any, schema: Mapping[str, Any]) -> bool:
        if not isinstance(value, list):
            return True
        firsts = schema.get("prefixItems", [])
        schemas = [*firsts, *[schema.get("items", True)] * max(0, len(value) - len(firsts))]
        return all(self._fits(each, one) for each, one in zip(value, schemas, strict=False))


class _TooLong(Exception):
    """There are more schemas to ask than it may."""


def _multiple(value: Any, of: Any) -> bool:
    return value % of == 0 if isinstance(value, int) and isinstance(of, int) else (value / of).is_integer()


def _named(value: Any, types: Any, _: Any) -> bool:
    return any(is_of(value, kind) for kind in ([types] if isinstance(types, str) else types))


Check = Callable[[ArgumentFit, Any, Any, Mapping[str, Any]], bool]


def _sized(kind: str, holds: Callable[[Any, Any], bool]) -> Check:
    """A keyword about values of a type; others are free."""
    return lambda self, value, limit, _: not is_of(value, kind) or holds(value, limit)


_CHECKS: dict[str, Check] = {
    "$ref": ArgumentFit._reference, "type": lambda self, *asked: _named(*asked),
    "const": ArgumentFit._const, "enum": ArgumentFit._enum,
    "allOf": ArgumentFit._all, "anyOf": ArgumentFit._any, "oneOf": ArgumentFit._one, "not": ArgumentFit._not,
    "minimum": _sized("number", lambda value, limit: value >= limit),
    "maximum": _sized("number", lambda value, limit: value <= limit),
    "exclusiveMinimum": _sized("number", lambda value, limit: value > limit),
    "exclusiveMaximum": _sized("number", lambda value, limit: value < limit),
    "multipleOf": _sized("number", _multiple),
    "minLength": _sized("string", lambda value, limit: len(value) >= limit),
    "maxLength": _sized("string", lambda value, limit: len(value) <= limit),
    "minItems": _sized("array", lambda value, limit: len(value) >= limit),
    "maxItems": _sized("array", lambda value, limit: len(value) <= limit),
    "minProperties": _sized("object", lambda value, limit: len(value) >= limit),
    "maxProperties": _sized("object", lambda value, limit: len(value) <= limit),
    "required": _sized("object", lambda value, keys: all(key in value for key in keys)),
    "properties": ArgumentFit._members, "additionalProperties": ArgumentFit._members,
    "items": ArgumentFit._items, "prefixItems": ArgumentFit._items,
}
