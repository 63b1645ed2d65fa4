"""The grammar of an answer that must call a function: thoughts, where the dialect has some, and then calls in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvcache.grammar import Grammar, json_schema, lark
from kvcache.sampling.dialects.call_texts import json_calls, mistral_calls, pythonic_calls
from kvcache.sampling.dialects.spoken_answer import MarkTokens

__all__ = ["calls_grammar"]

_IN_JSON = (json_calls, mistral_calls, pythonic_calls)  # the readers that take calls as objects of JSON
_GAP = r"/\n{0,2}/"


def calls_grammar(
    marks: MarkTokens, functions: Sequence[Mapping[str, Any]], *, parallel: bool, thinks: bool
) -> Grammar | None:
    """The grammar of one call or more; None: the dialect writes calls in another way than JSON.

    Args:
        marks: of the dialect.
        functions: those that may be called, with a name and perhaps `parameters` and `strict`.
        parallel: whether there may be several calls.
        thinks: whether the prompt has begun a thought.

    Raises:
        GrammarError: parameters that are no schema, or beyond a limit.
    """
    dialect = marks.dialect
    if dialect.calls is None or dialect.read not in _IN_JSON:
        return None
    ids = {mark: f"<[{id}]>" for id, mark in marks.by_id.items()}
    begin, end = (ids.get(mark, json.dumps(mark)) if mark else "" for mark in dialect.calls)
    key = "parameters" if dialect.leads else "arguments"
    rules = [rule for i, function in enumerate(functions) for rule in _rules(i, function, key)]
    some = f"({' | '.join(f'function_{i}' for i in range(len(functions)))})"
    if dialect.leads:
        calls = some
    elif end:
        calls = f'{begin} "\\n" {some} "\\n" {end}'
        calls += f" ({_GAP} {calls})*" if parallel else ""
    else:
        more = f'(", " {some})*' if parallel else ""
        calls = f'{begin} "[" {some} {more} "]"'
    thought = ""
    if dialect.thoughts is not None:
        first, last = dialect.thoughts
        text = r"/(.|\n)*/"
        rules.append(f"thought: {text} {ids[last]}" if last in ids else f"thought[suffix={json.dumps(last)}]: {text}")
        opened = ids.get(first, json.dumps(first))
        thought = f"thought {_GAP}" if thinks else f"({opened} thought {_GAP})?"
    return lark("\n".join([f"start: {thought} {calls}", *rules]))


def _rules(number: int, function: Mapping[str, Any], key: str) -> list[str]:
    """The rules of a call of one function."""
    strict = function.get("strict") is True
    schema = json_schema(function.get("parameters") or {"type": "object"}, strict=strict)
    known = json.loads(schema.text)
    options = {"lenient": not strict, "whitespace_pattern": schema.whitespace}
    content = json.dumps(known | {"x-guidance": options} if isinstance(known, dict) else known)
    head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": '
    return [
        f'function_{number}: {json.dumps(head)} arguments_{number} "}}"', f"arguments_{number}: %json {content}",
    ]
