"""The schema of a function's arguments: where its references lead, and which types a value may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from kvcache.errors import GrammarError

__all__ = ["ANY_TYPE", "TYPES", "ArgumentSchema", "is_of", "same_text"]

TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
    "null": type(None),
}
ANY_TYPE = frozenset(TYPES)
# A client's schema may have any number of choices within choices, and is asked while other answers wait: a question
# takes 30 ms at most.
_MOST_STEPS, _MOST_PARTS = 2000, 64
_MOST_REFERENCES = 16  # from one to the next
_MOST_LEVELS = 200  # of a schema that is copied
_MOST_ALTERNATIVES = 1000
_MOST_CHOICES = 20_000  # which take 40 ms
_JOINED = 16  # values, keys and members of two schemas that become one in a step
_ANYTHING: dict[str, Any] = {}
_NOTHING: dict[str, Any] = {"enum": []}  # what `false` takes
_CHOICES = ("anyOf", "oneOf")
_ELSEWHERE = ("$ref", "allOf", *_CHOICES, "$defs", "definitions")  # keywords that say nothing by themselves
# What a schema means that has these keywords and names no type, though any other value is one by it too.
_HINTS = {
    "properties": "object", "required": "object", "additionalProperties": "object", "items": "array",
    "prefixItems": "array",
}


class ArgumentSchema:
    """Answers questions about schemas within one, which references are relative to.

    Args:
        root: the schema of all arguments; what is no dict says nothing.

    Attributes:
        root: see above.
        steps: schemas that may still be asked, of all choices of values.
    """

    def __init__(self, root: Any) -> None:
        self.root: Mapping[str, Any] = root if isinstance(root, dict) else {}
        self._types: dict[tuple[int, bool], tuple[Any, frozenset[str]]] = {}  # with the schema, whose id stays its own
        self._members: dict[tuple[int, str | None], tuple[Any, Any]] = {}  # the same of members and items
        self._values: dict[tuple[int, str], tuple[Any, frozenset[str]]] = {}  # the same of lists of values
        self._names: dict[tuple[int, bool], tuple[Any, frozenset[str]]] = {}  # and of types that one schema names
        self.steps = _MOST_CHOICES
        self._left, self._is_cut = 0, False  # steps of the question; whether parts of a schema were left out

    def property_of(self, key: str, schema: Any = None) -> Any:
        """The schema of a member of an object; {}: any value. `schema`: of the object; None: of all arguments."""
        return self._member_of(self.root if schema is None else schema, key)

    def has_property(self, key: str) -> bool:
        """Whether an argument is named."""
        named = (part.get("properties") for part in self.parts(self.root))
        return any(isinstance(each, dict) and key in each for each in named)

    def items_of(self, schema: Any) -> Any:
        """The schema of what a list has; {}: any value."""
        return self._member_of(schema, None)

    def _member_of(self, schema: Any, key: str | None) -> Any:
        if (place := (id(schema), key)) not in self._members:
            self._members[place] = schema, self._first_of(schema, key)
        return self._members[place][1]

    def _first_of(self, schema: Any, key: str | None) -> Any:
        """The first schema of a member, or of items, among the parts and choices of one."""
        waiting, others, seen = self.parts(schema), list[Any](), 0
        while seen < min(len(waiting), _MOST_STEPS):
            part, seen = waiting[seen], seen + 1
            properties = part.get("properties")
            if key is None and "items" in part:
                return part["items"]
            if key is not None and isinstance(properties, dict) and key in properties:
                return properties[key]
            if key is not None and isinstance(part.get("additionalProperties"), dict):
                others.append(part["additionalProperties"])
            for choice in _CHOICES:
                some = part.get(choice)
                for each in (some if isinstance(some, list) else ())[: max(0, _MOST_STEPS - len(waiting))]:
                    waiting += self.parts(each)
        return others[0] if others else _ANYTHING

    def resolved(self, schema: Any) -> Any:
        """A schema behind its references; {} where these lead to none, or outside."""
        for _ in range(_MOST_REFERENCES):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str):
                return schema
            schema = self._target(reference)
        return _ANYTHING

    def _target(self, reference: str) -> Any:
        """The schema that a pointer (RFC 6901) leads to."""
        found: Any = self.root
        if reference != "#" and not reference.startswith("#/"):
            return _ANYTHING
        for step in reference.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(step, _ANYTHING)
            elif isinstance(found, list) and step.isdecimal() and len(step) < 6 and int(step) < len(found):
                found = found[int(step)]
            else:
                return _ANYTHING
        return found

    def parts(self, schema: Any) -> list[Mapping[str, Any]]:
        """The schemas that hold at once: itself, what it refers to, and those of `allOf`."""
        found: list[Mapping[str, Any]] = []
        waiting, seen = [schema], set[int]()
        for each in waiting:
            self._is_cut = len(waiting) > _MOST_PARTS
            if self._is_cut:
                break
            if each is False:
                found.append(_NOTHING)
            if not isinstance(each, dict) or id(each) in seen:
                continue
            seen.add(id(each))
            found.append(each)
            if isinstance(reference := each.get("$ref"), str):
                waiting.append(self._target(reference))
            if isinstance(every := each.get("allOf"), list):
                waiting += every
        return found

    def types(self, schema: Any) -> frozenset[str]:
        """The types that a value may have, as far as is known; `ANY_TYPE`: none is named."""
        for hints in (False, True):
            place = id(schema), hints
            if place not in self._types:
                self._left = _MOST_STEPS
                try:
                    named = self._types_of(schema, hints, frozenset())
                except RecursionError:  # of choices in choices
                    named = ANY_TYPE
                self._types[place] = schema, named
            found = self._types[place][1]
            if found != ANY_TYPE:
                break
        return found or ANY_TYPE

    def values_of(self, schema: Mapping[str, Any], key: str) -> frozenset[str]:
        """The values that `const` or `enum` lists, as `same_text` writes them: 100,000 may be asked for many times."""
        if (place := (id(schema), key)) not in self._values:
            some = [schema[key]] if key == "const" else schema[key]
            self._values[place] = schema, frozenset(map(same_text, some))
        return self._values[place][1]

    def _named(self, schema: Mapping[str, Any], hints: bool) -> frozenset[str]:
        if (place := (id(schema), hints)) not in self._names:
            self._names[place] = schema, _named_types(schema, hints)
        return self._names[place][1]

    def _types_of(self, schema: Any, hints: bool, within: frozenset[int]) -> frozenset[str]:
        found, within = ANY_TYPE, within | {id(schema)}
        for part in self.parts(schema):
            self._left -= 1
            if self._left < 0:
                return ANY_TYPE
            found &= self._named(part, hints)
            for choice in _CHOICES:
                if isinstance(part.get(choice), list):
                    inner = [each for each in part[choice] if id(each) not in within]
                    found &= frozenset().union(*(self._types_of(each, hints, within) for each in inner))
        return found

    def alternatives(self, schema: Any) -> list[dict[str, Any]]:
        """Schemas without references and choices: a value is one by some of them. `allOf` stays if two say of a
        keyword what no single one does.

        Raises:
            GrammarError: there are too many.
        """
        self._left = _MOST_STEPS
        try:
            return [each for each in self._alternatives(schema, frozenset()) if each.get("type") != []]
        except RecursionError:  # of choices in choices
            raise _too_many() from None

    def _alternatives(self, schema: Any, within: frozenset[int]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{}]
        within |= {id(schema)}
        parts, is_cut = self.parts(schema), self._is_cut
        for part in parts:
            plain = {key: each for key, each in part.items() if key not in _ELSEWHERE}
            found = [self._joined(each, plain) for each in found]
            for choice in _CHOICES:
                if isinstance(part.get(choice), list):
                    inner = [each for each in part[choice] if id(each) not in within]
                    some = [each for one in inner for each in self._alternatives(one, within)]
                    found = [self._joined(left, right) for left in found for right in some]
            if len(found) > _MOST_ALTERNATIVES or is_cut:
                raise _too_many()
        return found

    def _joined(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
        """One schema for two that hold at once, which takes steps by what both list. GrammarError: too many."""
        both = [each[key] for key in _MERGED_LISTS if key in left and key in right for each in (left, right)]
        cost = sum(len(each) for each in both if isinstance(each, list | dict)) // _JOINED
        self._left, self.steps = self._left - 1 - cost, self.steps - cost
        if min(self._left, self.steps) < 0:
            raise _too_many()
        try:
            return _both(left, right)
        except (TypeError, AttributeError):  # of keywords with values of other kinds
            raise GrammarError("grammar: expected a schema with keywords of their kinds, got others") from None

    def whole(self) -> dict[str, Any]:
        """All of it as one schema without references, if that is one, and as it is otherwise."""
        with suppress(GrammarError):
            found = self.alternatives(self.root)
            return found[0] if len(found) == 1 else dict(self.root)
        return dict(self.root)

    def contained(self, schema: Any) -> Any:
        """A schema that has all to which it refers within itself. GrammarError: it is nested too deep."""
        names: dict[str, str] = {}
        found = self._copied(schema, names, 0)
        if not names:
            return found
        waiting, definitions = list(names), dict[str, Any]()
        while waiting:
            reference = waiting.pop()
            before = len(names)
            definitions[names[reference]] = self._copied(self._target(reference), names, 0)
            waiting += list(names)[before:]
        return {**found, "$defs": definitions}

    def _copied(self, schema: Any, names: dict[str, str], level: int) -> Any:
        """A copy with references to definitions, whose names are added."""
        if level > _MOST_LEVELS:
            raise GrammarError(f"grammar: expected a schema of at most {_MOST_LEVELS} levels, got more")
        if isinstance(schema, list):
            return [self._copied(each, names, level + 1) for each in schema]
        if not isinstance(schema, dict):
            return schema
        found = {
            key: each if key in ("enum", "const", "default", "examples") else self._copied(each, names, level + 1)
            for key, each in schema.items() if level or key not in ("$defs", "definitions")
        }
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            found["$ref"] = f"#/$defs/{names.setdefault(reference, f'r{len(names)}')}"
        return found


def same_text(value: Any) -> str:
    """A text that is the same for values that are the same in JSON: 1 is 1.0, and neither is true."""
    return json.dumps(_whole_numbers(value), sort_keys=True)


def _whole_numbers(value: Any) -> Any:
    """A value whose numbers without a fraction are integers."""
    if isinstance(value, list):
        return [_whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(each) for key, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _too_many() -> GrammarError:
    return GrammarError(f"grammar: expected a schema of at most {_MOST_ALTERNATIVES} choices, got more")


def is_of(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON; 1.0 is an integer."""
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return kind in TYPES and isinstance(value, TYPES[kind])


