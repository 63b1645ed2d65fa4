"""Grammars: their arguments and their bounds, which a hostile schema meets before it is compiled."""

import json
import time
from contextlib import nullcontext

import pytest

from kvcache import SamplingParams
from kvcache.errors import GrammarError
from kvcache.grammar import Grammar, json_object, json_schema, lark, regex

pytestmark = pytest.mark.one_build


def test_equal_grammars_are_equal():
    assert json_schema({"type": "object"}) == json_schema('{"type": "object"}') == json_object()
    assert len({regex("a"), regex("a"), lark("a"), regex("b")}) == 3
    assert json_schema(True).text == "true"
    assert list(json.loads(json_schema({"b": 1, "a": 2}).text)) == ["b", "a"], "the order is that of the properties"
    assert SamplingParams(grammar=regex("a")) == SamplingParams(grammar=regex("a"))
    assert repr(regex("a+")) == "Grammar(regex, 'a+')"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], r"a dict or a bool, got \[\]"), ("[]", r"a dict or a bool, got \[\]"),
        ("{", "a JSON schema, got an error"), (None, "a dict or a bool, got None"),
        ({"a": {1}}, "a JSON schema, got an error"),
        ({"minimum": float("nan")}, "a JSON schema, got an error"), ("\ud800", "Unicode text, got a lone surrogate"),
        ("[" * 100_000, "a JSON schema, got an error"),
        ({"enum": ["x" * 100] * 3000}, "at most 262144 bytes of json_schema, got 3"),
        ({"properties": {f"p{i}": True for i in range(4096)}}, "at most 4096 members of objects, got 4097"),
        ({"patternProperties": {f"p{i}": True for i in range(65)}}, "at most 64 patterns of properties, got 65"),
        ({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(400)}, "$ref": "#/$defs/d0"},
         "at most 1024 references times its depth, got"),
    ],
)
def test_no_schema(schema, message):
    with pytest.raises(GrammarError, match=f"grammar: expected .*{message}"):
        json_schema(schema)


def test_references_to_themselves():
    """A text that comes to one could not go on."""
    for schema in (
        {"$ref": "#"}, {"properties": {"a": {"$ref": "#/properties/a", "title": "x"}}},
        {"$defs": {"a/b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/a~1b"}}, "items": [{"$ref": "#/$defs/c"}]},
    ):
        with pytest.raises(GrammarError, match="grammar: expected references to schemas, got one to itself, '#"):
            json_schema(schema)
    tree = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"anyOf": [{"$ref": "#/properties/a"}]}}}
    assert json_schema(tree | {"$defs": {"x": {"$ref": "#/$defs/none"}, "y": {"$ref": "other"}}})


def test_rules_are_counted_in_linear_time():
    """Whatever is on the lines: a count by the square of them takes a minute."""
    began = time.process_time()
    for line in ("", " ", "\t ", "?", "!x", "{"):
        text = 'start: "a"' + f"\n{line}" * ((1 << 16) // (len(line) + 1) - 10)
        with nullcontext() if not line.strip("?\t ") else pytest.raises(GrammarError, match="at most 1000 rules"):
            lark(text)
    assert time.process_time() - began < 10
    with pytest.raises(GrammarError, match="got 1001 and 0"):
        lark("\n \n".join(f" {('', '?', '!')[i % 3]}r{i}: r{i + 1}" for i in range(1001)))


def test_no_grammar():
    many = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1000))
    for make, message in (
        (lambda: lark(many), "at most 1000 rules and braces, got 1001 and 0"),
        (lambda: lark("start: %json " + "{" * 1001), "at most 1000 rules and braces, got 1 and 1001"),
        (lambda: regex("a" * (1 << 16 | 1)), "at most 65536 bytes of regex, got 65537"),
        (lambda: regex("\udfff"), "Unicode text"),
    ):
        with pytest.raises(GrammarError, match=message):
            make()
    for make, message in (
        (lambda: regex(b"a"), "text: expected a str, got bytes"),
        (lambda: SamplingParams(grammar="a"), "grammar: expected a Grammar, got str"),
        (lambda: json_schema({}, strict=1), "strict: expected a bool"),
        (lambda: json_schema({}, whitespace=None), "whitespace: expected a str"),
    ):
        with pytest.raises(TypeError, match=message):
            make()
    with pytest.raises(ValueError, match="kind: expected json_schema, regex or lark, got 'gbnf'"):
        Grammar("gbnf", "a")
