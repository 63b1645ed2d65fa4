"""The words of a grammar in Lark: marks of a dialect, texts up to a mark, JSON of a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvcache.errors import GrammarError
from kvcache.grammar import json_schema
from kvcache.sampling.dialects.spoken_answer import MarkTokens
from kvcache.support.arguments import short

__all__ = ["GrammarWords", "checked_keywords", "members_of"]

_ANY, _GAP = r"(.|\n)*", r"/\n{0,2}/"
_TEXT = f"/{_ANY}/"
# Keywords that constrain nothing.
_SILENT = {"$schema", "$id", "$comment", "default", "deprecated", "description", "examples", "title"}


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
        self._ids = {mark: f"<[{id}]>" for id, mark in marks.by_id.items()}
        self.rules: list[str] = []
        self._names = 0

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
        self.rules.append(f"{name}{options}: {body}")

    def mark(self, mark: str) -> str:
        """A mark; "" is none."""
        return self._ids.get(mark, json.dumps(mark, ensure_ascii=False)) if mark else ""

    def literal(self, text: str) -> str:
        """A text, in which marks that are special tokens are these; "" is none."""
        pattern = "|".join(map(re.escape, self._ids)) or "(?!)"
        return " ".join(self.mark(part) for part in re.split(f"({pattern})", text) if part)

    def text_until(self, mark: str) -> str:
        """Any text without a mark, and the mark."""
        if mark in self._ids:
            return f"{_TEXT} {self._ids[mark]}"
        return self._to(mark, _TEXT)

    def _to(self, mark: str, text: str) -> str:
        """A text, as short as it may be, and a mark that is none of the special tokens."""
        return self.rule(text, f"[suffix={json.dumps(mark, ensure_ascii=False)}]")

    def before(self, mark: str, others: Iterable[str] = (), opening: str = "") -> str:
        """Any text without some marks that does not begin as `opening`, and the first mark; see `without`."""
        if mark in self._ids:
            return f"{self.without(mark, others, opening)} {self._ids[mark]}"
        unlike = [opening, *(_ANY + re.escape(other) for other in others if other not in self._ids)]
        return self._to(mark, self._unlike(*unlike) if any(unlike) else _TEXT)

    def without(self, mark: str, others: Iterable[str] = (), *openings: str) -> str:
        """Any text without a mark and others that does not begin as `openings`, regular expressions; "" is none.

        Special tokens are text too, where all marks are some and all openings are "".
        """
        marks = (mark, *others)
        texts = [_ANY + re.escape(each) for each in marks if each not in self._ids]
        if not texts and not any(openings):
            return f"<[^{','.join(self._ids[each][2:-2] for each in marks)}]>*"
        return self._unlike(*openings, *texts)

    def _unlike(self, *openings: str) -> str:
        """A text that does not begin as some regular expressions."""
        self._names += 1
        some = "|".join(filter(None, openings)).replace("/", r"\/")
        self.rules.append(f"T{self._names}: {_TEXT} & ~/({some}){_ANY}/")
        return f"T{self._names}"

    @property
    def opening(self) -> str:
        """A regular expression of how thoughts begin; "": as nothing that is a text of this grammar does."""
        begin = (self.marks.dialect.thoughts or ("",))[0]
        return "" if begin in self._ids or not begin else r"\s*" + re.escape(begin)

    def text_from(self, opening: str, mark: str) -> str:
        """A text that begins as a regular expression, up to a mark, and a gap."""
        text = f"/{opening.replace('/', chr(92) + '/')}{_ANY}/"
        if mark in self._ids:
            return f"{text} {self._ids[mark]} {_GAP}"
        return f"{self._to(mark, text)} {_GAP}"

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
        known = json.loads(found.text)
        options = {"lenient": not strict, "whitespace_pattern": found.whitespace}
        return self.rule(f"%json {json.dumps(known | {'x-guidance': options} if isinstance(known, dict) else known)}")

    def formed(self, form: tuple[str, str] | None) -> str:
        """A text of a form, "lark" or "regex" and a grammar in it; "": there is none."""
        syntax, definition = form or ("", "")
        if syntax == "regex":
            definition = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", definition).replace("\n", r"\n")
            return self.rule(f"/{definition}/")
        return self.rule(f"%lark {{\n{definition}\n}}") if syntax else ""

    def thought(self, prompt_opens: bool) -> str:
        """A thought: it ends, where the prompt has begun one, and may come otherwise; "" where there are none."""
        dialect = self.marks.dialect
        if dialect.thoughts is None:
            return ""
        begin, end = dialect.thoughts
        rest = f"{self.text_until(end)} {_GAP}"
        title = r'"thought\n"' if dialect.titled else ""
        return rest if prompt_opens else f"({self.first} {self.mark(begin)} {title} {rest})?"


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
