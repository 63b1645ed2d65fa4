"""The words of a grammar in Lark: marks of a dialect, texts up to a mark, JSON of a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvcache.errors import GrammarError
from kvcache.grammar import json_schema
from kvcache.sampling.dialects.spoken_answer import MarkTokens
from kvcache.support.arguments import short

__all__ = ["GrammarWords", "TextLimits", "checked_keywords", "members_of"]

_ANY, _GAP = r"(.|\n)*", r"/\n{0,2}/"
_TEXT = f"/{_ANY}/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,2})?/"  # below 1e200
_MOST = 1 << 16  # characters of all rules, as of a Lark grammar
# Keywords that constrain nothing.
_SILENT = {"$schema", "$id", "$comment", "default", "deprecated", "description", "examples", "title"}
_VALUES, _NAMED = {"const", "enum"}, {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}


class TextLimits(NamedTuple):
    """The limits that a schema sets a text.

    Attributes:
        least, most: characters; None: any number.
        patterns: regular expressions in the syntax of Rust's `regex`, of the whole text.
    """

    least: int
    most: int | None
    patterns: tuple[str, ...]


class GrammarWords:
    """Collects the rules of a grammar.

    Args:
        marks: of the dialect; those that are special tokens are such tokens here too.

    Attributes:
        marks: see above.
        rules: in the order in which they were added.
    """

    def __init__(self, marks: MarkTokens) -> None:
        self.marks = marks
        self._ids = {text: f"<[{id}]>" for id, text in {**marks.spelled, **marks.by_id}.items()}
        self._special = re.compile("|".join(map(re.escape, self._ids)) or "(?!)")
        self.rules: list[str] = []
        self._names = self._size = 0

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; its name."""
        name = self.reserve()
        self.define(name, body, options)
        return name

    def reserve(self) -> str:
        """A name of a rule that is still to be defined."""
        self._names += 1
        return f"r{self._names}"

    def define(self, name: str, body: str, options: str = "") -> None:
        """Add a rule of this name."""
        self._add(f"{name}{options}: {body}")

    def _add(self, rule: str) -> None:
        self._size += len(rule)
        if self._size > _MOST:  # properties that refer to one large schema repeat it
            raise GrammarError(f"grammar: expected rules of at most {_MOST} characters, got more")
        self.rules.append(rule)

    def mark(self, mark: str) -> str:
        """A mark; "" is none."""
        return self.literal(mark)

    def literal(self, text: str) -> str:
        """A text, in which special tokens are these; "" is none."""
        parts = re.split(f"({self._special.pattern})", text)
        return " ".join(self._ids.get(part) or json.dumps(part, ensure_ascii=False) for part in parts if part)

    def _token_in(self, mark: str) -> str:
        """The first special token in a mark; "": there is none."""
        found = self._special.search(mark)
        return "" if found is None else found[0]

    def text_until(self, mark: str, *others: str) -> str:
        """Any text without a mark, or without its special token, and without other marks, and the mark."""
        unlike = [_ANY + _pattern(other) for other in others if not self._token_in(other)]
        if token := self._token_in(mark):
            before, _, _ = mark.partition(token)
            text = self._unlike(*unlike, end=_escaped(before)) if unlike else f"/{_ANY}{_escaped(before)}/"
            return f"{text} {self.literal(mark.removeprefix(before))}"
        return self._to(mark, self._unlike(*unlike) if unlike else _TEXT)

    def text_within(self, limits: TextLimits, mark: str, tag: str) -> str:
        """A text within limits, and without a tag, which a mark behind it ends with; and that mark."""
        count = f"{{{limits.least},{'' if limits.most is None else limits.most}}}"
        token = self._token_in(mark)
        before = mark.partition(token)[0] if token else ""
        some = [f"/{_slashed(each)}{_escaped(before)}/" for each in (f"(.|\\n){count}", *limits.patterns)]
        if not self._token_in(tag):
            some.append(f"~/{_ANY}{_escaped(tag)}{_ANY}/")
        self._names += 1
        self._add(f"T{self._names}: {' & '.join(some)}")
        name = f"T{self._names}"
        return f"{name} {self.literal(mark.removeprefix(before))}" if token else self._to(mark, name)

    def other_than(self, names: Iterable[str], pattern: str) -> str:
        """A text of a regular expression that is none of some names."""
        if not (some := "|".join(map(_pattern, names))):
            return f"/{_slashed(pattern)}/"
        self._names += 1
        self._add(f"T{self._names}: /{_slashed(pattern)}/ & ~/{_slashed(f'({some})')}/")
        return f"T{self._names}"

    def _to(self, mark: str, text: str) -> str:
        """A text, as short as it may be, and a mark that is none of the special tokens."""
        return self.rule(text, f"[suffix={json.dumps(mark, ensure_ascii=False)}]")

    def before(self, mark: str, others: Iterable[str] = (), opening: str = "") -> str:
        """Any text without some marks that does not begin as `opening`, and the first mark; see `without`."""
        if (token := self._token_in(mark)) and mark.startswith(token):
            return f"{self.without(mark, others, opening)} {self.literal(mark)}"
        unlike = [opening, *(_ANY + _pattern(other) for other in others if not self._token_in(other))]
        if token:
            before, _, _ = mark.partition(token)
            text = self._unlike(*unlike, end=_escaped(before)) if any(unlike) else f"/{_ANY}{_escaped(before)}/"
            return f"{text} {self.literal(mark.removeprefix(before))}"
        return self._to(mark, self._unlike(*unlike) if any(unlike) else _TEXT)

    def without(self, mark: str, others: Iterable[str] = (), *openings: str) -> str:
        """Any text without a mark and others that does not begin as `openings`, regular expressions; "" is none.

        Special tokens are text too, where all marks begin with some and all openings are "".
        """
        marks = (mark, *others)
        tokens = list(map(self._token_in, marks))
        texts = [_ANY + _pattern(each) for each, token in zip(marks, tokens, strict=True) if not token]
        if texts or any(openings):
            return self._unlike(*openings, *texts)
        if not all(each.startswith(token) for each, token in zip(marks, tokens, strict=True)):
            return _TEXT  # which no special token is a part of
        text = f"<[^{','.join(dict.fromkeys(self._ids[token][2:-2] for token in tokens))}]>*"
        silent = [self.mark(each) for each in self.marks.dialect.silent if self._token_in(each) in tokens]
        return self.rule(f"{text} (({' | '.join(silent)}) {text})*") if silent else text

    def _unlike(self, *openings: str, begin: str = "", end: str = "") -> str:
        """A text that does not begin as some regular expressions, and has a beginning and an end."""
        self._names += 1
        some = "|".join(filter(None, openings)).replace("/", r"\/")
        self._add(f"T{self._names}: /{begin}{_ANY}{end}/ & ~/({some}){_ANY}/")
        return f"T{self._names}"

    @property
    def silence(self) -> str:
        """The marks that say nothing, if an answer has some before anything else."""
        silent = self.marks.dialect.silent[: self.marks.dialect.framed]
        return f"({' | '.join(map(self.mark, silent))}){{0,2}}" if silent else ""

    @property
    def opening(self) -> str:
        """A regular expression of how thoughts begin; "": as nothing that is a text of this grammar does."""
        begin = (self.marks.dialect.thoughts or ("",))[0]
        return "" if self._token_in(begin) or not begin else r"\s*" + _pattern(begin)

    def text_from(self, opening: str, mark: str, *others: str) -> str:
        """A text that begins as a regular expression, without other marks, up to a mark, and a gap."""
        begin = opening.replace("/", r"\/")
        unlike = [_ANY + _pattern(other) for other in others if not self._token_in(other)]
        before = mark.partition(token)[0] if (token := self._token_in(mark)) else ""
        text = f"/{begin}{_ANY}{_escaped(before)}/"
        if unlike:
            text = self._unlike(*unlike, begin=begin, end=_escaped(before))
        found = f"{text} {self.literal(mark.removeprefix(before))}" if token else self._to(mark, text)
        return f"{found} {_GAP}"

    @property
    def gap(self) -> str:
        """A new line, two, or none."""
        return _GAP

    @property
    def first(self) -> str:
        """The new lines with which an answer may begin."""
        return _GAP if self.marks.dialect.spaced else ""

    def json(self, schema: Any, *, strict: bool) -> str:
        """JSON of a schema. GrammarError: it is none, or beyond a limit."""
        found = json_schema(schema, strict=strict)
        known = _constraining(json.loads(found.text))
        options = {"lenient": not strict, "whitespace_pattern": found.whitespace}
        return self.rule(f"%json {json.dumps(known | {'x-guidance': options} if isinstance(known, dict) else known)}")

    def value(self, schema: Any, *, strict: bool) -> str:
        """JSON of a value; a number without limits is one of 64 bits, which readers take for one."""
        types = schema.get("type") if isinstance(schema, dict) and not set(schema) - _SILENT - {"type"} else None
        kinds = [types] if isinstance(types, str) else types
        if not isinstance(kinds, list) or "number" not in kinds:
            return self.json(schema, strict=strict)
        rest = [kind for kind in kinds if kind not in ("number", "integer")]
        return self.rule(" | ".join([_NUMBER, *([self.json({"type": rest}, strict=strict)] if rest else [])]))

    def formed(self, form: tuple[str, str] | None) -> str:
        """A text of a form, "lark" or "regex" and a grammar in it; "": there is none."""
        syntax, definition = form or ("", "")
        if syntax == "regex":
            return self.rule(f"/{_slashed(definition)}/")
        return self.rule(f"%lark {{\n{definition}\n}}") if syntax else ""

    def thought(self, prompt_opens: bool, *others: str) -> str:
        """A thought without other marks: it ends, where the prompt has begun one, and may come otherwise; "" where
        there are none."""
        dialect = self.marks.dialect
        if dialect.thoughts is None:
            return ""
        begin, end = dialect.thoughts
        rest = f"{self.text_until(end, *others)} {_GAP}"
        title = r'"thought\n"' if dialect.titled else ""
        return rest if prompt_opens else f"({self.first} {self.mark(begin)} {title} {rest})?"


