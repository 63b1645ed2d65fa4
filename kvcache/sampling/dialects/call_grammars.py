"""The grammar of an answer that calls functions, or may, in the words of its dialect; thoughts may come before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvcache.errors import GrammarError
from kvcache.grammar import Grammar, lark
from kvcache.sampling.dialects.argument_schema import ArgumentSchema
from kvcache.sampling.dialects.grammar_words import GrammarWords, checked_keywords
from kvcache.sampling.dialects.harmony_reader import HarmonyReader
from kvcache.sampling.dialects.member_calls import MemberCalls
from kvcache.sampling.dialects.member_grammar import MemberGrammar
from kvcache.sampling.dialects.name_style import NameStyle
from kvcache.sampling.dialects.named_calls import NamedCalls
from kvcache.sampling.dialects.object_calls import ObjectCalls
from kvcache.sampling.dialects.object_style import LISTED_OBJECTS, LONE_OBJECTS, ObjectStyle
from kvcache.sampling.dialects.spoken_answer import MarkTokens
from kvcache.sampling.dialects.tag_calls import TagCalls
from kvcache.sampling.dialects.tag_grammar import TagGrammar
from kvcache.sampling.dialects.tag_style import TagStyle
from kvcache.sampling.dialects.tagged_reader import CALL_BEGINNINGS
from kvcache.support.arguments import short

__all__ = ["calls_grammar", "lead_of_answers"]

Function = Mapping[str, Any]
_ID = "[A-Za-z0-9_-]{1,12}"
_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}


def calls_grammar(
    marks: MarkTokens, functions: Sequence[Function], *, parallel: bool, thinks: bool, may_think: bool = True,
    free: bool = False, form: Grammar | None = None,
) -> Grammar | None:
    """The grammar of one call or more; None: the dialect has no calls.

    Args:
        marks: of the dialect.
        functions: those that may be called, with a name and perhaps `parameters`, `strict`, and `format`: "lark" or
            "regex" and a grammar in it, of the one text that is all arguments.
        parallel: whether there may be several calls.
        thinks: whether the prompt has begun a thought.
        may_think: whether one may come where it has not.
        free: whether the answer may be any text as well, before calls and behind them; what begins as a call then
            becomes one.
        form: a schema of what the answer may be in place of calls.

    Raises:
        GrammarError: parameters that are no schema, or beyond a limit; those of a strict function that the dialect
            cannot follow, or a name that it cannot write.
    """
    dialect, words = marks.dialect, GrammarWords(marks)
    content = "" if form is None else words.json(json.loads(form.text), strict=form.strict)
    if dialect.reader is HarmonyReader:
        start = _harmony(words, functions, free, content)
    elif dialect.calls is None or (write := _WRITERS.get(dialect.stream)) is None:
        return None
    else:
        if dialect.leads and content:
            write = _json_objects
        written = words.rule(write(words, functions, parallel))
        if free:
            start = _free(words, written, parallel, thinks)
        else:
            calls = _alone(words, written, parallel)
            thought = words.thought(thinks, *dialect.call_marks) if thinks or may_think else ""
            start = f"{thought} {words.first} {words.silence} {f'({calls} | {content})' if content else calls}"
    return lark("\n".join([f"start: {start}", *words.rules]))


def _alone(words: GrammarWords, written: str, parallel: bool, *, opens: bool = True) -> str:
    """Calls and nothing else, from what stands between their marks; `opens`: with the first mark of their section."""
    dialect = words.marks.dialect
    if dialect.leads:
        return written
    begin, end = map(words.mark, dialect.calls or ("", ""))
    call = words.rule(f"{begin} {written} {end}")
    calls = f"{call} ({words.gap} {call})*" if parallel and end else call
    first, last = map(words.mark, dialect.section or ("", ""))
    gap = words.gap if dialect.section else ""
    return f"{first if opens else ''} {gap} {calls} {gap} {last}"


def _free(words: GrammarWords, written: str, parallel: bool, thinks: bool) -> str:
    """Any text in which each mark that begins calls, outside of thoughts, is followed by some."""
    opening, calls = "" if thinks else words.opening, words.marks.dialect.call_marks
    free = f"{words.thought(thinks, *calls)} {_among_texts(words, written, parallel)}"
    if not opening:
        return free
    end = words.marks.dialect.thoughts[1]  # type: ignore[index]  # has an opening
    thought = words.text_from(opening, end, *calls)
    return f"{thought} {_among_texts(words, written, parallel)} | {_among_texts(words, written, parallel, opening)}"


def _among_texts(words: GrammarWords, written: str, parallel: bool, opening: str = "") -> str:
    """Any text that does not begin as `opening`, a regular expression, with calls in it."""
    dialect = words.marks.dialect
    begin, end = dialect.calls or ("", "")
    inner = dialect.lone.calls[:1] if dialect.lone else ()
    if dialect.leads:
        close = f"{words.mark(end)}?" if end else ""
        return f"({words.without(begin, inner, CALL_BEGINNINGS, opening)} | {words.mark(begin)}? {written} {close})"
    if dialect.section is None:
        call = words.rule(f"{written} {words.mark(end)}")
    else:
        call, inner, begin = words.rule(_alone(words, written, parallel, opens=False)), (begin,), dialect.section[0]
    more = f"({words.before(begin, inner)} {call})*" if parallel else ""
    first = f"{words.before(begin, inner, opening)} {call} {more} {words.without(begin, inner)}"
    return f"({first} | {words.without(begin, inner, opening)})"


def lead_of_answers(marks: MarkTokens, *, thinks: bool, may_think: bool) -> str:
    """The rule `lead` in Lark of what comes before the content of an answer; "": nothing.

    Args:
        marks: of the dialect.
        thinks: whether the prompt has begun a thought.
        may_think: whether one may come where it has not.
    """
    words = GrammarWords(marks)
    if marks.dialect.reader is HarmonyReader:
        final = f'{words.mark("<|channel|>")} "final" {words.mark("<|message|>")}'
        lead = f"{_analysis(words) if may_think else ''} {final}"
    else:
        lead = f"{words.thought(thinks) if thinks or may_think else ''} {words.silence}".strip()
    return "\n".join([f"lead: {lead}", *words.rules]) if lead else ""


def _names(functions: Sequence[Function], pattern: str) -> None:
    """Raise GrammarError for a name that a dialect cannot write."""
    for function in functions:
        if not re.fullmatch(pattern, function["name"]):
            raise GrammarError(f"grammar: expected names that this network can write, got {short(function['name'])}")


def _schema(function: Function) -> Any:
    return function.get("parameters") or {"type": "object"}


def _of_members(functions: Sequence[Function]) -> Iterator[tuple[Function, ArgumentSchema, bool]]:
    """Functions whose arguments are written member by member, their schemas, and whether they are strict."""
    for function in functions:
        known, strict = ArgumentSchema(_schema(function)), function.get("strict") is True
        checked_keywords(known.whole(), _OBJECT, strict=strict)
        yield function, known, strict


def _json_of(words: GrammarWords, function: Function) -> str:
    """The arguments of a function in JSON."""
    schema, strict = _schema(function), function.get("strict") is True
    syntax, definition = function.get("format") or ("", "")
    if syntax == "lark":
        raise GrammarError(f"grammar: expected a regex or text of {short(function['name'])} in JSON, got a lark")
    if syntax == "regex":
        (key,) = schema["properties"]
        schema = schema | {"properties": {key: {"type": "string", "pattern": f"^(?:{definition})$"}}}
    return words.json(schema, strict=strict or bool(syntax))


# -- objects of JSON ----------------------------------------------------------------------------------------------


def _objects(words: GrammarWords, functions: Sequence[Function], parallel: bool) -> str:
    dialect = words.marks.dialect
    style = dialect.style if isinstance(dialect.style, ObjectStyle) else LONE_OBJECTS
    if isinstance(dialect.style, NameStyle):  # of a family whose older networks write lists
        style = LISTED_OBJECTS
    some = []
    for function in functions:
        arguments = _json_of(words, function)
        head = f"{style.before}{json.dumps(function['name'], ensure_ascii=False)}{style.behind}"
        some.append(words.rule(f'{json.dumps(head, ensure_ascii=False)} {arguments} "}}"'))
    one = f"({' | '.join(some)})"
    if style.listed:
        more = f'(", " {one})*' if parallel else ""
        return f'"[" {one} {more} "]"'
    gap = words.literal(style.gap)
    return f"{gap} {one} {gap}"


def _json_objects(words: GrammarWords, functions: Sequence[Function], parallel: bool) -> str:
    """One object, written as freely as any JSON, with the same lexemes: an answer in a form may begin as it does."""
    style = words.marks.dialect.style
    assert isinstance(style, ObjectStyle), "a dialect whose answers begin as calls do has objects"
    name, arguments = re.findall(r'"(\w+)"', style.before + style.behind)
    some = []
    for function in functions:
        inner = _moved(_schema(function), f"#/properties/{arguments}")
        schema = {
            "type": "object", "properties": {name: {"const": function["name"]}, arguments: inner},
            "required": [name, arguments], "additionalProperties": False,
        }
        some.append(words.json(schema, strict=function.get("strict") is True))
    return f"({' | '.join(some)})"


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references are to itself at another place of a larger one."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in ("const", "enum") else _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        found["$ref"] = place + reference[1:]
    return found


# -- names --------------------------------------------------------------------------------------------------------


def _named(words: GrammarWords, functions: Sequence[Function], parallel: bool) -> str:
    style = words.marks.dialect.style
    assert isinstance(style, NameStyle), "a dialect of names has a style"
    if not style.is_written:
        return _objects(words, functions, parallel)
    _names(functions, r"[^\s<\[{:]+")
    some, number, id = [], '":" /[0-9]+/' if style.counts else "", f"/{_ID}/" if style.has_ids else ""
    for function in functions:
        arguments = _json_of(words, function)
        for _, before, behind, close in style.forms:
            head = f"{id} {words.literal(before + function['name'])} {number} {words.literal(behind)}"
            some.append(words.rule(f"{head} {arguments} {words.literal(close)}"))
    return f"({' | '.join(some)})"


# -- tags ---------------------------------------------------------------------------------------------------------


def _tags(words: GrammarWords, functions: Sequence[Function], parallel: bool) -> str:
    style = words.marks.dialect.style
    assert isinstance(style, TagStyle), "a dialect of tags names them"
    _names(functions, style.name_pattern)
    some = [
        TagGrammar(words, style, known, strict=strict).call(function["name"], function.get("format"))
        for function, known, strict in _of_members(functions)
    ]
    in_lines = style.in_lines or style.nests
    call, line = f"({' | '.join(some)})", '"\\n"' if in_lines else ""
    if style.several and parallel:
        call = f'{call} ({line} {call})*'
    return f'"\\n" {call} "\\n"' if in_lines else call


# -- members ------------------------------------------------------------------------------------------------------


def _members(words: GrammarWords, functions: Sequence[Function], parallel: bool) -> str:
    _names(functions, r"[^{\s]+")
    some = []
    for function, known, strict in _of_members(functions):
        members, schema = MemberGrammar(words, known, strict=strict), known.whole()
        free = words.formed(function.get("format"))
        arguments = members.of_text(next(iter(schema["properties"])), free) if free else members.object(schema)
        some.append(f"{json.dumps('call:' + function['name'], ensure_ascii=False)} {arguments}")
    return f"({' | '.join(some)})"


# -- messages -----------------------------------------------------------------------------------------------------


def _harmony(words: GrammarWords, functions: Sequence[Function], free: bool, content: str) -> str:
    """One call, which ends the answer, or the last message; words to the user may come before.

    Without them there is a thought at most, and `content`, the rule of the last message; "": there must be a call.
    """
    _names(functions, r"[^\s<]+")
    channel, message = words.mark("<|channel|>"), words.mark("<|message|>")
    some = []
    for function in functions:
        arguments = _json_of(words, function)
        head = json.dumps(f"commentary to=functions.{function['name']} ", ensure_ascii=False)
        some.append(words.rule(f'{head} {words.mark("<|constrain|>")} "json" {message} {arguments}'))
    if not free:
        some += [f'"final" {message} {content}'] if content else []
        return f"{_analysis(words)} {channel} ({' | '.join(some)})"
    said = f'{words.text_until("<|end|>")} {words.mark("<|start|>")} "assistant"'
    before = f'({channel} ("analysis" | "commentary") {message} {said})*'
    return f'{before} {channel} ({" | ".join(some)} | "final" {message} {words.without("<|end|>")})'


def _analysis(words: GrammarWords) -> str:
    """A thought, which may come first."""
    head = f'{words.mark("<|channel|>")} "analysis" {words.mark("<|message|>")}'
    return f'({head} {words.text_until("<|end|>")} {words.mark("<|start|>")} "assistant")?'


_WRITERS: dict[Any, Callable[[GrammarWords, Sequence[Function], bool], str]] = {
    ObjectCalls: _objects, NamedCalls: _named, TagCalls: _tags, MemberCalls: _members,
}