def _expanded(types: Any) -> frozenset[str]:
    """The types that a keyword names, integers among the numbers; those of another value are any."""
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        return ANY_TYPE
    return frozenset(names) | ({"integer"} if "number" in names else frozenset())


def _named_types(schema: Mapping[str, Any], hints: bool) -> frozenset[str]:
    """The types that one schema names, by itself, or by the values that it lists."""
    found = _expanded(schema["type"]) if "type" in schema else ANY_TYPE
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found &= frozenset(kind for kind in TYPES if any(is_of(value, kind) for value in values))
    if hints and found == ANY_TYPE and (meant := frozenset(_HINTS[key] for key in _HINTS if key in schema)):
        return meant
    return found


def _both(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """One schema for two that hold at once."""
    found = {**right, **left}
    for rest, group in _RESTS.items():
        if rest in found and group & left.keys() and group & right.keys():
            found["allOf"] = [dict(left), dict(right)]
    for key, one, other in ((key, left[key], right[key]) for key in left if key in right):
        if one == other or key in ("title", "description", "default", "examples", "$comment"):
            continue
        if key in _MERGES and type(one) is type(other):
            found[key] = _MERGES[key](one, other)
        elif key == "type":
            kept = _expanded(one) & _expanded(other)
            found[key] = sorted(kept - {"integer"} if "number" in kept else kept)
        else:
            found["allOf"] = [*left.get("allOf", ()), dict(right)]
    return found


# Keywords of what others beside them leave.
_RESTS = {
    "additionalProperties": {"properties", "patternProperties", "additionalProperties"},
    "items": {"prefixItems", "items"},
}


def _properties(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    shared = {key: {"allOf": [left[key], right[key]]} for key in left if key in right and left[key] != right[key]}
    return {**left, **right, **shared}


def _all_of(one: list[Any], other: list[Any]) -> list[Any]:
    return list({same_text(each): each for each in (*one, *other)}.values())


def _shared(one: list[Any], other: list[Any]) -> list[Any]:
    known = set(map(same_text, other))
    return [each for each in one if same_text(each) in known]


_MERGED_LISTS = "enum", "required", "properties"
# What two values of a keyword say together.
_MERGES: dict[str, Any] = {
    "properties": _properties, "required": _all_of, "enum": _shared,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems"), min),
}