def _constraining(schema: Any, *, named: bool = False) -> Any:
    """A schema without what constrains nothing, which may be most of its text; `named`: its keys are names."""
    if isinstance(schema, list):
        return [_constraining(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if not named and key in _VALUES else _constraining(value, named=not named and key in _NAMED)
        for key, value in schema.items() if named or key not in _SILENT - {"$schema", "$id"}
    }


def _slashed(pattern: str) -> str:
    """A regular expression between slashes, on one line."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")


def _pattern(text: str) -> str:
    """The regular expression of a text, in one line."""
    return re.escape(text).replace("\\\n", r"\n")


def _escaped(text: str) -> str:
    """A text within a regular expression of Lark."""
    return _pattern(text).replace("/", r"\/")


def checked_keywords(schema: Mapping[str, Any], known: set[str], *, strict: bool) -> None:
    """Raise GrammarError for keywords of a strict schema that the words of a family cannot follow."""
    if strict and (others := sorted(set(schema) - known - _SILENT)):
        raise GrammarError(f"grammar: expected a schema that this network's calls can follow, got {short(others[0])}")


def members_of(schema: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The properties of an object, and those that it requires. GrammarError: it requires others too."""
    found, wanted = schema.get("properties"), schema.get("required")
    properties = found if isinstance(found, dict) else {}
    required = set(wanted) if isinstance(wanted, list) and all(isinstance(key, str) for key in wanted) else set()
    if required - set(properties):
        raise GrammarError("grammar: expected a schema with all properties that it requires, got one without")
    return properties, required
