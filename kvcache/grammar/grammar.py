"""`Grammar`: the form of the text of an answer, as `SamplingParams.grammar` takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from kvcache.errors import GrammarError
from kvcache.support.arguments import as_instance, short
from kvcache.support.json_text import json_fault

__all__ = ["Grammar", "json_object", "json_schema", "lark", "regex"]

_MOST_BYTES = {"json_schema": 1 << 18, "regex": 1 << 16, "lark": 1 << 16}
# Llguidance descends into references and rules with the stack of the thread, and a process dies where it ends: in 8 MiB
# after 2,000 of them, or 400 of schemas that are nested seven deep. A compilation takes a time that grows with the
# square of the members of objects: 1 s for 4,096 of them, or for 150 patterns.
_MOST_LEVELS, _MOST_MEMBERS, _MOST_PATTERNS, _MOST_RULES = 1024, 4096, 64, 1000
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Where a text is forced, llguidance spells all that is forced with each mask: 0.2 ms for 1,000 characters, but seconds
# for what `(a{1000}){1000}` forces.
_MOST_FORCED = 1000
_COUNTS = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_RULE = re.compile(r"(?m)^[^\S\n]*[!?]?\w")  # within one line: `\s` would read all empty lines from each of them
# Llguidance puts what stands between two tokens of JSON at no bound, and small networks then write spaces to the end of
# the answer. A space, or a new line with the indentation of four levels, is what networks write.
_SPACES = r"( |\n {0,16})?"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of the text of an answer. `json_schema`, `json_object`, `regex` and `lark` make one.

    Attributes:
        kind: the language that it is written in.
        text: the schema as JSON, the regular expression, or the Lark grammar.
        strict: whether keywords of a schema that are not supported are refused, rather than ignored.
        whitespace: a regular expression of what may stand between two tokens of JSON.
        lead: the rules in Lark, the first one `lead`, of what comes before the JSON of a schema; "": nothing.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    strict: bool = True
    whitespace: str = ""
    lead: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "lark"):
            raise ValueError(f"kind: expected json_schema, regex or lark, got {short(self.kind)}")
        for name in ("text", "whitespace", "lead"):
            try:
                size = len(as_instance(getattr(self, name), str, name).encode())
            except UnicodeEncodeError:
                raise GrammarError("grammar: expected Unicode text, got a lone surrogate") from None
            if size > (most := _MOST_BYTES[self.kind]):
                raise GrammarError(f"grammar: expected at most {most} bytes of {self.kind}, got {size}")
        if self.lead and self.kind != "json_schema":
            raise ValueError(f"lead: expected none before a {self.kind}, got one")
        if self.kind == "json_schema":
            _check_schema(self.text)
            _check_rules(self.lead)
        elif self.kind == "lark":
            _check_rules(self.text)
        object.__setattr__(self, "strict", as_instance(self.strict, bool, "strict"))

    @property
    def forces(self) -> bool:
        """Whether masks have the one token that a forced text is spelled with; not where it may be long."""
        if self.kind != "json_schema":
            literal = max(map(len, self.text.split('"'))) if self.kind == "lark" else len(self.text)
            return max(literal, _repeats(self.text)) <= _MOST_FORCED
        return all(max(len(each), _repeats(each)) <= _MOST_FORCED for each in _strings(json.loads(self.text)))

    def __repr__(self) -> str:
        return f"Grammar({self.kind}, {short(self.text)})"


def json_schema(schema: Any, *, strict: bool = True, whitespace: str = _SPACES) -> Grammar:
    """JSON of a schema (JSON Schema, draft 2020-12); properties come in the order of the schema.

    Args:
        schema: a dict, a bool, or their JSON as a str.
        strict: whether keywords that are not supported are refused when the request is submitted. Otherwise they
            constrain nothing.
        whitespace: a regular expression of what may stand between two tokens of JSON; "" is nothing.

    Raises:
        GrammarError: it is no JSON of a dict or a bool; or beyond a limit: 256 KiB, 4,096 members of objects, 64
            patterns of properties, 1,024 references times the depth of the schema.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"grammar: expected a JSON schema, got an error: {json_fault(error)}") from None
    return Grammar("json_schema", text, strict, whitespace)


def json_object() -> Grammar:
    """A JSON object of any properties."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Grammar:
    """A text that a regular expression matches as a whole, in the syntax of Rust's `regex`, without look-around."""
    return Grammar("regex", pattern)


def lark(text: str) -> Grammar:
    """A text of the rule `start` of a Lark grammar, in the dialect of llguidance."""
    return Grammar("lark", text)


def _repeats(pattern: str) -> int:
    """How often the counts of a pattern repeat something at most, if each is within another one."""
    found = 1
    for least, most in _COUNTS.findall(pattern):
        found = min(found * max(1, int((most or least)[:9])), _MOST_FORCED + 1)
    return found


def _strings(schema: Any) -> Iterator[str]:
    """All strings of a schema, names too."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each


def _check_schema(text: str) -> None:
    """Raise GrammarError for a text that is no schema, or beyond a limit."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"grammar: expected a JSON schema, got an error: {json_fault(error)}") from None
    if not isinstance(schema, (dict, bool)):
        raise GrammarError(f"grammar: expected a JSON schema, a dict or a bool, got {short(schema)}")
    members = patterns = references = depth = 0
    level: list[Any] = [schema]
    while level:
        depth += 1
        objects = [each for each in level if isinstance(each, dict)]
        for each in objects:
            members += len(each)
            references += sum(name in each for name in _REFERENCES)
            found = each.get("patternProperties")
            patterns += len(found) if isinstance(found, dict) else 0
        lists = [each for each in level if isinstance(each, list)]
        level = [child for each in objects for child in each.values()] + [child for each in lists for child in each]
    for what, got, most in (
        ("members of objects", members, _MOST_MEMBERS), ("patterns of properties", patterns, _MOST_PATTERNS),
        ("references times its depth", references * depth, _MOST_LEVELS),
    ):
        if got > most:
            raise GrammarError(f"grammar: expected a JSON schema of at most {most} {what}, got {got}")
    _check_references(schema)


def _check_references(schema: Any) -> None:
    """Raise GrammarError for a reference that leads to none but itself: a text that has come to it cannot go on."""
    waiting, known = [schema], set[int]()
    while waiting:
        each = waiting.pop()
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        passed = set[int]()
        while isinstance(each, dict) and isinstance(each.get("$ref"), str) and id(each) not in known:
            if id(each) in passed:
                raise GrammarError(f"grammar: expected references to schemas, got one to itself, {short(each['$ref'])}")
            passed.add(id(each))
            each = _target(schema, each["$ref"])
        known |= passed


def _target(schema: Any, reference: str) -> Any:
    """The part of a schema that a pointer (RFC 6901) leads to; None: there is none here."""
    found = schema if reference == "#" or reference.startswith("#/") else None
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and re.fullmatch("[0-9]{1,5}", key) and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _check_rules(text: str) -> None:
    """Raise GrammarError for a Lark grammar of too many rules, or of too many objects in its schemas."""
    rules, objects = len(_RULE.findall(text)), text.count("{")
    if max(rules, objects) > _MOST_RULES:
        got = f"{rules} and {objects}"
        raise GrammarError(f"grammar: expected a Lark grammar of at most {_MOST_RULES} rules and braces, got {got}")
